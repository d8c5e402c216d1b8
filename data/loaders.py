"""Loaders of training and validation rows: each rank's share, in an order that depends only on seed and epoch.

torchdata's StatefulDataLoader stores the position in an epoch, so a resumed run continues mid-epoch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dspec.errors import UserError
from dspec.seeding import epoch_seed

Document = tuple[list[int], int]  # ids, and where the response starts


@dataclass(frozen=True)
class RankInfo:
    """Which of the `ranks` processes that train together this one is."""

    rank: int
    ranks: int

    @classmethod
    def of_trainer(cls, module: L.LightningDataModule) -> "RankInfo":
        trainer = module.trainer
        return cls(0, 1) if trainer is None else cls(trainer.global_rank, trainer.world_size)


class Shuffle(Sampler[int]):
    """The rows of one rank, `batch_size` per batch, in an order that depends only on seed and epoch.

    In each step all ranks together see the batch that a single rank would see with a batch size `ranks` times as large:
    each takes every `ranks`-th row of it. An incomplete last batch is dropped (unless it is the only one). With a
    window, rows are sorted by length within windows of about that many rows, so that a batch holds rows of similar
    length, and the batches are then shuffled.

    A generator that kept running across epochs would be in another state after a resume. Lightning calls `set_epoch`,
    but after a resume only from the second epoch on.
    """

    def __init__(
        self, lengths: Sequence[int], *, batch_size: int, window: int | None, seed: int, epoch: int, rank_info: RankInfo
    ) -> None:
        self.lengths, self.window, self.seed, self.epoch, self.rank_info = lengths, window or 0, seed, epoch, rank_info
        self.global_batch = batch_size * rank_info.ranks
        if len(lengths) < rank_info.ranks:
            raise UserError(
                f"{len(lengths)} training rows are too few for {rank_info.ranks} ranks: raise the prompt count"
            )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank_info.rank, self._used, self.rank_info.ranks))

    @property
    def _used(self) -> int:
        """Rows used, over all ranks."""
        rows = len(self.lengths)
        return rows - rows % self.global_batch if rows >= self.global_batch else rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
        rows = torch.randperm(len(self.lengths), generator=generator).tolist()[: self._used]
        if self.window:
            whole = max(1, self.window // self.global_batch) * self.global_batch  # batches do not cross windows
            rows = [row for part in _parts(rows, whole) for row in sorted(part, key=self.lengths.__getitem__)]
            batches = _parts(rows, self.global_batch)
            rows = [row for i in torch.randperm(len(batches), generator=generator).tolist() for row in batches[i]]
        for batch in _parts(rows, self.global_batch):
            yield from batch[self.rank_info.rank :: self.rank_info.ranks]


def _parts(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def epoch_of(module: L.LightningDataModule) -> int:
    """The epoch that training starts or resumes with."""
    return module.trainer.current_epoch if module.trainer is not None else 0


class _Loader(StatefulDataLoader):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position in an epoch. Lightning counts one that just ended as done: the next one is whole."""
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
    """This rank's training loader, in a different order each epoch (see Shuffle)."""
    epoch, rank_info = epoch_of(module), RankInfo.of_trainer(module)
    sampler = Shuffle(lengths, batch_size=batch_size, window=window, seed=seed, epoch=epoch, rank_info=rank_info)
    return _Loader(rows, batch_size=batch_size, sampler=sampler, collate_fn=collate)


def held_out(
    rows: Sequence[Any], *, batch_size: int, collate: Callable[..., Any], module: L.LightningDataModule
) -> StatefulDataLoader:
    """A validation loader: each row on exactly one rank, and equally many batches on each."""
    batches = shares(rows, batch_size=batch_size, rank_info=RankInfo.of_trainer(module))
    return StatefulDataLoader(batches, batch_size=None, collate_fn=collate)


def shares(rows: Sequence[Any], *, batch_size: int, rank_info: RankInfo) -> list[Sequence[Any]]:
    """One rank's batches of all rows in order: no row missing or repeated, equally many batches on each rank.

    Raises UserError if there are fewer rows than ranks.
    """
    if 0 < len(rows) < rank_info.ranks:
        raise UserError(f"{len(rows)} validation rows are too few for {rank_info.ranks} ranks: raise data.validation")
    batches = _parts(rows, batch_size * rank_info.ranks)
    if len(batches) > 1 and len(batches[-1]) < rank_info.ranks:  # too few for one row per rank
        batches[-2:] = [[*batches[-2], *batches[-1]]]
    return [batch[rank_info.rank :: rank_info.ranks] for batch in batches]
