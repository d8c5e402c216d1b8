"""What is kept of a frozen model's outputs. That losses stay the same: tests/methods/test_dflash.py."""

from types import SimpleNamespace

import torch

from dspec.models.output_cache import OutputCache


def test_what_is_kept_depends_on_the_row_alone(toys: SimpleNamespace) -> None:
    """Bit by bit, whatever it is batched with or padded to: a resumed run begins with nothing kept."""
    target = toys.target(dtype=torch.float32)
    ids = torch.randint(10, (3, 12), generator=torch.Generator().manual_seed(0))
    whole = OutputCache(target, taps=(0, 2), max_mb=1)(ids, [12, 7, 9])
    for b, n in ((2, 9), (1, 7)):
        alone = OutputCache(target, taps=(0, 2), max_mb=0)(ids[b : b + 1, : n + 1], [n])
        assert torch.equal(alone.features_BLF[0, :n], whole.features_BLF[b, :n])
        assert torch.equal(alone.hidden_BLD[0, :n], whole.hidden_BLD[b, :n])
        assert alone.hidden_BLD.shape[1] == n + 1
        assert not whole.features_BLF[b, n:].any()
