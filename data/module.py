"""Data modules: tokenised conversations for drafters, packed documents for the AR base.

Everything is a function of the seed; where an epoch stands lives in torchdata's StatefulDataLoader, so a resumed run
goes on mid-epoch. Each rank loads its own share of every batch: the trainer must not share the rows out once more
(use_distributed_sampler: false). Legend: B = rows, L = positions.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from data.chat import PromptPolicy, prompt_ids, response_ids
from data.embedded.corpus import corpus
from data.prompts import Prompt, PromptSource
from data.regenerate import Response, regenerate, settings_key
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.method import Batch
from dspec.models.language_model import LanguageModel
from dspec.provenance import fingerprint
from dspec.seeding import epoch_seed

Document = tuple[list[int], int]  # ids, and where the response starts


class Conversations(L.LightningDataModule):
    """Prompts with the target's own responses (regenerated once, then read back), or with the corpus's."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        source: PromptSource,
        policy: PromptPolicy,
        regeneration: Mapping[str, Any] | None,
        cache_dir: str,
        batch_size: int,
        max_length: int,
        sort_window: int | None,
        validation: int,
        seed: int,
    ) -> None:
        """`regeneration` has temperature, top_p, max_new_tokens, batch_size; None takes the corpus's responses.
        Rows longer than `max_length` tokens are cut; `validation` rows are held out of training. Batches hold rows of
        like lengths, sorted within windows of `sort_window` rows (None: they are not)."""
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
            raise UserError(f"target {target.name!r} has no chat template; take an instruction-tuned target")

    @property
    def prompt_policy(self) -> dict[str, Any]:
        return self.policy.to_dict(self.target.tokenizer)

    def encoded(self, split: str) -> list[tuple[str, list[int]]]:
        """(id, prompt ids) of a split; the calibration split is for STS, never for training."""
        prompts = self.source.prompts(split)
        return [(p.id, prompt_ids(self.target.tokenizer, p.text, self.policy)) for p in prompts]

    def settings(self) -> dict[str, Any]:
        """What the regenerated responses depend on besides the prompts."""
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
                "data.regeneration is null: there is nothing to regenerate; set its sampling, or train as is"
            )
        wanted = dict(self.regeneration)
        batch_size, max_new = wanted.pop("batch_size"), wanted.pop("max_new_tokens")
        return regenerate(
            path=self.responses_path,
            settings=self.settings(),
            prompts=self.encoded("train"),
            decoder=Autoregressive(target=self.target, sampling=Sampling(**wanted)),
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
        if len(self._rows) <= self.validation:
            raise UserError(f"{len(self._rows)} usable responses leave nothing to train on; raise the prompt count")

    def _digest(self) -> str:
        """Of the rows that are trained on, in their order."""
        digest = hashlib.sha256()
        for ids, start in self._rows:
            digest.update(torch.tensor([start, *ids], dtype=torch.int32).numpy().tobytes())
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must find: Lightning keeps it in the checkpoint."""
        return {"rows": self._digest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError when the training data have changed: a run cannot go on in the middle of other data."""
        if state_dict["rows"] != self._digest():
            raise UserError(
                "the training data (prompts or responses) are not those that this run began with: bring them back, or "
                "start a new run"
            )

    def _row(self, prompt: Sequence[int], response: Sequence[int]) -> Document:
        return [*prompt, *response][: self.max_length], len(prompt)

    def _corpus_row(self, prompt: Prompt) -> Document:
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


@dataclass(frozen=True)
class Share:
    """One of `ranks` processes that train together."""

    rank: int
    ranks: int

    @classmethod
    def of_trainer(cls, module: L.LightningDataModule) -> "Share":
        trainer = module.trainer
        return cls(0, 1) if trainer is None else cls(trainer.global_rank, trainer.world_size)


class Shuffle(Sampler[int]):
    """The rows of one rank, `batch_size` to a batch, in an order that seed and epoch alone decide.

    All ranks together see, step by step, the batches that one rank would see whose batch is `ranks` times as large:
    each takes every `ranks`-th row of them. What does not fill the last of these is left out (unless it is the only
    one). With a window, rows are sorted by length within windows of about so many rows, so that a batch holds rows of
    like lengths, and the batches are then shuffled.

    A generator that runs on through the epochs would not be where it was after a resume. Lightning calls `set_epoch`,
    but after a resume only from the second epoch on.
    """

    def __init__(
        self, lengths: Sequence[int], *, batch_size: int, window: int | None, seed: int, epoch: int, share: Share
    ) -> None:
        self.lengths, self.window, self.seed, self.epoch, self.share = lengths, window or 0, seed, epoch, share
        self.together = batch_size * share.ranks
        if len(lengths) < share.ranks:
            raise UserError(f"{len(lengths)} training rows are too few for {share.ranks} ranks: raise the prompt count")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.share.rank, self._used, self.share.ranks))

    @property
    def _used(self) -> int:
        """Rows of all ranks."""
        rows = len(self.lengths)
        return rows - rows % self.together if rows >= self.together else rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
        rows = torch.randperm(len(self.lengths), generator=generator).tolist()[: self._used]
        if self.window:
            whole = max(1, self.window // self.together) * self.together  # batches do not cross windows
            rows = [row for part in _parts(rows, whole) for row in sorted(part, key=self.lengths.__getitem__)]
            batches = _parts(rows, self.together)
            rows = [row for i in torch.randperm(len(batches), generator=generator).tolist() for row in batches[i]]
        for batch in _parts(rows, self.together):
            yield from batch[self.share.rank :: self.share.ranks]


def _parts(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def epoch_of(module: L.LightningDataModule) -> int:
    """The epoch that training begins or goes on with."""
    return module.trainer.current_epoch if module.trainer is not None else 0


class _Loader(StatefulDataLoader):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Where an epoch stood. One that was just over is counted as done by Lightning: the next one is a whole one."""
        if state_dict["_num_yielded"] < len(self):
            super().load_state_dict(state_dict)


def shuffled(
    rows: Sequence[Any],
    *,
    lengths: Sequence[int],
    batch_size: int,
    window: int | None,
    collate: Callable[..., Any],
    module: L.LightningDataModule,
    seed: int,
) -> StatefulDataLoader:
    """A training loader in another order each epoch; this rank's share of it (see Shuffle)."""
    epoch, share = epoch_of(module), Share.of_trainer(module)
    sampler = Shuffle(lengths, batch_size=batch_size, window=window, seed=seed, epoch=epoch, share=share)
    return _Loader(rows, batch_size=batch_size, sampler=sampler, collate_fn=collate)


def held_out(
    rows: Sequence[Any], *, batch_size: int, collate: Callable[..., Any], module: L.LightningDataModule
) -> StatefulDataLoader:
    """A validation loader: every row on one rank, and as many batches on each."""
    batches = shares(rows, batch_size=batch_size, share=Share.of_trainer(module))
    return StatefulDataLoader(batches, batch_size=None, collate_fn=collate)


def shares(rows: Sequence[Any], *, batch_size: int, share: Share) -> list[Sequence[Any]]:
    """One rank's batches of all rows in their order: no row left out or twice, as many batches on each rank.

    Raises UserError when there are fewer rows than ranks.
    """
    if 0 < len(rows) < share.ranks:
        raise UserError(f"{len(rows)} validation rows are too few for {share.ranks} ranks: raise data.validation")
    batches = _parts(rows, batch_size * share.ranks)
    if len(batches) > 1 and len(batches[-1]) < share.ranks:  # too few for a row on each rank
        batches[-2:] = [[*batches[-2], *batches[-1]]]
    return [batch[share.rank :: share.ranks] for batch in batches]


def pad(rows: Sequence[Document]) -> Batch:
    """Right-padded rows of (ids, where the response starts); the response is supervised."""
    length = max(len(ids) for ids, _ in rows)
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    loss_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (ids, start) in enumerate(rows):
        ids_BL[i, : len(ids)] = torch.tensor(ids)
        loss_BL[i, start : len(ids)] = True
    return Batch(ids_BL, loss_BL)


class PackedCorpus(L.LightningDataModule):
    """The embedded corpus as packed rows of whole documents (prompt, response, end), for the AR base."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        policy: PromptPolicy,
        counts: Mapping[str, int],
        row_length: int,
        batch_size: int,
        validation: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.target, self.policy, self.counts = target, policy, counts
        self.row_length, self.batch_size, self.validation, self.seed = row_length, batch_size, validation, seed
        self._rows: list[list[Document]] = []

    @property
    def prompt_policy(self) -> dict[str, Any]:
        return self.policy.to_dict(self.target.tokenizer)

    def setup(self, stage: str) -> None:
        if self._rows:
            return
        tokenizer = self.target.tokenizer
        documents = []
        for e in corpus(counts=self.counts, split="train", seed=self.seed):
            prompt = prompt_ids(tokenizer, e.prompt, self.policy)
            documents.append(([*prompt, *response_ids(tokenizer, e.response)], len(prompt)))
        self._rows = pack_documents(documents, self.row_length)

    def train_dataloader(self) -> StatefulDataLoader:
        rows = self._rows[self.validation :]
        return shuffled(
            rows,
            lengths=[self.row_length] * len(rows),
            batch_size=self.batch_size,
            window=None,
            collate=self._collate,
            module=self,
            seed=self.seed,
        )

    def val_dataloader(self) -> StatefulDataLoader:
        return held_out(self._rows[: self.validation], batch_size=self.batch_size, collate=self._collate, module=self)

    def _collate(self, rows: Sequence[list[Document]]) -> Batch:
        return document_batch(rows, self.row_length)


def pack_documents(documents: Sequence[Document], length: int) -> list[list[Document]]:
    """Rows of whole documents, filled in order; raises UserError for a document longer than a row."""
    rows: list[list[Document]] = []
    room = 0
    for ids, start in documents:
        if len(ids) > length:
            raise UserError(f"a document of {len(ids)} tokens does not fit data.row_length={length}; raise it")
        if len(ids) > room:
            rows.append([])
            room = length
        rows[-1].append((ids, start))
        room -= len(ids)
    return rows


def document_batch(rows: Sequence[list[Document]], length: int) -> Batch:
    """Responses are supervised, prompts are not; padding is document -1."""
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    document_BL = torch.full((len(rows), length), -1)
    positions_BL = torch.zeros(len(rows), length, dtype=torch.long)
    loss_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0
        for number, (ids, start) in enumerate(row):
            end = at + len(ids)
            ids_BL[i, at:end] = torch.tensor(ids)
            document_BL[i, at:end] = number
            positions_BL[i, at:end] = torch.arange(len(ids))
            loss_BL[i, at + start : end] = True
            at = end
    return Batch(ids_BL, loss_BL, document_BL, positions_BL)
