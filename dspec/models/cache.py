"""KV cache for a batch whose rows may have different lengths.

A row is a sequence of cache slots; a forward pass writes the slots from a given start on, which may differ per row
(`window`). Entries of rejected draft tokens need no removal: the next pass starts at the row's own length and
overwrites them, and no mask lets a query see past it. So a batch computes what single rows would, with neither holes
nor left padding. For plain text the slot is the position; where several tokens share a position (parallel candidates)
or positions are not contiguous, slots are in order of computation.

Legend: B = batch, H = key/value heads, C = capacity, L = new slots, N = new slots of all packed rows, W = head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dspec.models.ragged import RaggedRows

_CHUNK = 256  # the buffers grow in steps of this many slots


class Layer:
    """Buffers [B, H, C, W] of one layer's keys and values; none before the first write."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def room(self, key: Tensor, value: Tensor, *, rows: int, needed: int) -> tuple[Tensor, Tensor]:
        """The buffers of `rows` rows with at least `needed` slots, else like `key` and `value` [..., H, L, W]."""
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_zeros(rows, x.shape[1], 0, x.shape[3]) for x in (key, value))
        if needed > (capacity := self.keys.shape[2]):
            self.grow(-(-max(needed - capacity, capacity // 2) // _CHUNK) * _CHUNK)
        return self.keys, self.values

    def grow(self, slots: int) -> None:
        if self.keys is not None and self.values is not None and slots > 0:
            self.keys, self.values = pad(self.keys, (0, 0, 0, slots)), pad(self.values, (0, 0, 0, slots))

    def select(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def join(self, other: "Layer") -> None:
        if self.keys is None or self.values is None or other.keys is None or other.values is None:
            raise ValueError("caches can be joined only after a pass has written to both")
        more = other.keys.shape[2] - self.keys.shape[2]
        self.grow(more)
        other.grow(-more)
        self.keys, self.values = torch.cat([self.keys, other.keys]), torch.cat([self.values, other.values])

    def move(self, rows: Tensor, source: Tensor, goal: Tensor) -> None:
        """Copies slot source[i] to slot goal[i] in row rows[i]."""
        if self.keys is not None and self.values is not None:
            for entries in (self.keys, self.values):
                entries[rows, :, goal] = entries[rows, :, source]


class Window:
    """Where one forward pass writes: slots start_B[b] .. start_B[b] + length - 1 of row b.

    Layers take it as their `past_key_values`: `update` is all that transformers' attention needs from a cache.
    """

    def __init__(self, layers: Sequence[Layer], start_B: Sequence[int], length: int) -> None:
        self._layers = layers
        self.first, self.end = start_B[0], max(start_B) + length  # queries see the slots before `end`
        self._rows: tuple[Tensor, Tensor] | None = None  # (row, slot) of each write; None: the same slots in all rows
        if any(start != self.first for start in start_B):
            slot = torch.tensor(start_B)[:, None] + torch.arange(length)
            self._rows = torch.arange(len(start_B))[:, None], slot

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Writes [B, H, L, W]; returns views [B, H, end, W] of the layer's buffers."""
        keys, values = self._layers[layer].room(key, value, rows=len(key), needed=self.end)
        if self._rows is None:
            keys[:, :, self.first : self.end] = key
            values[:, :, self.first : self.end] = value
        else:
            b, slot = self._rows
            keys[b, :, slot] = key.transpose(1, 2)
            values[b, :, slot] = value.transpose(1, 2)
        return keys[:, :, : self.end], values[:, :, : self.end]


class PackedWindow:
    """`Window` for rows of different lengths that are packed in one: row b writes slots start_B[b] ..
    start_B[b] + lengths[b] - 1."""

    def __init__(self, layers: Sequence[Layer], start_B: Sequence[int], rows: RaggedRows) -> None:
        self._layers, self._batch = layers, len(start_B)
        self.end = max(start + length for start, length in zip(start_B, rows.lengths, strict=True))
        self._row_N, index_N = rows.places
        self.slot_N = torch.tensor(start_B, device=index_N.device)[self._row_N] + index_N

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Writes [1, H, N, W]; returns views [B, H, end, W] of the layer's buffers."""
        keys, values = self._layers[layer].room(key, value, rows=self._batch, needed=self.end)
        keys[self._row_N, :, self.slot_N] = key[0].transpose(0, 1)
        values[self._row_N, :, self.slot_N] = value[0].transpose(0, 1)
        return keys[:, :, : self.end], values[:, :, : self.end]


class PositionCache:
    """Keys and values of all layers. It holds no per-pass state: each pass has its own window."""

    def __init__(self, layers: int) -> None:
        self.layers = [Layer() for _ in range(layers)]

    def window(self, start_B: Sequence[int], length: int) -> Window:
        """The window of a forward pass that computes `length` slots from start_B[b] on in row b."""
        return Window(self.layers, start_B, length)

    def packed_window(self, start_B: Sequence[int], rows: RaggedRows) -> PackedWindow:
        """The window of a forward pass over packed rows: lengths[b] slots from start_B[b] on in row b."""
        return PackedWindow(self.layers, start_B, rows)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, in that order."""
        for layer in self.layers:
            if layer.keys is not None:
                layer.select(torch.tensor(rows, dtype=torch.long, device=layer.keys.device))

    def join(self, other: "PositionCache") -> None:
        """Appends the other's rows."""
        for layer, more in zip(self.layers, other.layers, strict=True):
            layer.join(more)

    def move(self, rows: Sequence[int], source: Sequence[int], goal: Sequence[int]) -> None:
        """Copies slot source[i] to slot goal[i] in row rows[i]: moves accepted branch entries to their final slots."""
        if rows:
            indices = [torch.tensor(part) for part in (rows, source, goal)]
            for layer in self.layers:
                layer.move(*indices)

    def read(self, row: int, first: int, end: int) -> Tensor:
        """A copy [layers, 2, H, slots, W] of the keys and values in slots first .. end - 1 of a row; zeros where
        nothing has been written yet."""
        for layer in self.layers:
            if layer.keys is not None:
                layer.grow(end - layer.keys.shape[2])
        entries = [(layer.keys, layer.values) for layer in self.layers]
        return torch.stack(
            [part[row, :, first:end] for pair in entries for part in pair if part is not None]
        ).unflatten(0, (len(entries), 2))

    def write(self, row: int, first: int, entries: Tensor) -> None:
        """Puts what `read` returned into slots first .. of a row. Raises ValueError before the first pass."""
        end = first + entries.shape[3]
        for layer, (key, value) in zip(self.layers, entries, strict=True):
            if layer.keys is None:
                raise ValueError("a cache can be written to only after a pass has")
            keys, values = layer.room(key[None], value[None], rows=len(layer.keys), needed=end)
            keys[row, :, first:end], values[row, :, first:end] = key, value
