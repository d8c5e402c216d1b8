"""The data module of the embedded corpus, packed into rows of whole documents. Legend: B = rows, L = positions."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from data.chat import PromptPolicy, prompt_ids, response_ids
from data.embedded.corpus import corpus
from data.loaders import Document, held_out, shuffled
from data.regenerate import Response
from dspec.errors import UserError
from dspec.method import Batch
from dspec.models.target_model import TargetModel


class PackedCorpus(L.LightningDataModule):
    """The embedded corpus as packed rows of whole documents (prompt, response, end), for the AR base."""

    def __init__(
        self,
        *,
        target: TargetModel,
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

    def responses(self) -> list[Response]:
        """Raises UserError: the corpus has its own."""
        raise UserError("the embedded corpus has its own responses: there is nothing to regenerate with this data")

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
    supervised_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0
        for number, (ids, start) in enumerate(row):
            end = at + len(ids)
            ids_BL[i, at:end] = torch.tensor(ids)
            document_BL[i, at:end] = number
            positions_BL[i, at:end] = torch.arange(len(ids))
            supervised_BL[i, at + start : end] = True
            at = end
    return Batch(ids_BL, supervised_BL, document_BL, positions_BL)
