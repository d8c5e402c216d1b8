"""A key/value cache indexed by position, so that rows of a batch may stand at different lengths.

The key of the token at position p lies at index p in its row. Rejected draft tokens need no cropping: the next
forward pass starts at the row's own length and overwrites them, and no mask lets a query see a key beyond it.
So a batch gives what single rows give, and there are neither holes nor padding on the left.

Legend: B = batch, H = key/value heads, C = capacity, L = new positions, D = head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_CHUNK = 256  # the buffers grow in steps of this many positions


class _Window:
    """Where the next update writes: row b's new keys go to start[b] .. start[b] + length - 1."""

    def __init__(self) -> None:
        self.first = 0
        self.end = 0
        self.rows: tuple[Tensor, Tensor] | None = None  # (row, position) of each write; None: all rows alike


class _PositionLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, 0, width)
        self.values = value_states.new_zeros(batch, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def _grow(self, needed: int) -> None:
        capacity = self.keys.shape[2]
        if needed > capacity:
            extra = -(-max(needed - capacity, capacity // 2) // _CHUNK) * _CHUNK
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, H, L, D] at the window and returns views [B, H, end, D] of all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        self._grow(window.end)
        if window.rows is None:
            self.keys[:, :, window.first : window.end] = key_states
            self.values[:, :, window.first : window.end] = value_states
        else:
            b, positions = window.rows
            self.keys[b, :, positions] = key_states.transpose(1, 2)
            self.values[b, :, positions] = value_states.transpose(1, 2)
        return self.keys[:, :, : window.end], self.values[:, :, : window.end]

    def select(self, rows: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_seq_length(self) -> int:
        return 0  # positions are always given, never inferred

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.end, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name of the same in transformers 5.17
        return -1


class PositionCache(Cache):
    """Cache for any transformers decoder and for our drafts; `at(...)` says where the next forward pass writes."""

    def __init__(self, layers: int) -> None:
        self._window = _Window()
        super().__init__(layers=[_PositionLayer(self._window) for _ in range(layers)])

    def at(self, start_B: Sequence[int], length: int) -> "PositionCache":
        """The next forward pass computes `length` positions from start_B[b] on in row b."""
        window = self._window
        window.first, window.end, window.rows = start_B[0], max(start_B) + length, None
        if any(start != window.first for start in start_B):
            start = torch.tensor(start_B)[:, None]
            window.rows = torch.arange(len(start_B))[:, None], start + torch.arange(length)
        return self

    @property
    def end(self) -> int:
        """Number of key positions that the next attention sees (the longest row's)."""
        return self._window.end

    def select(self, rows: Tensor) -> None:
        """Keeps the rows named by `rows` (indices), in that order."""
        for layer in self.layers:
            layer.select(rows)
