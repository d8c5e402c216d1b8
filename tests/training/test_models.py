"""The owner of a run's models: types before, in and after training, and whose weights a run may go on with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.errors import UserError
from dspec.training.models import Models


def types(module: torch.nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters()}


def test_masters_while_training_the_loaded_type_before_and_after(toys: SimpleNamespace) -> None:
    target = toys.target(dtype=torch.bfloat16)
    draft = toys.draft(target)
    models = Models(target=target, draft=draft)
    method = torch.nn.ModuleDict(models.parts)
    models.for_data(method, torch.device("cpu"))  # type: ignore[arg-type]
    assert types(method) == {torch.bfloat16}
    models.setup(None, method, "fit")  # type: ignore[arg-type]
    assert {p.dtype for p in draft.trainable().values()} == {torch.float32}
    assert types(target) == {torch.bfloat16}  # frozen
    draft.train()
    models.as_shipped(SimpleNamespace(export_dtype=None), torch.device("cpu"))  # type: ignore[arg-type]
    assert types(method) == {torch.bfloat16}
    assert not draft.training
    assert draft.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("change", ["weights", "names"])
def test_a_run_goes_on_with_the_target_it_began_with(toys: SimpleNamespace, change: str) -> None:
    """Frozen weights are not in the checkpoint: with others the drafter would be trained against two targets."""
    begun = Models(target=toys.target(seed=1), draft=None)
    again = Models(target=toys.target(seed=1), draft=None)
    again.load_state_dict(begun.state_dict())
    other: Any = toys.target(seed=2) if change == "weights" else toys.target("llama", seed=1)
    with pytest.raises(UserError, match="the target's weights are not those that this run started with"):
        Models(target=other, draft=None).load_state_dict(begun.state_dict())


def test_what_training_changed_is_not_another_target(toys: SimpleNamespace) -> None:
    """A method that trains the target itself, or adds adapters to it, after the models were taken over."""
    models = Models(target=toys.target(seed=1), draft=None)
    before = models.state_dict()
    with torch.no_grad():
        models.target.lm_head.weight.add_(1)
    models.load_state_dict(before)
    assert models.state_dict() == before
