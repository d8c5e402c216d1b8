"""The key/value buffers grow by half at least: copying them costs a constant per token, not per step."""

from itertools import pairwise

import torch

from dspec.models.cache import PositionCache


def test_buffers_are_copied_a_logarithmic_number_of_times() -> None:
    cache, capacities = PositionCache(1), []
    one = torch.zeros(1, 1, 64, 1)
    for start in range(0, 16_384, 64):
        cache.window([start], 64).update(one, one, 0)
        capacities.append(cache.layers[0].keys.shape[2])
    grown = sorted(set(capacities))
    assert all(new >= 1.5 * old for old, new in pairwise(grown))
    assert len(grown) < 12
