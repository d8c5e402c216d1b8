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
    """One layer's keys and values [B, H, C, W]; none before the first write.

    They are the first B rows of buffers that may have more: rows that leave make room for others, which join without
    a copy of those that stay.
    """

    def __init__(self) -> None:
        self._buffers: tuple[Tensor, Tensor] | None = None
        self.rows = 0  # B

    @property
    def keys(self) -> Tensor | None:
        return None if self._buffers is None else self._buffers[0][: self.rows]

    @property
    def values(self) -> Tensor | None:
        return None if self._buffers is None else self._buffers[1][: self.rows]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and slots that the buffers have room for."""
        return (0, 0) if self._buffers is None else (self._buffers[0].shape[0], self._buffers[0].shape[2])

    def room(self, key: Tensor, value: Tensor, needed: int, *, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values with at least `needed` slots; shapes and dtype are those of `key` and `value` [B, H, L, W],
        or [1, H, N, W] where `rows` says how many rows are packed in it."""
        if self._buffers is None:
            rows = len(key) if rows is None else rows
            keys, values = (x.new_zeros(rows, x.shape[1], 0, x.shape[3]) for x in (key, value))
            self._buffers, self.rows = (keys, values), rows
        capacity = self.shape[1]
        if needed > capacity:
            self.grow(_in_chunks(max(needed - capacity, capacity // 2)))
        keys, values = self._buffers
        return keys[: self.rows], values[: self.rows]

    def grow(self, slots: int) -> None:
        """Adds slots, and gives up the room of rows that have left."""
        if self._buffers is not None and slots > 0:
            keys, values = (pad(part[: self.rows], (0, 0, 0, slots)) for part in self._buffers)
            self._buffers = keys, values

    def select(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in that order; a row that keeps its place is not copied."""
        if self._buffers is None:
            return
        moved = [(goal, source) for goal, source in enumerate(rows) if goal != source]
        if len(rows) > self.rows:
            keys, values = (part[list(rows)] for part in self._buffers)
            self._buffers = keys, values
        elif moved:
            goals, sources = (list(part) for part in zip(*moved, strict=True))
            with torch.inference_mode():  # where buffers made by a decoder can be written to
                for part in self._buffers:
                    part[goals] = part[sources]
        self.rows = len(rows)

    def join(self, other: "Layer", *, slots: int) -> None:
        """Appends the other's rows; none of them uses more than `slots` slots.

        Without room for them all rows are copied, else they alone. What was in their place is cleared: a mask hides
        slots past a row's end, but 0 * NaN is NaN."""
        if self._buffers is None or other._buffers is None:
            raise ValueError("caches can be joined only after a pass has written to both")
        rows, (room, capacity) = self.rows + other.rows, self.shape
        if rows > room or slots > capacity:
            keys, values = (_resized(part[: self.rows], rows, _in_chunks(slots)) for part in self._buffers)
            self._buffers = keys, values
        with torch.inference_mode():
            for part, more in zip(self._buffers, other._buffers, strict=True):
                kept = more[: other.rows, :, : part.shape[2]]
                part[self.rows : rows, :, : kept.shape[2]] = kept
                part[self.rows : rows, :, kept.shape[2] :] = 0
        self.rows = rows

    def move(self, rows: Tensor, source: Tensor, goal: Tensor) -> None:
        """Copies slot source[i] to slot goal[i] in row rows[i]."""
        for entries in self._buffers or ():
            entries[rows, :, goal] = entries[rows, :, source]


def _in_chunks(slots: int) -> int:
    """`slots`, rounded up."""
    return -(-slots // _CHUNK) * _CHUNK


def _resized(buffer: Tensor, rows: int, slots: int) -> Tensor:
    """A copy of the buffer [B, H, C, W] with these numbers of rows and slots, new ones zero."""
    made = buffer.new_zeros(rows, buffer.shape[1], slots, buffer.shape[3])
    kept = buffer[:, :, :slots]
    made[: len(kept), :, : kept.shape[2]] = kept
    return made


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
        keys, values = self._layers[layer].room(key, value, self.end)
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
        keys, values = self._layers[layer].room(key, value, self.end, rows=self._batch)
        keys[self._row_N, :, self.slot_N] = key[0].transpose(0, 1)
        values[self._row_N, :, self.slot_N] = value[0].transpose(0, 1)
        return keys[:, :, : self.end], values[:, :, : self.end]


class PositionCache:
    """Keys and values of all layers. It holds no per-pass state: each pass has its own window."""

    def __init__(self, layers: int) -> None:
        self.layers = [Layer() for _ in range(layers)]
        self._ends: list[int] = []  # the slot after the last that each row has used

    def window(self, start_B: Sequence[int], length: int) -> Window:
        """The window of a forward pass that computes `length` slots from start_B[b] on in row b."""
        self._use([start + length for start in start_B])
        return Window(self.layers, start_B, length)

    def packed_window(self, start_B: Sequence[int], rows: RaggedRows) -> PackedWindow:
        """The window of a forward pass over packed rows: lengths[b] slots from start_B[b] on in row b."""
        self._use([start + length for start, length in zip(start_B, rows.lengths, strict=True)])
        return PackedWindow(self.layers, start_B, rows)

    def _use(self, end_B: Sequence[int]) -> None:
        before = self._ends or [0] * len(end_B)
        self._ends = [max(pair) for pair in zip(before, end_B, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, in that order; those that keep their index are not copied."""
        self._ends = [self._ends[row] for row in rows] if self._ends else []
        for layer in self.layers:
            layer.select(rows)

    def join(self, other: "PositionCache") -> None:
        """Appends the other's rows. Raises ValueError before the first pass."""
        ends = self._ends + other._ends
        for layer, more in zip(self.layers, other.layers, strict=True):
            layer.join(more, slots=max(ends))
        self._ends = ends

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
            layer.grow(end - layer.shape[1])
        entries = [(layer.keys, layer.values) for layer in self.layers]
        return torch.stack(
            [part[row, :, first:end] for pair in entries for part in pair if part is not None]
        ).unflatten(0, (len(entries), 2))

    def write(self, row: int, first: int, entries: Tensor) -> None:
        """Puts what `read` returned into slots first .. of a row. Raises ValueError before the first pass."""
        end = first + entries.shape[3]
        if self._ends:
            self._ends[row] = max(self._ends[row], end)
        for layer, (key, value) in zip(self.layers, entries, strict=True):
            if layer.keys is None:
                raise ValueError("a cache can be written to only after a pass has")
            keys, values = layer.room(key[None], value[None], end)
            keys[row, :, first:end], values[row, :, first:end] = key, value
