"""Texts for training, streamed: packed into rows of equal length, divided among the ranks, resumed at the same row.

Documents are read one by one and never held as a whole. Each rank reads documents of its own
(`split_dataset_by_node`: whole files where their number is a multiple of the ranks', else every n-th document),
shuffles them within a window, puts separators after each, and cuts the tokens into rows: no padding, no document mask,
so documents of a row see each other. Documents whose text has a certain hash are for validation, in every epoch and on
every rank. After the last document the next epoch begins, with another order: the stream has no end.

Source: arXiv 2504.20456, section 6 (rows of 512 tokens with separators between documents).
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from datasets import IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from data.chat import PromptPolicy
from data.loaders import RankInfo, held_out
from data.rows import read_jsonl
from dspec.errors import UserError
from dspec.method import Batch
from dspec.models.target_model import TargetModel
from dspec.seeding import prompt_seed


class Texts:
    """Documents of a JSON Lines file (`path`, plain or gzip), or of a data set on the Hub (`repo`)."""

    def __init__(self, *, path: str | None, repo: str | None, config: str | None, split: str, field: str) -> None:
        """`field` is the key of a document's text. Raises UserError unless one of `path` and `repo` is given."""
        if (path is None) == (repo is None):
            raise UserError("say where the texts are: data.source.path=<file.jsonl> or data.source.repo=<Hub id>")
        self.path = None if path is None else Path(path).expanduser()
        if self.path is not None and not self.path.is_file():
            raise UserError(f"no file of texts at {self.path}: set data.source.path")
        self.repo, self.config, self.split, self.field = repo, config, split, field

    @property
    def origin(self) -> str:
        return str(self.path) if self.path is not None else f"{self.repo} ({self.config}, {self.split})"

    def stream(self) -> IterableDataset:
        """Rows from the first on. Raises UserError if the data set cannot be opened."""
        if self.path is not None:
            return IterableDataset.from_generator(_rows_of_file, gen_kwargs={"path": str(self.path)})
        try:
            return load_dataset(self.repo, self.config, split=self.split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a data set of an old kind, with a script
            reason = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"cannot open {self.origin} on the Hub ({type(error).__name__}: {reason}); choose another, or set "
                "data.source.path=<file.jsonl>"
            ) from error

    def text(self, row: dict[str, Any]) -> str:
        """Raises UserError for a row without a text."""
        text = row.get(self.field)
        if not isinstance(text, str):
            raise UserError(f'{self.origin}: a row has no text under "{self.field}"; set data.source.field')
        return text


def _rows_of_file(path: str) -> Iterator[dict[str, Any]]:
    yield from (row for _, row in read_jsonl(Path(path)))


class PackedTexts(torch.utils.data.IterableDataset[list[int]]):
    """One rank's rows of `row_length` token ids, without end; its state is the place in the stream."""

    def __init__(
        self,
        source: Texts,
        tokenizer: PreTrainedTokenizerBase,
        *,
        separators: Sequence[int],
        row_length: int,
        window: int,
        validation_share: float,
        rank_info: RankInfo,
        seed: int,
    ) -> None:
        super().__init__()
        self.source, self.tokenizer, self.separators, self.row_length = source, tokenizer, separators, row_length
        self.window, self.validation_share, self.rank_info, self.seed = window, validation_share, rank_info, seed
        self._tokens: list[int] = []  # of documents that were read, after the last row
        self._epoch = self._windows = self._read = 0  # epochs and windows done, documents read of the window
        self._source_state: dict[str, Any] | None = None  # at the window's first document

    def __len__(self) -> int:
        """More rows than any run has. Lightning reads one batch ahead of data without a length, and a checkpoint would
        be one batch ahead of the step that it was saved after."""
        return 2**40

    def state_dict(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "epoch": self._epoch,
            "windows": self._windows,
            "read": self._read,
            "source": self._source_state,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tokens, self._epoch = list(state_dict["tokens"]), state_dict["epoch"]
        self._windows, self._read = state_dict["windows"], state_dict["read"]
        self._source_state = state_dict["source"]

    def __iter__(self) -> Iterator[list[int]]:
        """Raises UserError if there are no documents for this rank."""
        for text in self._texts():
            self._tokens = [*self._tokens, *encoded(self.tokenizer, text, self.separators)]
            while len(self._tokens) >= self.row_length:
                row, self._tokens = self._tokens[: self.row_length], self._tokens[self.row_length :]
                yield row

    def _texts(self) -> Iterator[str]:
        """This rank's training documents in their order, from the current place on."""
        while True:
            stream = split_dataset_by_node(self.source.stream(), self.rank_info.rank, self.rank_info.ranks)
            if self._source_state is not None:
                stream.load_state_dict(self._source_state)
            rows, found = iter(stream), self._windows > 0
            while window := list(islice(rows, self.window)):
                texts = [text for row in window if not self._validates(text := self.source.text(row)) and text.strip()]
                found = found or bool(texts)
                for i in self._order(len(texts))[self._read :]:
                    self._read += 1
                    yield texts[i]
                self._windows, self._read, self._source_state = self._windows + 1, 0, stream.state_dict()
            if not found:
                raise UserError(
                    f"{self.source.origin} has no training texts for rank {self.rank_info.rank}: add documents"
                )
            self._epoch, self._windows, self._source_state = self._epoch + 1, 0, None

    def _order(self, count: int) -> list[int]:
        seed = prompt_seed(self.seed, f"texts {self._epoch} {self._windows}")
        order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        return order

    def _validates(self, text: str) -> bool:
        return for_validation(text, self.validation_share)


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, separators: Sequence[int]) -> list[int]:
    """A document's tokens and the separators after it."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], *separators]


def for_validation(text: str, share: float) -> bool:
    """Whether a document is held out: the same for every copy of it, wherever it stands."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") < share * 2**48


class TextStream(L.LightningDataModule):
    """Packed rows of texts; all tokens are supervised."""

    def __init__(
        self,
        *,
        target: TargetModel,
        source: Texts,
        policy: PromptPolicy,
        separators: Sequence[str] | None,
        row_length: int,
        batch_size: int,
        window: int,
        validation: int,
        validation_share: float,
        seed: int,
    ) -> None:
        """`separators` are tokens put after each document (None: the tokenizer's end-of-text token). Documents are
        shuffled within `window`. Of the documents a `validation_share` is held out; the first `validation` rows of them
        are used. `policy` is for evaluation.

        Raises UserError for a separator that is no token, a row of one token or longer than the target's context, and
        where nothing would be held out.
        """
        super().__init__()
        if row_length < 2:
            raise UserError(f"data.row_length={row_length} must be at least 2: one token visible, one to predict")
        if row_length > target.max_positions:
            raise UserError(f"data.row_length={row_length} exceeds the {target.max_positions} positions of the target")
        if not 0 < validation_share < 1:
            raise UserError(f"data.validation_share={validation_share} must lie between 0 and 1")
        if validation < 1:
            raise UserError(f"data.validation={validation} must be at least 1: rows of the documents held out")
        self.target, self.source, self.policy = target, source, policy
        self.separators = _separators(target, separators)
        self.row_length, self.batch_size, self.window = row_length, batch_size, window
        self.validation, self.validation_share, self.seed = validation, validation_share, seed
        self._held_out: list[list[int]] = []

    @property
    def prompt_policy(self) -> dict[str, Any]:
        return self.policy.to_dict(self.target.tokenizer)

    def setup(self, stage: str) -> None:
        """Raises UserError if too few documents are held out."""
        if self._held_out:
            return
        tokens, empty = list[int](), True
        for row in self.source.stream():
            empty = False
            if len(tokens) >= self.validation * self.row_length:
                break
            if for_validation(text := self.source.text(row), self.validation_share) and text.strip():
                tokens += encoded(self.target.tokenizer, text, self.separators)
        if empty:
            raise UserError(f"{self.source.origin} has no documents: fill it, or name another")
        whole = [tokens[i : i + self.row_length] for i in range(0, len(tokens), self.row_length)]
        self._held_out = [row for row in whole if len(row) == self.row_length][: self.validation]
        if not self._held_out:
            raise UserError(
                f"{self.source.origin}: the documents held out ({100 * self.validation_share:g} % of all) fill no row "
                f"of {self.row_length} tokens; raise data.validation_share, or lower data.row_length"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must match: Lightning stores it in the checkpoint."""
        held = torch.tensor(self._held_out, dtype=torch.int32)
        return {"held_out": hashlib.sha256(held.numpy().tobytes()).hexdigest()[:16]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError if the texts have changed: a run cannot continue in the middle of others."""
        if state_dict != self.state_dict():
            raise UserError(
                f"the texts of {self.source.origin} are not what this run started with: restore them, or start a new "
                "run"
            )

    def train_dataloader(self) -> StatefulDataLoader:
        rows = PackedTexts(
            self.source,
            self.target.tokenizer,
            separators=self.separators,
            row_length=self.row_length,
            window=self.window,
            validation_share=self.validation_share,
            rank_info=RankInfo.of_trainer(self),
            seed=self.seed,
        )
        return StatefulDataLoader(rows, batch_size=self.batch_size, collate_fn=whole_rows)

    def val_dataloader(self) -> StatefulDataLoader:
        return held_out(self._held_out, batch_size=self.batch_size, collate=whole_rows, module=self)


def _separators(target: TargetModel, names: Sequence[str] | None) -> list[int]:
    """Raises UserError for a name that is no token, and without an end-of-text token where none are named."""
    if names is None:
        return [target.stop_ids[0]]
    vocabulary = target.tokenizer.get_vocab()
    if unknown := [name for name in names if name not in vocabulary]:
        raise UserError(f"data.separators: {unknown[0]!r} is no token of {target.name!r}")
    return [vocabulary[name] for name in names]


def whole_rows(rows: Sequence[list[int]]) -> Batch:
    ids_BL = torch.tensor(rows, dtype=torch.long)
    return Batch(ids_BL, torch.ones_like(ids_BL, dtype=torch.bool))
