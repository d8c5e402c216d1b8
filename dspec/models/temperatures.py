"""The calibration of a drafter's confidence head: what its checkpoint stores and decoding applies.

How it is fitted: dspec/calibration/. Shapes: K = draft slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    """STS temperatures and the sampling settings of the traces they were fitted on; stored in the checkpoint."""

    temperatures: tuple[float, ...]
    temperature: float
    top_p: float

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < t < math.inf for t in self.temperatures):
            raise ValueError(f"temperatures must be positive and finite, one per slot, got {self.temperatures}")
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1):
            raise ValueError(f"need temperature >= 0 and 0 < top_p <= 1: {self.temperature}, {self.top_p}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "temperatures": list(self.temperatures)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_dict`."""
        if set(data) != {"temperatures", "temperature", "top_p"}:
            raise ValueError(f"calibration needs exactly temperatures, temperature and top_p: {sorted(data)}")
        temperatures = tuple(float(t) for t in data["temperatures"])
        return cls(temperatures, float(data["temperature"]), float(data["top_p"]))

    def applies_to(self, temperature: float, top_p: float) -> bool:
        """Whether the temperatures were fitted for this sampling: with another, other drafts are accepted."""
        return math.isclose(self.temperature, temperature) and math.isclose(self.top_p, top_p)


def calibrated_confidence(logits: Tensor, temperatures: Tensor) -> Tensor:
    """c = sigmoid(z / T). logits [..., K], temperatures [K] -> [..., K] in the wider of the two dtypes."""
    if temperatures.shape != logits.shape[-1:]:
        raise ValueError(f"need one T per slot: {list(logits.shape)} against {list(temperatures.shape)}")
    return torch.sigmoid(logits / temperatures.to(logits.device))
