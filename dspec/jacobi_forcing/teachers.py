"""Teachers of the consistency loss: same pass (stop-gradient), initial weights, or EMA.

A teacher returns hidden states of the same packed rows and the LM head that reads them, both detached. Only the trained
weights are copied (with LoRA: the adapters), and swapped in for the teacher's pass.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dspec.attention.masks import Predicate
from dspec.models.language_model import LanguageModel


class Teacher(Protocol):
    """The model whose distribution on the clean copies is the target of the consistency loss."""

    def bind(self, target: LanguageModel) -> None:
        """Called once with the target, before training."""
        ...

    def after_step(self, target: LanguageModel) -> None:
        """Called after each optimizer step."""
        ...

    def __call__(
        self, target: LanguageModel, ids_BL: Tensor, *, positions_BL: Tensor, mask: Predicate, student_BLD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [B, L, D] and the head [V, D]; `student_BLD` are the hidden states of the student's pass."""
        ...


class StopGradientTeacher(nn.Module):
    """The clean copies of the student's own pass, with the gradient stopped (the paper's theta minus)."""

    def bind(self, target: LanguageModel) -> None:
        pass

    def after_step(self, target: LanguageModel) -> None:
        pass

    def forward(
        self, target: LanguageModel, ids_BL: Tensor, *, positions_BL: Tensor, mask: Predicate, student_BLD: Tensor
    ) -> tuple[Tensor, Tensor]:
        return student_BLD.detach(), target.lm_head.weight.detach()


class FrozenTeacher(nn.Module):
    """The initial weights, in a second pass."""

    _in_checkpoint = False  # a resumed run copies them from the base again

    def bind(self, target: LanguageModel) -> None:
        self._names = [name for name, p in target.named_parameters() if p.requires_grad]
        self._head = next(name for name, p in target.named_parameters() if p is target.lm_head.weight)
        for name in self._names:
            weight = target.get_parameter(name).detach()
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            self.register_buffer(_key(name), weight, persistent=self._in_checkpoint)

    def after_step(self, target: LanguageModel) -> None:
        pass

    def _weights(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(_key(name)) for name in self._names}

    @torch.no_grad()
    def forward(
        self, target: LanguageModel, ids_BL: Tensor, *, positions_BL: Tensor, mask: Predicate, student_BLD: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights = self._weights()
        output = functional_call(target, weights, (ids_BL,), {"positions_BL": positions_BL, "mask": mask})
        return output.hidden_BLD, weights.get(self._head, target.lm_head.weight.detach())


class EMATeacher(FrozenTeacher):
    """An exponential moving average of the weights, updated after each optimizer step."""

    _in_checkpoint = True

    def __init__(self, *, decay: float) -> None:
        super().__init__()
        self.decay = decay

    @torch.no_grad()
    def after_step(self, target: LanguageModel) -> None:
        for name in self._names:
            self.get_buffer(_key(name)).lerp_(target.get_parameter(name).detach(), 1 - self.decay)


def _key(name: str) -> str:
    return name.replace(".", "/")  # buffer names must not contain dots
