"""Schedulers as the verification policy of speculative decoding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspec.decoding.proposers import Proposal
from dspec.decoding.sampling import Sampling
from dspec.decoding.verification import CalibratedConfidence
from dspec.models.temperatures import Calibration
from dspec.serving.schedulers import ScheduleMemory, Scheduler


class ScheduledVerification:
    """Verifies what a scheduler says, given the drafter's calibrated confidences."""

    def __init__(self, scheduler: Scheduler, *, calibration: Calibration | None) -> None:
        """`calibration` applies as for ConfidenceThreshold."""
        self.scheduler, self.confidence = scheduler, CalibratedConfidence(calibration)
        self.reads_confidence = scheduler.reads_confidence

    def new_memory(self, requests: int) -> ScheduleMemory:
        return self.scheduler.new_memory(requests)

    def drafts(self, memory: ScheduleMemory) -> bool:
        return self.scheduler.drafts(memory)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        sts = {"sts": self.confidence.calibrated(sampling)} if self.reads_confidence else {}
        return self.scheduler.settings() | sts

    def __call__(self, proposal: Proposal, samplings: Sequence[Sampling], memory: ScheduleMemory) -> Tensor:
        confidence = torch.ones(proposal.tokens_BJ.shape)
        if self.reads_confidence:
            confidence = self.confidence(proposal, samplings)
        counts = self.scheduler(confidence.double().cpu().numpy(), proposal.count_B.cpu().numpy(), memory)
        return torch.from_numpy(counts).to(proposal.count_B)
