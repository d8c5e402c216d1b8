"""The position cache against a plain list of what was written where."""

import random

import pytest
import torch

from dspec.models.cache import _CHUNK, PositionCache

B, H, W = 3, 2, 4


def _states(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, H, length, W), torch.randn(batch, H, length, W)


@pytest.mark.parametrize("seed", range(5))
def test_reads_back_what_was_last_written(seed: int) -> None:
    """Ragged overwriting writes beyond several growth steps, with rows dropped and reordered."""
    rng = random.Random(seed)
    cache = PositionCache(2)
    ends, rows = [0] * B, [[{} for _ in range(B)] for _ in range(2)]  # layer -> row -> position -> (k, v)
    for step in range(12):
        length = rng.choice([1, 3, 40, _CHUNK + 5])
        if step % 3 == 2:
            ends = [min(ends)] * len(ends)  # the fast path: all rows at the same place
        starts = [rng.randint(max(0, end - 4), end) for end in ends] if step % 3 != 2 else ends
        window = cache.window(starts, length)
        assert window.end == max(starts) + length
        for layer in range(2):
            k, v = _states(len(starts), length)
            keys, values = window.update(k, v, layer)
            for b, start in enumerate(starts):
                rows[layer][b].update({start + i: (k[b, :, i], v[b, :, i]) for i in range(length)})
            assert keys.shape == values.shape == (len(starts), H, window.end, W)
            for b, row in enumerate(rows[layer]):
                for position in range(starts[b] + length):
                    assert torch.equal(keys[b, :, position], row[position][0])
                    assert torch.equal(values[b, :, position], row[position][1])
        ends = [start + length for start in starts]
        if step == 7:
            keep = [2, 0]
            cache.select(keep)
            ends, rows = [ends[i] for i in keep], [[layer[i] for i in keep] for layer in rows]


def test_growth() -> None:
    cache = PositionCache(1)
    sizes = []
    for start in range(0, 4 * _CHUNK, 64):
        cache.window([start], 64).update(*_states(1, 64), 0)
        sizes.append(cache.layers[0].keys.shape[2])
    assert all(size % _CHUNK == 0 for size in sizes)
    assert all(size >= start + 64 for start, size in zip(range(0, 4 * _CHUNK, 64), sizes, strict=True))
    assert len(set(sizes)) <= 4  # it does not grow at every step
    assert cache.layers[0].values.shape == cache.layers[0].keys.shape


def test_select_before_the_first_write() -> None:
    cache = PositionCache(1)
    cache.select([0])
    assert cache.layers[0].keys is None
