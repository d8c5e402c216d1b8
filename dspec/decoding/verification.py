"""Lossless verification of drafts, and how much of each draft is verified: all of it, or the leading slots in which the
drafter is confident. Policies that weigh the load of all requests are in dspec/serving/.

Legend: B = rows, J = draft slots, V = vocabulary.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dspec.decoding.proposers import Proposal
from dspec.decoding.sampling import Sampling, draw
from dspec.decoding.state import NoMemory, StatePart
from dspec.errors import UserError
from dspec.models.temperatures import Calibration, calibrated_confidence


class VerificationPolicy(Protocol):
    """How many leading drafts [B] of a proposal are sent to verification.

    The output distribution is the target's only if the decision to verify slot k depends on tokens before k alone, and
    on earlier rounds: what it must remember of those is its `memory`, which the state of the decoder holds.
    """

    reads_confidence: bool

    def new_memory(self, requests: int) -> StatePart:
        """For requests that have just begun."""
        ...

    def drafts(self, memory: Any) -> bool:
        """Whether this round drafts at all; where it does not, the policy is not called."""
        ...

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling], memory: Any) -> Tensor: ...

    def settings(self, sampling: Sampling) -> dict[str, Any]: ...


class _Memoryless:
    """Drafts in every round and remembers nothing."""

    def new_memory(self, requests: int) -> NoMemory:
        return NoMemory()

    def drafts(self, memory: NoMemory) -> bool:
        return True


class VerifyAll(_Memoryless):
    """Verifies every draft."""

    reads_confidence = False

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling], memory: NoMemory) -> Tensor:
        return proposal.count_B

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return {"confidence_threshold": 0.0}


class CalibratedConfidence:
    """A drafter's confidences [B, J] of a proposal."""

    def __init__(self, calibration: Calibration | None) -> None:
        """`calibration` applies to requests with the sampling that it was fitted for; for others confidences stay raw,
        with a warning that names both samplings."""
        self.calibration = calibration
        self._refused: set[Sampling] = set()  # warned about once

    def calibrated(self, sampling: Sampling) -> bool:
        """Whether the temperatures apply to requests with this sampling."""
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

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling]) -> Tensor:
        logits = proposal.confidence_BJ
        if logits is None:
            raise UserError("verification by confidence needs a drafter with a confidence head")
        fitted = [self.calibrated(sampling) for sampling in samplings]
        if self.calibration is None or not any(fitted):
            return torch.sigmoid(logits)
        calibrated = calibrated_confidence(logits, torch.tensor(self.calibration.temperatures, dtype=logits.dtype))
        if all(fitted):
            return calibrated
        return torch.where(torch.tensor(fitted, device=logits.device)[:, None], calibrated, torch.sigmoid(logits))


class ConfidenceThreshold(_Memoryless):
    """Verifies the leading slots whose confidence reaches a threshold; slot k's confidence depends only on draft tokens
    before k."""

    reads_confidence = True

    def __init__(self, threshold: float, *, calibration: Calibration | None) -> None:
        if not 0 < threshold < 1:
            raise UserError(f"decoder.<name>.confidence_threshold={threshold} must lie in (0, 1); 0 verifies all")
        self.threshold, self.confidence = threshold, CalibratedConfidence(calibration)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return {"confidence_threshold": self.threshold, "sts": self.confidence.calibrated(sampling)}

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling], memory: NoMemory) -> Tensor:
        sure: Tensor = self.confidence(proposal, samplings) >= self.threshold
        return torch.minimum(proposal.count_B, sure.long().cumprod(1).sum(1))


def verify_greedy(draft_BJ: Tensor, count_B: Tensor, logits_BJV: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted prefix length [B] and the token after it [B]: drafts must equal the target's argmax.

    `logits_BJV` has J + 1 positions: the target's logits for each draft slot and for the bonus token.
    """
    best = logits_BJV.argmax(-1)
    slots = torch.arange(draft_BJ.shape[1], device=draft_BJ.device)
    ok = (draft_BJ == best[:, :-1]) & (slots < count_B[:, None])
    accepted = ok.long().cumprod(1).sum(1)
    return accepted, best.gather(1, accepted[:, None]).squeeze(1)


def verify_sampled(
    draft_BJ: Tensor,
    count_B: Tensor,
    draft_probs_BJV: Tensor | None,
    target_probs_BJV: Tensor,
    uniform_BJ: Tensor,
    uniform_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: accept x with probability min(1, p(x) / q(x)), else draw from max(p - q, 0).

    Preserves the target's distribution (Leviathan et al. 2023, theorem 1). `draft_probs_BJV` None means
    that the drafts are deterministic (q is a point mass). Row b has count_B[b] drafts; later slots are never accepted.
    """
    # 1. accept
    B, J = draft_BJ.shape
    p_x = target_probs_BJV[:, :-1].gather(-1, draft_BJ[..., None]).squeeze(-1)
    q_x = torch.ones_like(p_x)
    if draft_probs_BJV is not None:
        q_x = draft_probs_BJV.gather(-1, draft_BJ[..., None]).squeeze(-1)
    slots = torch.arange(J, device=draft_BJ.device)
    ok = (uniform_BJ * q_x < p_x) & (slots < count_B[:, None])
    accepted = ok.long().cumprod(1).sum(1)
    # 2. what the token after them is drawn from: at a rejection the residual, else the target's distribution
    rows = torch.arange(B, device=draft_BJ.device)
    probs = target_probs_BJV[rows, accepted]
    rejected = accepted < count_B
    if J:
        slot = accepted.clamp(max=J - 1)
        if draft_probs_BJV is None:  # q is one at the drafted token, so only that token loses weight
            excess, token = probs.clone(), draft_BJ[rows, slot]
            excess[rows, token] = (probs[rows, token] - 1).clamp(min=0)
        else:
            excess = (probs - draft_probs_BJV[rows, slot]).clamp(min=0)
        residual = torch.where(rejected[:, None], excess, probs)
        # the residual is empty only if p = q up to rounding: a rejection had probability zero, so draw from p
        probs = torch.where(residual.sum(-1, keepdim=True) > 0, residual, probs)
    # 3. draw it
    return accepted, draw(probs, uniform_B)
