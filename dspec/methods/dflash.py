"""DFlash: train a block-diffusion drafter without heads on random anchors.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding" (z-lab, arXiv 2602.06036), training section: random
anchors, blocks that do not see each other, exponentially decaying cross-entropy w_k = exp(-k / gamma). Drafters of
both slot layouts (models/draft.py) can be trained; the computation is in methods/drafter.py.

Departures: target features are computed online, at most cached in memory (feature_cache_mb); gamma is a parameter, as
in DeepSpec@afdfa7c (4.0 for every block size), not tied to the block size; each loss is divided by the sum of its
weights over all ranks; a total-variation term may be added (tv_weight), which DFlash does not have.
"""

from dspec.errors import UserError
from dspec.methods.drafter import DrafterMethod
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel


class DFlash(DrafterMethod):
    """Cross-entropy (and optionally total-variation) training of a drafter without heads."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        draft: Draft,
        num_anchors: int,
        loss_decay: float,
        ce_weight: float,
        tv_weight: float,
        chunk_mb: float,
        feature_cache_mb: float,
    ) -> None:
        """Raises UserError for a drafter with a Markov or confidence head."""
        if draft.markov_head is not None or draft.confidence_head is not None:
            raise UserError(
                "DFlash trains a drafter without heads: set draft.markov_head_type=null draft.confidence_head=false, "
                "or recipe=dspark"
            )
        super().__init__(
            target=target,
            draft=draft,
            num_anchors=num_anchors,
            loss_decay=loss_decay,
            ce_weight=ce_weight,
            tv_weight=tv_weight,
            confidence_weight=0.0,
            chunk_mb=chunk_mb,
            feature_cache_mb=feature_cache_mb,
        )
