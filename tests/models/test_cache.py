"""The position cache against a plain list of what was written where."""

import random
from itertools import pairwise

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


def test_rows_of_another_cache_join_behind() -> None:
    one, other = PositionCache(2), PositionCache(2)
    states = {}
    for cache, rows, length in ((one, 2, 3), (other, 1, _CHUNK + 40)):
        for layer in range(2):
            states[cache, layer] = _states(rows, length)
            cache.window([0] * rows, length).update(*states[cache, layer], layer)
    one.join(other)
    for layer, held in enumerate(one.layers):
        for kind, buffer in enumerate((held.keys, held.values)):
            assert torch.equal(buffer[:2, :, :3], states[one, layer][kind])
            assert torch.equal(buffer[2:, :, : _CHUNK + 40], states[other, layer][kind])
    with pytest.raises(ValueError, match="after a pass has written to both"):
        one.join(PositionCache(2))


def test_places_are_moved_as_they_were() -> None:
    """Overlapping moves read before they write, and touch no other place."""
    cache, (keys, values) = PositionCache(1), _states(3, 8)
    cache.window([0] * 3, 8).update(keys.clone(), values.clone(), 0)
    cache.move([0, 0, 2], [3, 4, 7], [2, 3, 0])
    for before, after in ((keys, cache.layers[0].keys), (values, cache.layers[0].values)):
        expected = before.clone()
        expected[0, :, 2], expected[0, :, 3], expected[2, :, 0] = before[0, :, 3], before[0, :, 4], before[2, :, 7]
        assert torch.equal(after[:, :, :8], expected)


def test_select_before_the_first_write() -> None:
    cache = PositionCache(1)
    cache.select([0])
    assert cache.layers[0].keys is None


def test_what_is_read_can_be_written_to_another_cache() -> None:
    """As ranks do: the slots of one row, all layers; nothing else changes, and there is room where there was none."""
    of, other = (PositionCache(2) for _ in range(2))
    held = torch.randn(2, 3, 1, 300, 4, dtype=torch.float64)  # [layer, row, head, slot, width]
    for layer in range(2):
        of.window([0, 0, 0], 300).update(held[layer], -held[layer], layer)
        other.window([0, 0, 0], 5).update(held[layer, ..., :5, :] + 1, held[layer, ..., :5, :] - 1, layer)
    part = of.read(1, 3, 290)
    assert part.shape == (2, 2, 1, 287, 4)
    other.write(1, 3, part)
    torch.testing.assert_close(other.read(1, 3, 290), torch.stack([held[:, 1], -held[:, 1]], 1)[..., 3:290, :])
    torch.testing.assert_close(other.read(1, 0, 3), torch.stack([held[:, 1] + 1, held[:, 1] - 1], 1)[..., :3, :])
    torch.testing.assert_close(other.read(2, 0, 5), torch.stack([held[:, 2] + 1, held[:, 2] - 1], 1)[..., :5, :])
    with pytest.raises(ValueError, match="only after a pass"):
        PositionCache(2).write(0, 0, part)


def test_slots_after_the_buffer_are_read_as_zeros() -> None:
    """All ranks send and receive as many, also one that has computed nothing there."""
    cache = PositionCache(1)
    cache.window([0], 3).update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
    part = cache.read(0, 2, 700)
    assert part.shape == (1, 2, 1, 698, 4)
    assert part.sum() == 2 * 4


def test_buffers_are_copied_a_logarithmic_number_of_times() -> None:
    cache, capacities = PositionCache(1), []
    one = torch.zeros(1, 1, 64, 1)
    for start in range(0, 16_384, 64):
        cache.window([start], 64).update(one, one, 0)
        capacities.append(cache.layers[0].keys.shape[2])
    grown = sorted(set(capacities))
    assert all(new >= 1.5 * old for old, new in pairwise(grown))
    assert len(grown) < 12


@pytest.mark.parametrize("seed", range(6))
def test_rows_come_and_go_in_any_order(seed: int) -> None:
    """Rows of any lengths join, leave and are put in another order while passes write: each keeps its own slots."""
    rng = random.Random(seed)

    def written(cache: PositionCache, rows: list[list[float]], lengths: list[int]) -> None:
        """One value per slot, the same in all places of the slot."""
        starts = [len(row) - rng.randint(0, min(2, len(row))) for row in rows]
        window, L = cache.window(starts, max(lengths)), max(lengths)
        states = torch.tensor([[rng.random() for _ in range(L)] for _ in rows], dtype=torch.float64)
        for layer in range(2):
            sign = 1 - 2 * layer
            keys = sign * states[:, None, :, None].expand(-1, 1, -1, 2)
            window.update(keys, 3 * keys, layer)
        for row, start, length, state in zip(rows, starts, lengths, states.tolist(), strict=True):
            row[start:] = state[:length]

    cache, rows = PositionCache(2), [[], []]
    written(cache, rows, [3, 5])
    for _ in range(25):
        if rng.random() < 0.5 and len(rows) < 7:
            more, joined = PositionCache(2), [[] for _ in range(rng.randint(1, 3))]
            written(more, joined, [rng.choice([1, 4, 300]) for _ in joined])
            cache.join(more)
            rows += joined
        elif len(rows) > 1:
            kept = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
            cache.select(kept)
            rows = [rows[i] for i in kept]
        written(cache, rows, [rng.randint(1, 4) for _ in rows])
        for layer, held in enumerate(cache.layers):
            assert held.keys.shape[0] == held.values.shape[0] == len(rows)
            for b, row in enumerate(rows):
                expected = (1 - 2 * layer) * torch.tensor(row, dtype=torch.float64)
                assert torch.equal(held.keys[b, 0, : len(row), 1], expected)
                assert torch.equal(held.values[b, 0, : len(row), 0], 3 * expected)


def _joined(rows: int, length: int, value: float = 1.0) -> PositionCache:
    cache = PositionCache(1)
    cache.window([0] * rows, length).update(*[torch.full((rows, H, length, W), value)] * 2, 0)
    return cache


def test_a_row_takes_the_place_of_one_that_left() -> None:
    """Neither a row that leaves nor one that joins in its place moves the others; NaN is not inherited."""
    cache = _joined(4, _CHUNK + 20)
    (layer,) = cache.layers
    layer.keys[2, :, 2:] = torch.nan
    layer.values[2, :, 2:] = torch.nan
    place = layer.keys.data_ptr()
    layer.keys[3, :, 5] = 7.0
    cache.select([0, 3, 2])
    assert layer.keys.shape[0] == 3
    assert layer.keys[1, :, 5].eq(7.0).all()
    cache.select([0, 1])
    cache.join(_joined(2, 3, value=2.0))
    assert layer.keys.data_ptr() == place
    for held in (layer.keys, layer.values):
        assert held[2:, :, :3].eq(2.0).all()
        assert not held[2:, :, 3:].any()
        assert held[0, :, : _CHUNK + 20].eq(1.0).all()
    cache.join(_joined(1, 3))  # the fifth row has no room
    assert layer.keys.data_ptr() != place
    assert layer.shape == (5, 2 * _CHUNK)


def test_buffers_shrink_to_the_longest_row_once_others_need_room() -> None:
    cache = _joined(1, 20)
    cache.join(_joined(1, 4 * _CHUNK))
    (layer,) = cache.layers
    assert layer.shape == (2, 4 * _CHUNK)
    cache.select([0])
    cache.join(_joined(2, 30))
    assert layer.shape == (3, _CHUNK)
    cache.window([20, 30, 30], _CHUNK).update(*[torch.ones(3, H, _CHUNK, W)] * 2, 0)
    assert layer.shape == (3, 2 * _CHUNK)
    cache.select([2])
    cache.write(0, 3 * _CHUNK, torch.ones(1, 2, H, 5, W))  # slots written from outside are in use, too
    cache.join(_joined(1, 2))
    assert layer.keys[0, :, 3 * _CHUNK : 3 * _CHUNK + 5].sum() == H * 5 * W


def test_rows_are_repeated() -> None:
    """More rows than there were: each a copy."""
    cache = _joined(2, 3)
    cache.layers[0].keys[1] = 5.0
    cache.select([1, 1, 0])
    assert cache.layers[0].keys[:, 0, 0, 0].tolist() == [5.0, 5.0, 1.0]
    assert cache.layers[0].values.shape[0] == 3
