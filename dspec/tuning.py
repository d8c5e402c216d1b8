"""Which of a target's weights a method trains, and how the trained weights are merged into a plain model."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from dspec.errors import UserError
from dspec.models.target_model import TargetModel


class Tuning(Protocol):
    """Which weights are trained."""

    def prepare(self, target: TargetModel) -> None:
        """Sets requires_grad on the weights that are trained, after adding them if they are new (adapters)."""
        ...

    def merge(self, target: TargetModel) -> None:
        """Merges the change into the target's own weights, and removes what `prepare` added."""
        ...


class FullFineTuning:
    """All weights; the result interpolates between those before and after training.

    Source: WiSE-FT (arXiv 2109.01903): (1 - alpha) * before + alpha * after.
    """

    def __init__(self, *, interpolation: float) -> None:
        """`interpolation` is alpha in (0, 1]; 1 keeps the whole change. Raises UserError for others."""
        self.interpolation = _interpolation(interpolation)
        self._before: dict[str, Tensor] = {}

    def prepare(self, target: TargetModel) -> None:
        target.model.requires_grad_(True)
        if self.interpolation < 1:
            wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in target.model.named_parameters()}
            self._before = {name: p.detach().to(wide[name], copy=True) for name, p in target.model.named_parameters()}

    @torch.no_grad()
    def merge(self, target: TargetModel) -> None:
        for name, before in self._before.items():
            parameter = target.model.get_parameter(name)
            parameter.copy_(torch.lerp(before.to(parameter.device), parameter, self.interpolation))
        self._before = {}


class LoRA:
    """Low-rank adapters (peft) on linear layers, scaled by `interpolation` and merged at the end."""

    def __init__(self, *, rank: int, alpha: int, modules: str, interpolation: float) -> None:
        """`modules` is a pattern of layer names, or "all-linear"; `interpolation` as for FullFineTuning."""
        self.rank, self.alpha, self.modules = rank, alpha, modules
        self.interpolation = _interpolation(interpolation)

    def prepare(self, target: TargetModel) -> None:
        """Raises UserError where peft is missing or rejects the settings, and for adapters on the embeddings or the
        head: losses read the head's weight itself, and merging would change both where they are tied."""
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise UserError('LoRA needs peft: pip install -e ".[lora]", or use method/tuning=full') from error
        try:
            config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=self.modules, lora_dropout=0.0)
            inject_adapter_in_model(config, target.model)
        except re.error as error:
            raise UserError(f"method.tuning.modules={self.modules} is no pattern of layer names: {error}") from error
        except ValueError as error:
            raise UserError(f"method.tuning: {error}") from error
        for name, part in (("embeddings", target.embed_tokens), ("head", target.lm_head)):
            if isinstance(part, LoraLayer):
                raise UserError(
                    f"method.tuning.modules={self.modules} puts adapters on the {name}, which they cannot train: name "
                    "layers in between, such as all-linear"
                )

    @contextmanager
    def disabled(self, target: TargetModel) -> Iterator[None]:
        """Within, the target is what it was before training, to the last bit: its adapters are off. Only for passes
        without gradient, since peft freezes adapters that are off."""
        from peft.tuners.lora import LoraLayer

        layers = [layer for layer in target.model.modules() if isinstance(layer, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def merge(self, target: TargetModel) -> None:
        from peft.tuners.lora import LoraLayer

        for name, layer in list(target.model.named_modules()):
            if isinstance(layer, LoraLayer):
                layer.scale_layer(self.interpolation)
                layer.merge()
                parent, _, child = name.rpartition(".")
                setattr(target.model.get_submodule(parent), child, layer.get_base_layer())


def _interpolation(interpolation: float) -> float:
    if not 0 < interpolation <= 1:
        raise UserError(f"method.tuning.interpolation={interpolation} must be above 0 and at most 1 (the whole change)")
    return interpolation
