"""Caches a frozen model's outputs for rows that recur every epoch.

Rows are computed in groups of similar length that depend only on the data, not on the batches: a run resumed with an
empty cache continues bit for bit like an uninterrupted one.

Legend: B = rows, L = positions (n of one row), D = model width, F = feature width.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, ModelOutput

_GROUP = 2048  # positions computed together: more is no faster, fewer leave a CPU idle

TokenRow = tuple[int, ...]


class OutputCache:
    """The outputs of `model` under causal attention: those of expected rows are cached, within a memory limit; all
    others are computed each time, row by row."""

    def __init__(self, model: LanguageModel, *, taps: Sequence[int], max_mb: float) -> None:
        """Caches at most `max_mb` MiB on the model's device; 0 caches nothing. Raises UserError if negative."""
        if max_mb < 0:
            raise UserError(f"method.feature_cache_mb={max_mb} must be at least 0 (0: features are computed each time)")
        self._model, self._taps = model, tuple(taps)
        self._room = int(max_mb * 2**20 / (model.dtype.itemsize * model.hidden_size * (1 + len(self._taps))))
        self._group: dict[TokenRow, list[TokenRow]] = {}  # the rows that an expected row is computed with
        self._cached: dict[TokenRow, ModelOutput] = {}

    def expect(self, rows: Iterable[Sequence[int]]) -> None:
        """Announces rows that will recur; the shortest are cached, as many as fit."""
        room, group = self._room, list[TokenRow]()
        for row in sorted({tuple(row) for row in rows}, key=lambda row: (len(row), row)):
            if (room := room - len(row)) < 0:
                break
            if (len(group) + 1) * len(row) > _GROUP:
                group = []
            group.append(row)
            self._group[row] = group

    def clear(self) -> None:
        self._cached.clear()

    @torch.no_grad()
    def __call__(self, ids_BL: Tensor, length_B: Sequence[int]) -> ModelOutput:
        """Hidden states and features of the first length_B[b] positions of each row; zeros after them."""
        outputs = [self._row(row[:n]) for row, n in zip(ids_BL, length_B, strict=True)]
        missing = ids_BL.shape[1] - max(length_B)

        def padded(parts: Sequence[Tensor]) -> Tensor:
            return torch.nn.functional.pad(pad_sequence(list(parts), batch_first=True), (0, 0, 0, missing))

        return ModelOutput(padded([o.hidden_BLD for o in outputs]), padded([o.features_BLF for o in outputs]))

    def _row(self, ids_n: Tensor) -> ModelOutput:
        """Outputs [n, D] and [n, F] of one row."""
        row = tuple(ids_n.tolist())
        if row not in self._cached:
            if row not in self._group:
                return self._computed([row], ids_n.device)[0]
            group = self._group[row]
            self._cached |= zip(group, self._computed(group, ids_n.device), strict=True)
        return self._cached[row]

    def _computed(self, rows: Sequence[TokenRow], device: torch.device) -> list[ModelOutput]:
        ids_BL = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        output = self._model(ids_BL, taps=self._taps)
        return [
            ModelOutput(output.hidden_BLD[b, : len(row)].clone(), output.features_BLF[b, : len(row)].clone())
            for b, row in enumerate(rows)
        ]
