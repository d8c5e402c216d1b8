"""The calibration of a drafter's confidence head: what its checkpoint stores and decoding applies.

How it is fitted: dspec/calibration/. Beside a checkpoint's config.json it stands in sts.json, in the form that SGLang
reads (--speculative-dspark-confidence-sts-path). Shapes: K = draft slots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspec.errors import UserError

STS_FILE = "sts.json"


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

    def to_sts(self) -> dict[str, Any]:
        """The content of sts.json; the sampling stands under a key of ours, which SGLang ignores."""
        return {"temperatures": list(self.temperatures)} | {
            "dspec": {"temperature": self.temperature, "top_p": self.top_p}
        }

    @classmethod
    def from_sts(cls, data: Mapping[str, Any]) -> Calibration:
        """From the content of an sts.json, SGLang's too: those name no sampling, and are taken to be fitted on traces
        sampled at temperature 1. Raises ValueError, KeyError or TypeError for anything else."""
        sampling = data.get("dspec") or {"temperature": 1.0, "top_p": 1.0}
        return cls.from_dict({"temperatures": data["temperatures"]} | dict(sampling))

    def applies_to(self, temperature: float, top_p: float) -> bool:
        """Whether the temperatures were fitted for this sampling: with another, other drafts are accepted."""
        return math.isclose(self.temperature, temperature) and math.isclose(self.top_p, top_p)


def read_sts(path: Path) -> Calibration:
    """The calibration in an sts.json. Raises UserError for a missing or malformed one."""
    try:
        return Calibration.from_sts(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no STS temperatures ({error!r}): fit them again, or remove it") from error


def calibrated_confidence(logits: Tensor, temperatures: Tensor) -> Tensor:
    """c = sigmoid(z / T). logits [..., K], temperatures [K] -> [..., K] in the wider of the two dtypes."""
    if temperatures.shape != logits.shape[-1:]:
        raise ValueError(f"need one T per slot: {list(logits.shape)} against {list(temperatures.shape)}")
    return torch.sigmoid(logits / temperatures.to(logits.device))
