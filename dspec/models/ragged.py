"""Rows of different lengths as one row of all their tokens, without padding.

Linear layers compute each token on its own, so they take the packed form and see exactly the sum of the lengths.
Attention needs rows: it takes the padded form.

Legend: B = rows, L = the longest row's length, N = sum of all lengths.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class RaggedRows:
    """The lengths of a batch's rows, each at least 1, and the way from the padded form [B, L, ...] to the packed one
    [1, N, ...] and back."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.longest, self._device = list(lengths), max(lengths), device
        self.even = min(lengths) == self.longest  # both forms are then views of the same memory

    @cached_property
    def _ends(self) -> Tensor:
        return torch.tensor(self.lengths).cumsum(0)

    @cached_property
    def last(self) -> Tensor:
        """Where each row's last token is among the N."""
        return (self._ends - 1).to(self._device)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Each token's row, and its index in that row."""
        valid_BL = torch.arange(self.longest) < torch.tensor(self.lengths)[:, None]
        row_N, index_N = valid_BL.nonzero().T.to(self._device)
        return row_N, index_N

    @cached_property
    def _goals(self) -> Tensor:
        """Where each of the N stands in the padded form, both dimensions as one."""
        row_N, index_N = self.places
        return row_N * self.longest + index_N

    @cached_property
    def _sources(self) -> Tensor:
        """Which of the N stands at each place of the padded form; padding repeats its row's last token."""
        first_B = self._ends - torch.tensor(self.lengths)
        source_BL = first_B[:, None] + torch.arange(self.longest)
        return source_BL.minimum(self._ends[:, None] - 1).to(self._device)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, L, ...] -> [1, N, ...]."""
        if self.even:
            return padded.flatten(0, 1)[None]
        return padded.flatten(0, 1).index_select(0, self._goals)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, N, ...] -> [B, L, ...]; what stands in the padding is not to be read."""
        if self.even:
            return packed[0].unflatten(0, (len(self.lengths), self.longest))
        return packed[0].index_select(0, self._sources.flatten()).unflatten(0, self._sources.shape)
