"""The one owner of where a run's models lie and in which type.

    loaded        in the type of the config, on its device
    data          the same, on the training device: what is regenerated is written by the model as it ships
    training      what is trained has float32 masters, what is frozen stays
    afterwards    the type of the config again: exported, calibrated and evaluated as it ships

Rotary frequencies are float32 throughout, whatever a model is cast to (models/rotary.py).
"""

from typing import Any

import lightning as L
import torch
from torch import nn

from dspec.errors import UserError
from dspec.method import Method
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.provenance import fingerprint


class Models(L.Callback):
    """A run's target and, where there is one, its drafter."""

    def __init__(self, *, target: LanguageModel, draft: Draft | None) -> None:
        """Made before a method adds to the target: its weights as they are now are what a run begins with."""
        self.target, self.draft, self.dtype = target, draft, target.dtype
        self._base = fingerprint(target.model)

    @property
    def parts(self) -> dict[str, LanguageModel | Draft]:
        """By the names under which a method takes them."""
        return {"target": self.target} if self.draft is None else {"target": self.target, "draft": self.draft}

    def for_data(self, method: Method, device: torch.device) -> None:
        """Before training data are written."""
        method.to(device)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Lightning has prepared the data; the optimizer is not made yet."""
        float32_masters(pl_module)

    def as_shipped(self, device: torch.device) -> None:
        """After training, when Lightning has left all on the CPU."""
        for part in self.parts.values():
            part.eval().to(device=device, dtype=self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must find: Lightning keeps it in the checkpoint."""
        return {"base": self._base}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError for a target of other weights: frozen ones are not in the checkpoint."""
        if state_dict["base"] != self._base:
            raise UserError(
                "the target's weights are not those that this run began with: bring them back, or start a new run"
            )


def float32_masters(module: nn.Module) -> None:
    """Trained weights in float32 at least: in bfloat16 most steps of 1e-5 are smaller than a weight's last bit."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
