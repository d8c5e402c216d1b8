"""How much of each draft is verified: all of it, or the leading slots in which the drafter is confident."""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dspec.decoding.proposers import Proposal
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.models.calibration import Calibration, calibrated_confidence


class VerificationPolicy(Protocol):
    """How many leading drafts [B] of a proposal are sent to verification.

    The output distribution is the target's only if the decision to verify slot k depends on tokens before k alone.
    """

    reads_confidence: bool

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling]) -> Tensor: ...

    def settings(self, sampling: Sampling) -> dict[str, Any]: ...


class VerifyAll:
    """Verifies every draft."""

    reads_confidence = False

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling]) -> Tensor:
        return proposal.count_B

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return {"confidence_threshold": 0.0}


class ConfidenceThreshold:
    """Verifies the leading slots whose confidence reaches a threshold; slot k's confidence depends only on draft tokens
    before k."""

    reads_confidence = True

    def __init__(self, threshold: float, *, calibration: Calibration | None) -> None:
        """`calibration` applies to requests with the sampling that it was fitted for; for others confidences stay raw,
        with a warning that names both samplings."""
        if not 0 < threshold < 1:
            raise UserError(f"decoder.confidence_threshold={threshold} must lie in [0, 1)")
        self.threshold, self.calibration = threshold, calibration
        self._refused: set[Sampling] = set()  # warned about once

    def _calibrated(self, sampling: Sampling) -> bool:
        c = self.calibration
        if c is None or c.applies_to(sampling.temperature, sampling.top_p):
            return c is not None
        if sampling in self._refused:
            return False
        self._refused.add(sampling)
        warnings.warn(
            f"STS temperatures were fitted at temperature={c.temperature}, top_p={c.top_p}; this decoder samples at "
            f"temperature={sampling.temperature}, top_p={sampling.top_p}: they are not used, confidences stay raw",
            stacklevel=2,
        )
        return False

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return {"confidence_threshold": self.threshold, "sts": self._calibrated(sampling)}

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling]) -> Tensor:
        logits = proposal.confidence_BJ
        if logits is None:
            raise UserError("decoder.confidence_threshold needs a drafter with a confidence head")
        confidence = torch.sigmoid(logits)
        if self.calibration is not None:
            fitted = [self._calibrated(sampling) for sampling in samplings]
            temperatures = torch.tensor(self.calibration.temperatures, dtype=logits.dtype)
            calibrated = calibrated_confidence(logits, temperatures)
            confidence = torch.where(torch.tensor(fitted, device=logits.device)[:, None], calibrated, confidence)
        sure: Tensor = confidence >= self.threshold
        return torch.minimum(proposal.count_B, sure.long().cumprod(1).sum(1))
