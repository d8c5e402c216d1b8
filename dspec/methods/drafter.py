"""What DFlash and DSpark share: a drafter learns blocks at random anchors of responses that the target generated.

All blocks of a batch run through the drafter in one pass, under a mask that keeps them from seeing each other. Each
slot with a label is one row of the loss; heads (models/heads.py) are trained if the drafter has them.

Legend: B = batch, L = positions, N = anchors, K = block slots, J = draft slots, P = supervised slots, D = width,
V = vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from dspec.attention import masks
from dspec.errors import UserError
from dspec.losses import check_chunk, chunked_sum, confidence_loss, decay_weights, draft_loss, token_loss
from dspec.method import Batch, LossOutput, Method, Metrics
from dspec.models.checkpoint import save_pretrained
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel, ModelOutput
from dspec.models.output_cache import OutputCache
from dspec.precision import widest


@dataclass(frozen=True)
class Blocks:
    """The drafted blocks of a batch and what supervises them."""

    hidden_BNJD: Tensor  # drafter hidden states of the draft slots
    previous_BNJ: Tensor  # token before the one each slot predicts
    label_BNJ: Tensor  # token each slot predicts
    target_index_BNJ: Tensor  # position of the target hidden state that predicts the same token
    supervised_BNJ: Tensor  # bool


def sample_anchors(supervised_BL: Tensor, count: int, *, generators: Sequence[Generator]) -> tuple[Tensor, Tensor]:
    """Up to `count` anchors per row, uniform without replacement, sorted: positions [B, N] and validity [B, N].

    Row b draws only from generators[b], independent of padding. Position p may be an anchor if both p and p + 1 are
    supervised.
    """
    eligible = supervised_BL[:, :-1] & supervised_BL[:, 1:]
    score = torch.stack([torch.rand(len(row), generator=g) for row, g in zip(eligible, generators, strict=False)])
    score = score.to(supervised_BL.device)
    count = min(count, eligible.shape[1])
    score, anchor_BN = (score + eligible).topk(count, dim=1)  # eligible positions score above 1
    valid = score >= 1
    anchor_BN, order = torch.where(valid, anchor_BN, supervised_BL.shape[1]).sort(dim=1)
    valid = valid.gather(1, order)
    return torch.where(valid, anchor_BN, 0), valid


class DrafterMethod(Method):
    """Weighted cross-entropy, total-variation and confidence losses of a drafter against its frozen target."""

    shown = ("accept_0", "accuracy_0", "expected_tau")

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
        feature_cache_mb: float,
    ) -> None:
        """`num_anchors` blocks per row; `loss_decay` is gamma in slots; `chunk_mb` MiB of logits exist at a time. The
        target's outputs are cached for later epochs in at most `feature_cache_mb` MiB (0: computed in each step).

        Raises UserError for numbers out of range, or for a confidence weight without a confidence head.
        """
        super().__init__()
        if draft.confidence_head is None and confidence_weight:
            raise UserError("method.confidence_weight > 0 needs draft.confidence_head=true")
        if num_anchors < 1:
            raise UserError(f"method.num_anchors={num_anchors} blocks per row must be at least 1")
        if loss_decay <= 0:
            raise UserError(f"method.loss_decay={loss_decay} slots must be above 0 (large: all slots count equally)")
        self.target, self.draft = target, draft
        self.num_anchors, self.loss_decay, self.chunk_mb = num_anchors, loss_decay, check_chunk(chunk_mb)
        draft.metadata.num_anchors = num_anchors
        self.ce_weight, self.tv_weight, self.confidence_weight = ce_weight, tv_weight, confidence_weight
        taps = draft.config.target_layer_ids
        self._cache = OutputCache(target, taps=taps, max_mb=feature_cache_mb) if feature_cache_mb else None

    def begin(self, data: Any) -> None:
        if self._cache is not None:
            self._cache.expect(data.rows)

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        anchor_BN, valid_BN = sample_anchors(batch.supervised_BL, self.num_anchors, generators=generators)
        return self.loss_at(batch, self._outputs(batch), anchor_BN, valid_BN)

    @torch.no_grad()
    def _outputs(self, batch: Batch) -> ModelOutput:
        """The target's outputs; with a cache only up to each row's last supervised position (later ones are unused)."""
        if self._cache is None:
            return self.target(batch.ids_BL, taps=self.draft.config.target_layer_ids)
        length_L = torch.arange(1, batch.supervised_BL.shape[1] + 1, device=batch.supervised_BL.device)
        return self._cache(batch.ids_BL, (batch.supervised_BL * length_L).amax(1).clamp(min=1).tolist())

    def loss_at(self, batch: Batch, output: ModelOutput, anchor_BN: Tensor, valid_BN: Tensor) -> LossOutput:
        """The loss for given anchors; `output` holds the target's features and final hidden states."""
        # 1. the drafter on all blocks, its slots aligned with their labels
        blocks = self.draft_blocks(batch, output, anchor_BN, valid_BN)
        # 2. the supervised slots as rows, each weighted by its index in its block
        chosen = blocks.supervised_BNJ
        slots, device = chosen.shape[-1], chosen.device
        slot_P = torch.arange(slots, device=device).expand(chosen.shape)[chosen]
        weight_P = decay_weights(slots, gamma=self.loss_decay).to(device).expand(chosen.shape)[chosen]
        weight, count_J = weight_P.sum(), torch.bincount(slot_P, minlength=slots).to(weight_P)

        def per_slot(values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.bincount(slot_P, weights=values.to(widest(device)), minlength=slots).to(weight_P), count_J

        # 3. cross-entropy and, if needed, the distance to the target's distribution
        loss, stats = self._chunked(blocks, output, weight_P)
        metrics: Metrics = {"ce": ((weight_P * stats[:, 0]).sum(), weight)}
        if not self._reads_target():
            return LossOutput(loss, weight, metrics | {"accuracy": per_slot(stats[:, 1])})
        _, l1_P, match_P = stats.unbind(-1)
        metrics["tv"] = (weight_P * l1_P / 2).sum(), weight
        metrics |= {"accept": per_slot(1 - l1_P / 2), "match": per_slot(match_P)}
        # 4. the confidence head against the acceptance rate implied by that distance
        confidence_P = self.draft.confidence(blocks.previous_BNJ[chosen], blocks.hidden_BNJD[chosen])
        if confidence_P is not None:
            bce = (weight_P * confidence_loss(confidence_P.to(l1_P), l1_P)).sum()
            loss, metrics["confidence"] = loss + self.confidence_weight * bce, (bce.detach(), weight)
        return LossOutput(loss, weight, metrics)

    def draft_blocks(self, batch: Batch, output: ModelOutput, anchor_BN: Tensor, valid_BN: Tensor) -> Blocks:
        """Runs the drafter on all blocks in one pass and aligns its slots with their labels."""
        config = self.draft.config
        (B, L), N, K = batch.ids_BL.shape, anchor_BN.shape[1], config.block_size
        device = batch.ids_BL.device
        mask = masks.training_blocks(anchor_BN, context=L, block=K)
        positions = (anchor_BN[..., None] + torch.arange(K, device=device)).flatten(1)
        hidden = self.draft(
            self.draft.block_ids(batch.ids_BL.gather(1, anchor_BN)),
            positions,
            mask=mask,
            features_BSF=output.features_BLF,
        )
        hidden_BNJD = hidden.view(B, N, K, -1)[:, :, config.first_slot :]
        index = anchor_BN[..., None] + torch.arange(config.num_drafts, device=device)  # label position - 1
        inside = index + 1 < L
        index = index.clamp(max=L - 2)
        supervised = inside & batch.supervised_BL.gather(1, (index + 1).flatten(1)).view_as(index)
        supervised = supervised.cumprod(-1).bool() & valid_BN[..., None]
        previous, label = (batch.ids_BL.gather(1, i.flatten(1)).view_as(index) for i in (index, index + 1))
        return Blocks(hidden_BNJD, previous, label, index, supervised)

    def _reads_target(self) -> bool:
        """Whether the target's distribution is computed: in training only if the TV loss or the confidence head needs
        it."""
        return self.tv_weight != 0 or self.draft.confidence_head is not None or not torch.is_grad_enabled()

    def _chunked(self, blocks: Blocks, output: ModelOutput, weight_P: Tensor) -> tuple[Tensor, Tensor]:
        """The loss sum and, per row, (CE, L1, greedy match) or, without the target's distribution, (CE, correct)."""
        chosen = blocks.supervised_BNJ
        terms, label_P = self._logit_terms(blocks), blocks.label_BNJ[chosen]
        if not self._reads_target():
            constants = [self.ce_weight * weight_P, label_P]
            return chunked_sum(token_loss, terms=terms, constants=constants, chunk_mb=self.chunk_mb)
        row = torch.arange(chosen.shape[0], device=chosen.device)[:, None, None].expand(chosen.shape)
        target_PD = output.hidden_BLD[row[chosen], blocks.target_index_BNJ[chosen]]
        criterion = draft_loss(self.target.lm_head.weight, ce_weight=self.ce_weight, tv_weight=self.tv_weight)
        constants = [weight_P, label_P, target_PD]
        return chunked_sum(criterion, terms=terms, constants=constants, chunk_mb=self.chunk_mb)

    def _logit_terms(self, blocks: Blocks) -> list[tuple[Tensor, Tensor]]:
        """Factors (x [P, .], W [V, .]) whose products sum to the draft's logits: hidden states and LM head and, with a
        Markov head, transition codes and W2."""
        chosen = blocks.supervised_BNJ
        terms = [(blocks.hidden_BNJD[chosen], self.draft.lm_head.weight)]
        if self.draft.markov_head is not None:
            code_BNJR = self.draft.markov_head.transition(blocks.previous_BNJ, blocks.hidden_BNJD)
            terms.append((code_BNJR[chosen], self.draft.markov_head.markov_w2.weight))
        return terms

    def derived(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """tau if every slot were sampled from the draft's distribution: 1 + the sum of cumulative acceptance rates."""
        return {"expected_tau": 1 + values["accept"].cumprod(0).sum()} if "accept" in values else {}

    def finish(self) -> None:
        if self._cache is not None:
            self._cache.clear()

    def export(self, folder: Path, *, card: str) -> Path:
        save_pretrained(self.draft, folder / "draft", card=card)
        return folder / "draft"
