"""What a frozen model gives for rows that come back every epoch, kept in memory instead of computed again.

Each row is computed alone, so that what is kept is a function of the row, whatever batch it came in: a run that is
resumed with an empty cache goes on bit by bit as an unbroken one.

Legend: B = rows, L = positions (n of one row), D = model width, F = feature width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, ModelOutput


class OutputCache:
    """The outputs of `model` under causal attention, up to a number of bytes; rows beyond are computed each time."""

    def __init__(self, model: LanguageModel, *, taps: Sequence[int], max_mb: float) -> None:
        """At most `max_mb` MiB are kept, on the model's device; 0 keeps nothing. Raises UserError for less."""
        if max_mb < 0:
            raise UserError(f"method.feature_cache_mb={max_mb} must be at least 0 (0: features are computed each time)")
        self._model, self._taps = model, tuple(taps)
        self._left = int(max_mb * 2**20)
        self._kept: dict[tuple[int, ...], ModelOutput] = {}

    @torch.no_grad()
    def __call__(self, ids_BL: Tensor, length_B: Sequence[int]) -> ModelOutput:
        """Hidden states and features of the first length_B[b] positions of each row; zeros behind them."""
        outputs = [self._row(row[:n]) for row, n in zip(ids_BL, length_B, strict=True)]
        behind = ids_BL.shape[1] - max(length_B)

        def padded(parts: Sequence[Tensor]) -> Tensor:
            return torch.nn.functional.pad(pad_sequence(list(parts), batch_first=True), (0, 0, 0, behind))

        return ModelOutput(padded([o.hidden_BLD for o in outputs]), padded([o.features_BLF for o in outputs]))

    def _row(self, ids_n: Tensor) -> ModelOutput:
        """[n, D] and [n, F] of one row."""
        key = tuple(ids_n.tolist())
        if (kept := self._kept.get(key)) is not None:
            return kept
        output = self._model(ids_n[None], taps=self._taps)
        found = ModelOutput(output.hidden_BLD[0], output.features_BLF[0])
        size = sum(part.numel() * part.element_size() for part in (found.hidden_BLD, found.features_BLF))
        if size <= self._left:
            self._left -= size
            self._kept[key] = found
        return found
