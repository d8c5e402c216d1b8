"""The AR base: next-token loss against transformers, packed against separate documents."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from dspec.method import Batch
from dspec.methods.ar_base import ARBase


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_loss_and_gradient(toys: SimpleNamespace, family: str) -> None:
    method = ARBase(target=toys.target(family), chunk_mb=4e-4)
    model = method.target.model
    ids = torch.randint(11, (3, 9), generator=_generator())
    supervised = torch.rand(3, 9, generator=_generator()) < 0.6
    result = method.loss(Batch(ids, supervised), generators=[])
    labels = ids[:, 1:].masked_fill(~supervised[:, 1:], -100)
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(result.loss_sum, expected, rtol=0, atol=1e-9)
    assert int(result.weight) == int(supervised[:, 1:].sum())
    parameters = list(model.parameters())
    for got, want in zip(
        torch.autograd.grad(result.loss_sum, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_packed_equals_separate(toys: SimpleNamespace) -> None:
    method = ARBase(target=toys.target(), chunk_mb=1)
    a, b = torch.randint(11, (1, 5), generator=_generator()), torch.randint(11, (1, 4), generator=_generator())
    alone = [method.loss(Batch(x, torch.ones_like(x, dtype=torch.bool)), generators=[]) for x in (a, b)]
    loss = torch.tensor([[True] * 5 + [False] + [True] * 3 + [False] * 2])  # a document's first token is not asked for
    document = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 2])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]])
    row = torch.cat([a, b, torch.zeros(1, 2, dtype=torch.long)], 1)
    packed = method.loss(Batch(row, loss, document, positions), generators=[])
    torch.testing.assert_close(packed.loss_sum, alone[0].loss_sum + alone[1].loss_sum, rtol=0, atol=1e-9)
    assert int(packed.weight) == 7


def test_nothing_to_learn_from(toys: SimpleNamespace) -> None:
    method = ARBase(target=toys.target(), chunk_mb=4e-4)
    ids = torch.ones(2, 5, dtype=torch.long)
    result = method.loss(Batch(ids, torch.zeros(2, 5, dtype=torch.bool)), generators=[])
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == int(result.weight) == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in method.parameters())


def test_everything_is_trained(toys: SimpleNamespace) -> None:
    method = ARBase(target=toys.target(), chunk_mb=4e-4)
    assert all(p.requires_grad for p in method.parameters())
