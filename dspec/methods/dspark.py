"""DSpark: DFlash plus a sequential head, a confidence head and total-variation matching.

Source: "Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation", sections 2-4:
L = a_ce L_ce + a_tv L_tv + a_conf L_conf, all three weighted by the same slot decay; the TV term is the L1 distance
(twice the total variation) as in DeepSpec. The confidence loss is not detached from the backbone, as in DeepSpec.
Temperatures (STS) are fitted afterwards, by dspec/calibration/sts.py.
"""

from torch import Tensor

from dspec.errors import UserError
from dspec.losses import confidence_loss
from dspec.method import Metrics
from dspec.methods.dflash import Blocks, DFlash
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel


class DSpark(DFlash):
    """DFlash's backbone and anchors with teacher-forced heads on top."""

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
        super().__init__(
            target=target,
            draft=draft,
            num_anchors=num_anchors,
            loss_decay=loss_decay,
            ce_weight=ce_weight,
            tv_weight=tv_weight,
            chunk_mb=chunk_mb,
        )
        if draft.confidence_head is None and confidence_weight:
            raise UserError("method.confidence_weight > 0 needs draft.confidence_head=true")
        self.confidence_weight = confidence_weight

    def _refuse_heads(self) -> None:
        """DSpark is what the heads are for."""

    def _reads_law(self) -> bool:
        return self.draft.confidence_head is not None or super()._reads_law()  # the head's aim

    def _codes(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        if self.draft.markov_head is None:
            return super()._codes(blocks)
        return self.draft.transition(blocks.previous_BNJ, blocks.hidden_BNJD), self.draft.markov_head.markov_w2.weight

    def _extra(self, blocks: Blocks, weight_P: Tensor, l1_P: Tensor) -> tuple[Tensor, Metrics]:
        chosen = blocks.supervised_BNJ
        logits = self.draft.confidence(blocks.previous_BNJ[chosen], blocks.hidden_BNJD[chosen])
        if logits is None:
            return super()._extra(blocks, weight_P, l1_P)
        total = (weight_P * confidence_loss(logits.to(l1_P), l1_P)).sum()
        return self.confidence_weight * total, {"confidence": (total.detach(), weight_P.sum())}
