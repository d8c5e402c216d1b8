"""DSpark: DFlash plus a sequential head, a confidence head and total-variation matching.

Source: "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation" (DeepSeek-AI and Peking
University, arXiv 2607.05147), sections 2-4, with the arithmetic of DeepSpec@afdfa7c:

    L = a_ce L_ce + a_tv L_tv + a_conf L_conf, each of them a sum over slots weighted by w_k = exp(-k / gamma)
    L_tv = sum_v |p_draft - p_target|, twice the total variation
    L_conf = BCE(confidence, c*), c* = 1 - L_tv / 2, not differentiated

What is computed is methods/drafter.py. Departures: as DFlash's (methods/dflash.py). The confidence loss reaches the
backbone, as in DeepSpec. Temperatures (STS) are fitted afterwards, by dspec/calibration/sts.py.
"""

from dspec.errors import UserError
from dspec.methods.drafter import DrafterMethod
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel


class DSpark(DrafterMethod):
    """Trains a drafter with the heads that it has; they are teacher-forced."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        draft: Draft,
        num_anchors: int,
        loss_decay: float,
        ce_weight: float,
        tv_weight: float,
        confidence_weight: float,
        chunk_mb: float,
    ) -> None:
        """Raises UserError where a confidence is weighed that no head gives."""
        if draft.confidence_head is None and confidence_weight:
            raise UserError("method.confidence_weight > 0 needs draft.confidence_head=true")
        super().__init__(
            target=target,
            draft=draft,
            num_anchors=num_anchors,
            loss_decay=loss_decay,
            ce_weight=ce_weight,
            tv_weight=tv_weight,
            confidence_weight=confidence_weight,
            chunk_mb=chunk_mb,
        )
