"""The weights' fingerprint: every byte counts, nothing else does."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dspec.provenance import fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8)


def module(*, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (6, 4), name: str = "w") -> nn.Module:
    made = nn.Module()
    values = torch.randn(24, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype).view(shape)
    made.register_buffer(name, values)
    made.register_buffer("scalar", torch.ones((), dtype=dtype))
    made.register_buffer("none", torch.ones(0, 3))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.flip(0),  # a sum of the values does not see these four
        lambda w: w.flip(1),
        lambda w: w.roll(1, 0),
        lambda w: torch.stack([w[0], *w[1:].flip(0)]),
        lambda w: torch.cat([w[:-1], w[-1:].logical_not().to(w)]),
    ],
)
def test_every_byte_counts(dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plain, other = module(dtype=dtype), module(dtype=dtype)
    assert fingerprint(plain) == fingerprint(other)
    other.w = change(other.w)
    assert fingerprint(plain) != fingerprint(other)


def test_name_type_and_shape_count() -> None:
    zeros = [
        nn.ParameterDict({name: nn.Parameter(torch.zeros(shape, dtype=dtype))})
        for name, shape, dtype in [
            ("a", (4, 6), torch.float32),
            ("b", (4, 6), torch.float32),
            ("a", (6, 4), torch.float32),
            ("a", (4, 12), torch.bfloat16),
            ("a", (4, 3), torch.float64),
        ]
    ]
    assert len({fingerprint(m) for m in zeros}) == len(zeros)


def test_memory_layout_does_not_count() -> None:
    plain, turned = module(), module()
    turned.w = turned.w.T.contiguous().T
    assert not turned.w.is_contiguous()
    assert fingerprint(plain) == fingerprint(turned)


def test_threads_do_not_count() -> None:
    large, before = nn.Linear(1000, 1000), torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.add(fingerprint(large))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
