"""What is kept of a frozen model's outputs. That losses stay the same: tests/methods/test_dflash.py."""

from types import SimpleNamespace

import pytest
import torch

from dspec.models import output_cache
from dspec.models.output_cache import OutputCache

LENGTHS = [12, 7, 9]
IDS = torch.randint(10, (3, 12), generator=torch.Generator().manual_seed(0))
ROWS = [IDS[b, :n].tolist() for b, n in enumerate(LENGTHS)]


def test_what_is_kept_depends_on_the_rows_expected_alone(toys: SimpleNamespace) -> None:
    """Bit by bit, whatever a row is batched with or padded to, and whichever comes first: a resumed run begins with
    nothing kept."""
    target = toys.target(dtype=torch.float32)
    first, second = (OutputCache(target, taps=(0, 2), max_mb=1) for _ in range(2))
    first.expect(ROWS)
    second.expect(ROWS[::-1])
    whole = first(IDS, LENGTHS)
    for b, n in ((2, 9), (1, 7), (0, 12)):
        alone = second(IDS[b : b + 1, : n + 1], [n])
        assert torch.equal(alone.features_BLF[0, :n], whole.features_BLF[b, :n])
        assert torch.equal(alone.hidden_BLD[0, :n], whole.hidden_BLD[b, :n])
        assert alone.hidden_BLD.shape[1] == min(n + 1, 12)
        assert not whole.features_BLF[b, n:].any()


def test_groups_hold_rows_of_like_lengths_and_no_more_than_fits(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept equals rows computed alone (fp64); the longest row has no room and is computed each time."""
    target = toys.target()
    width = 8 * target.hidden_size * 2
    monkeypatch.setattr(output_cache, "_GROUP", 18)
    cache = OutputCache(target, taps=(1,), max_mb=(7 + 9) * width / 2**20)
    cache.expect(ROWS)
    shapes: list[tuple[int, ...]] = []
    hook = target.register_forward_hook(lambda _, args, out: shapes.append(tuple(args[0].shape)))
    for _ in range(2):
        output = cache(IDS, LENGTHS)
    held = cache._cached[tuple(ROWS[1])].hidden_BLD
    assert held.untyped_storage().nbytes() == held.numel() * held.element_size()  # no padding is held with it
    hook.remove()
    assert shapes == [(1, 12), (2, 9), (1, 12)]
    for b, n in enumerate(LENGTHS):
        alone = target(IDS[b : b + 1, :n], taps=(1,))
        torch.testing.assert_close(output.features_BLF[b, :n], alone.features_BLF[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(output.hidden_BLD[b, :n], alone.hidden_BLD[0], rtol=0, atol=1e-12)
    cache.clear()
    assert not cache._cached
