"""The data module of tokenised conversations, one per row, for drafters, AS-ARM and diffusion LMs.

Everything is a function of the seed. Each rank loads its own share of every batch (data/loaders.py): the trainer must
not distribute the rows again (use_distributed_sampler: false). Legend: B = rows, L = positions.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import lightning as L
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from data.chat import PromptPolicy, prompt_ids, response_ids
from data.loaders import Document, held_out, shuffled
from data.prompts import PromptSource, TrainingPrompt
from data.regenerate import Response, regenerate, settings_key
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.method import Batch
from dspec.models.language_model import require_causal
from dspec.models.target_model import TargetModel
from dspec.provenance import fingerprint


class Regeneration(TypedDict):
    """How the target writes responses, and how many at a time."""

    temperature: float
    top_p: float
    max_new_tokens: int
    batch_size: int


class Conversations(L.LightningDataModule):
    """Prompts with the target's own responses (generated once, then read back), or with the corpus's."""

    def __init__(
        self,
        *,
        target: TargetModel,
        source: PromptSource,
        policy: PromptPolicy,
        regeneration: Regeneration | None,
        cache_dir: str,
        batch_size: int,
        max_length: int,
        sort_window: int | None,
        validation: int,
        seed: int,
    ) -> None:
        """`regeneration` None uses the corpus's responses.
        Rows are cut to `max_length` tokens; `validation` rows are held out of training. Batches hold rows of similar
        length, sorted within windows of `sort_window` rows (None: no sorting)."""
        super().__init__()
        self.target, self.source, self.policy = target, source, policy
        self.regeneration = regeneration
        self.cache_dir = Path(cache_dir).expanduser()
        self.batch_size, self.max_length, self.validation, self.seed = batch_size, max_length, validation, seed
        self.sort_window = sort_window
        # now: a method may add adapters to it, and trains in float32
        self._target_sha256, self._target_dtype = fingerprint(target.model), str(target.dtype)
        self._rows: list[Document] = []
        if target.tokenizer is None or target.tokenizer.chat_template is None:
            raise UserError(f"target {target.name!r} has no chat template; use an instruction-tuned target")

    @property
    def prompt_policy(self) -> dict[str, Any]:
        return self.policy.to_dict(self.target.tokenizer)

    def encoded(self, split: str) -> list[tuple[str, list[int]]]:
        """(id, prompt ids) of a split; the calibration split is for STS, never for training."""
        prompts = self.source.prompts(split)
        return [(p.id, prompt_ids(self.target.tokenizer, p.text, self.policy)) for p in prompts]

    def settings(self) -> dict[str, Any]:
        """Everything that the generated responses depend on besides the prompts."""
        return {
            "target": self.target.name,
            "target_sha256": self._target_sha256,
            "prompt_policy": self.prompt_policy,
            "regeneration": dict(self.regeneration or {}),
            "stop_ids": list(self.target.stop_ids),
            "dtype": self._target_dtype,
            "seed": self.seed,
        }

    @property
    def responses_path(self) -> Path:
        return self.cache_dir / "responses" / f"{self.source.name}-{settings_key(self.settings())}.jsonl"

    def responses(self) -> list[Response]:
        """The target's responses to the training prompts, generated where missing."""
        if self.regeneration is None:
            raise UserError(
                "data.regeneration is null: there is nothing to regenerate; set its sampling, or train as it is"
            )
        wanted: dict[str, Any] = {**self.regeneration}
        batch_size, max_new = wanted.pop("batch_size"), wanted.pop("max_new_tokens")
        return regenerate(
            path=self.responses_path,
            settings=self.settings(),
            prompts=self.encoded("train"),
            decoder=Autoregressive(target=require_causal(self.target)),
            sampling=Sampling(**wanted),
            stop_ids=self.target.stop_ids,
            max_new_tokens=max_new,
            batch_size=batch_size,
            seed=self.seed,
            describe=lambda tokens: self.target.tokenizer.decode(tokens, skip_special_tokens=True),
        )

    def prepare_data(self) -> None:
        if self.regeneration is not None:
            self.responses()

    def setup(self, stage: str) -> None:
        if self._rows:
            return
        if self.regeneration is not None:
            self._rows = [self._row(r.prompt_tokens, r.tokens) for r in self.responses()]
        else:
            self._rows = [self._corpus_row(p) for p in self.source.prompts("train")]
        self._rows = [(ids, start) for ids, start in self._rows if len(ids) > start + 1]
        if (longest := max((len(ids) for ids, _ in self._rows), default=0)) > self.target.max_positions:
            raise UserError(
                f"a row of {longest} tokens exceeds the context of {self.target.name!r} ({self.target.max_positions} "
                f"positions): set data.max_length={self.target.max_positions} or less"
            )
        if len(self._rows) <= self.validation:
            raise UserError(f"{len(self._rows)} usable responses leave nothing to train on; raise the prompt count")

    @property
    def rows(self) -> list[list[int]]:
        """The token rows of an epoch and of validation."""
        return [ids for ids, _ in self._rows]

    def _digest(self) -> str:
        """A digest of the training rows, in order."""
        digest = hashlib.sha256()
        for ids, start in self._rows:
            digest.update(torch.tensor([start, *ids], dtype=torch.int32).numpy().tobytes())
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must match: Lightning stores it in the checkpoint."""
        return {"rows": self._digest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError if the training data has changed: a run cannot continue in the middle of other data."""
        if state_dict["rows"] != self._digest():
            raise UserError(
                "the training data (prompts or responses) is not what this run started with: restore it, or start a "
                "new run"
            )

    def _row(self, prompt: Sequence[int], response: Sequence[int]) -> Document:
        return [*prompt, *response][: self.max_length], len(prompt)

    def _corpus_row(self, prompt: TrainingPrompt) -> Document:
        if prompt.response is None:
            raise UserError(f'prompt {prompt.id} has no "response"; add one, or set data.regeneration')
        tokenizer = self.target.tokenizer
        return self._row(prompt_ids(tokenizer, prompt.text, self.policy), response_ids(tokenizer, prompt.response))

    def train_dataloader(self) -> StatefulDataLoader:
        rows = self._rows[self.validation :]
        return shuffled(
            rows,
            lengths=[len(ids) for ids, _ in rows],
            batch_size=self.batch_size,
            window=self.sort_window,
            collate=pad,
            module=self,
            seed=self.seed,
        )

    def val_dataloader(self) -> StatefulDataLoader:
        return held_out(self._rows[: self.validation], batch_size=self.batch_size, collate=pad, module=self)


def pad(rows: Sequence[Document]) -> Batch:
    """Right-padded rows of (ids, where the response starts); the response is supervised."""
    length = max(len(ids) for ids, _ in rows)
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    supervised_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (ids, start) in enumerate(rows):
        ids_BL[i, : len(ids)] = torch.tensor(ids)
        supervised_BL[i, start : len(ids)] = True
    return Batch(ids_BL, supervised_BL)
