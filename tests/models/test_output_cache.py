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


@pytest.mark.parametrize(
    ("positions", "shapes"),
    [
        (17, [(1, 12), (1, 7), (1, 9)]),  # two rows of up to 9 are 18 positions
        (18, [(1, 12), (2, 9)]),
        (36, [(3, 12)]),
    ],
)
def test_a_group_has_at_most_so_many_positions_with_its_padding(
    positions: int, shapes: list[tuple[int, ...]], toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_cache, "_GROUP", positions)
    assert _passes(toys, ROWS, max_mb=1) == shapes


def test_a_row_that_occurs_twice_is_cached_once(toys: SimpleNamespace) -> None:
    """It takes the room of one: the row of 9 still fits beside that of 7."""
    width = 8 * toys.target().hidden_size * 2
    assert _passes(toys, [*ROWS, ROWS[1]], max_mb=(7 + 9) * width / 2**20) == [(1, 12), (2, 9)]


def _passes(toys: SimpleNamespace, expected: list[list[int]], *, max_mb: float) -> list[tuple[int, ...]]:
    """The shapes in which the model gets all rows for the first time."""
    target, shapes = toys.target(), list[tuple[int, ...]]()
    cache = OutputCache(target, taps=(1,), max_mb=max_mb)
    cache.expect(expected)
    target.register_forward_hook(lambda _, args, out: shapes.append(tuple(args[0].shape)))
    cache(IDS, LENGTHS)
    return shapes
