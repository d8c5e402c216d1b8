"""Teachers are not differentiated, each by itself and not only where the loss stops the gradient again."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dspec.jacobi_forcing.teachers import EMATeacher, FrozenTeacher, StopGradientTeacher


@pytest.mark.parametrize(
    "teacher", [StopGradientTeacher(), FrozenTeacher(), EMATeacher(decay=0.5)], ids=["same_pass", "frozen", "moving"]
)
def test_no_gradient_leaves_a_teacher(toys: SimpleNamespace, teacher: nn.Module) -> None:
    target = toys.target()
    target.model.requires_grad_(True)
    teacher.bind(target)
    ids = torch.tensor([[1, 2, 3]])
    positions = torch.arange(3)[None]
    student = target(ids, positions_BL=positions).hidden_BLD
    assert student.requires_grad
    hidden, head = teacher(target, ids, positions_BL=positions, mask=None, student_BLD=student)
    assert not hidden.requires_grad
    assert not head.requires_grad
    torch.testing.assert_close(hidden, student)  # nothing has been trained yet
