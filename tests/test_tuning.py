"""Which weights are trained, and what a plain model has of the change once it is merged."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dspec.errors import UserError
from dspec.tuning import FullFineTuning, LoRA, Tuning

EXACT = {"rtol": 0, "atol": 1e-10}


def train_a_little(target: Any, tuning: Tuning) -> None:
    """Two steps of next-token training on the weights that `tuning` chooses."""
    tuning.prepare(target)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    optimizer = torch.optim.SGD([p for p in target.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        logits = target.logits(target(ids).hidden_BLD)
        F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        optimizer.step()


def test_lora_trains_adapters_alone_and_merges_exactly(toys: SimpleNamespace) -> None:
    target = toys.target(seed=7)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    ids = torch.tensor([[1, 2, 3, 4]])
    untrained = target(ids).hidden_BLD
    tuning = LoRA(rank=2, alpha=4, modules="all-linear", interpolation=1.0)
    train_a_little(target, tuning)
    trained = {name: p for name, p in target.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert sum(p.numel() for p in trained.values()) < sum(p.numel() for p in before.values())
    tuned = target(ids).hidden_BLD
    assert not torch.allclose(tuned, untrained)
    tuning.merge(target)
    torch.testing.assert_close(target(ids).hidden_BLD, tuned, **EXACT)
    assert {name for name, _ in target.named_parameters()} == before.keys()  # a plain model again


def test_lora_merges_a_share(toys: SimpleNamespace) -> None:
    changes = []
    for share in (1.0, 0.25):
        target = toys.target(seed=7)
        tuning = LoRA(rank=2, alpha=4, modules="all-linear", interpolation=share)
        before = target.model.model.layers[0].mlp.up_proj.weight.detach().clone()
        torch.manual_seed(0)  # the adapters' initial weights
        train_a_little(target, tuning)
        tuning.merge(target)
        changes.append(target.model.model.layers[0].mlp.up_proj.weight.detach() - before)
    assert float(changes[0].abs().max()) > 0
    torch.testing.assert_close(changes[1], 0.25 * changes[0], **EXACT)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_share_of_the_change_is_kept(toys: SimpleNamespace, share: float) -> None:
    target = toys.target(seed=7, tie=True)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    tuning = FullFineTuning(interpolation=share)
    train_a_little(target, tuning)
    after = {name: p.detach().clone() for name, p in target.named_parameters()}
    assert all(not torch.equal(before[name], p) for name, p in after.items())
    tuning.merge(target)
    for name, p in target.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] + share * (after[name] - before[name]), **EXACT)


def test_full_tuning_trains_all(toys: SimpleNamespace) -> None:
    target = toys.target()
    target.requires_grad_(False)
    FullFineTuning(interpolation=1.0).prepare(target)
    assert all(p.requires_grad for p in target.parameters())


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_out_of_range(share: float) -> None:
    with pytest.raises(UserError, match="interpolation"):
        FullFineTuning(interpolation=share)
    with pytest.raises(UserError, match="interpolation"):
        LoRA(rank=1, alpha=1, modules="all-linear", interpolation=share)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": 0}, "method.tuning: .*0"),
        ({"modules": "nothing"}, "method.tuning: .*nothing not found"),
        ({"modules": ".*("}, r"method.tuning.modules=\.\*\( is no pattern"),
        ({"modules": "lm_head"}, "method.tuning.modules=lm_head .*head"),
        ({"modules": ".*embed_tokens"}, "method.tuning.modules=.*embed_tokens .*embeddings"),
    ],
)
def test_adapters_that_could_not_be_trained(toys: SimpleNamespace, wrong: dict[str, Any], words: str) -> None:
    """Losses read the head's weight itself, and tied embeddings are the head's: adapters there would learn nothing, or
    what the evaluated model does not have."""
    settings: dict[str, Any] = {"rank": 2, "alpha": 4, "modules": "all-linear", "interpolation": 1.0}
    with pytest.raises(UserError, match=words):
        LoRA(**settings | wrong).prepare(toys.target(tie=True))
