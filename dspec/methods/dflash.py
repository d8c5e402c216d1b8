"""DFlash: train a block-diffusion drafter on random anchors (z-lab/dflash, DeepSpec).

Source: "DFlash: Block Diffusion for Flash Speculative Decoding", its training section: random anchors, blocks that
do not see each other, exponentially decaying cross-entropy. Both slot layouts (models/draft.py). Departures: target
features are computed online, never stored; the decay constant is a parameter of its own, as in DeepSpec, not the
block size; each loss is divided by the sum of its weights over all ranks.

Legend: B = batch, L = positions, N = anchors, K = block slots, J = draft slots, P = supervised slots, D = width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from dspec.attention import masks
from dspec.errors import UserError
from dspec.losses import check_chunk, chunked_sum, decay_weights, draft_loss, token_loss
from dspec.method import Batch, LossOutput, Method, Metrics
from dspec.models.checkpoint import save_pretrained
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel, ModelOutput
from dspec.precision import widest


@dataclass(frozen=True)
class Blocks:
    """The drafted blocks of a batch and what supervises them."""

    hidden_BNJD: Tensor  # drafter states of the slots that draft
    previous_BNJ: Tensor  # token before the one each slot predicts
    label_BNJ: Tensor  # token each slot predicts
    at_BNJ: Tensor  # position whose target hidden state gives the target's law for that token
    supervised_BNJ: Tensor  # bool


def sample_anchors(loss_BL: Tensor, count: int, *, generators: Sequence[Generator]) -> tuple[Tensor, Tensor]:
    """Up to `count` anchors a row, uniform without replacement, sorted: positions [B, N] and validity [B, N].

    Row b draws from generators[b] alone, whatever it is padded to. Position p may be an anchor if both it and p + 1
    are supervised.
    """
    eligible = loss_BL[:, :-1] & loss_BL[:, 1:]
    score = torch.stack([torch.rand(len(row), generator=g) for row, g in zip(eligible, generators, strict=False)])
    score = score.to(loss_BL.device)
    count = min(count, eligible.shape[1])
    score, at = (score + eligible).topk(count, dim=1)  # eligible positions score above 1
    valid = score >= 1
    at = torch.where(valid, at, loss_BL.shape[1])
    at, order = at.sort(dim=1)
    valid = valid.gather(1, order)
    return torch.where(valid, at, 0), valid


class DFlash(Method):
    """CE (and, if asked, total-variation) training of a drafter against its frozen target."""

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
    ) -> None:
        """`loss_decay` is gamma in slots; `chunk_mb` MiB of logits exist at a time."""
        super().__init__()
        if num_anchors < 1:
            raise UserError(f"method.num_anchors={num_anchors} blocks a row must be at least 1")
        if loss_decay <= 0:
            raise UserError(f"method.loss_decay={loss_decay} slots must be above 0 (large: all slots count alike)")
        if draft.markov_head is not None or draft.confidence_head is not None:
            self._refuse_heads()
        self.target, self.draft = target, draft
        self.num_anchors, self.loss_decay, self.chunk_mb = num_anchors, loss_decay, check_chunk(chunk_mb)
        draft.num_anchors = num_anchors
        self.ce_weight, self.tv_weight = ce_weight, tv_weight

    def _refuse_heads(self) -> None:
        raise UserError(
            "DFlash trains a drafter without heads: say draft.markov_head_type=null draft.confidence_head=false, or "
            "recipe=dspark"
        )

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        with torch.no_grad():
            output = self.target(batch.ids_BL, taps=self.draft.config.target_layer_ids)
        anchor_BN, valid_BN = sample_anchors(batch.loss_BL, self.num_anchors, generators=generators)
        return self.loss_at(batch, output, anchor_BN, valid_BN)

    def loss_at(self, batch: Batch, output: ModelOutput, anchor_BN: Tensor, valid_BN: Tensor) -> LossOutput:
        """The loss for given anchors; `output` holds the target's features and final hidden states."""
        blocks = self.draft_blocks(batch, output, anchor_BN, valid_BN)
        return self._supervise(blocks, output)

    def draft_blocks(self, batch: Batch, output: ModelOutput, anchor_BN: Tensor, valid_BN: Tensor) -> Blocks:
        """Runs the drafter on all blocks at once and lines its slots up with their labels."""
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
        at = anchor_BN[..., None] + torch.arange(config.num_drafts, device=device)  # label position - 1
        inside = at + 1 < L
        at = at.clamp(max=L - 2)
        supervised = inside & batch.loss_BL.gather(1, (at + 1).flatten(1)).view_as(at)
        supervised = supervised.cumprod(-1).bool() & valid_BN[..., None]
        previous, label = (batch.ids_BL.gather(1, i.flatten(1)).view_as(at) for i in (at, at + 1))
        return Blocks(hidden_BNJD, previous, label, at, supervised)

    def _codes(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Transition codes [B, N, J, R] and W2 [V, R]; DFlash has none (R = 0)."""
        return blocks.hidden_BNJD[..., :0], self.draft.lm_head.weight[:, :0]

    def _reads_law(self) -> bool:
        """Whether the target's distribution is computed: in training only if the loss weighs it."""
        return self.tv_weight != 0 or not torch.is_grad_enabled()

    def _supervise(self, blocks: Blocks, output: ModelOutput) -> LossOutput:
        chosen = blocks.supervised_BNJ
        slots, device = chosen.shape[-1], chosen.device
        weight_P = (
            decay_weights(slots, gamma=self.loss_decay).to(blocks.hidden_BNJD.device).expand(chosen.shape)[chosen]
        )
        slot_P = torch.arange(slots, device=device).expand(chosen.shape)[chosen]
        count_J = torch.bincount(slot_P, minlength=slots).to(weight_P)
        total, stats = self._chunked(blocks, output, weight_P)

        def per_slot(values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.bincount(slot_P, weights=values.to(widest(device)), minlength=slots).to(weight_P), count_J

        metrics: Metrics = {"ce": ((weight_P * stats[:, 0]).sum(), weight_P.sum())}
        if not self._reads_law():
            return LossOutput(total, weight_P.sum(), metrics | {"accuracy": per_slot(stats[:, 1])})
        _, l1, match = stats.unbind(-1)
        metrics |= {
            "tv": ((weight_P * l1 / 2).sum(), weight_P.sum()),
            "accept": per_slot(1 - l1 / 2),
            "match": per_slot(match),
        }
        extra, extra_metrics = self._extra(blocks, weight_P, l1)
        return LossOutput(total + extra, weight_P.sum(), metrics | extra_metrics)

    def _chunked(self, blocks: Blocks, output: ModelOutput, weight_P: Tensor) -> tuple[Tensor, Tensor]:
        """The loss sum and, a row, (CE, L1, greedy match) or, without the target's law, (CE, correct)."""
        chosen = blocks.supervised_BNJ
        code, w2_VR = self._codes(blocks)
        terms = [(blocks.hidden_BNJD[chosen], self.draft.lm_head.weight), (code[chosen], w2_VR)]
        label_P = blocks.label_BNJ[chosen]
        if not self._reads_law():
            constants = [self.ce_weight * weight_P, label_P]
            return chunked_sum(token_loss, terms=terms, constants=constants, chunk_mb=self.chunk_mb)
        row = torch.arange(chosen.shape[0], device=chosen.device)[:, None, None].expand(chosen.shape)
        target_PD = output.hidden_BLD[row[chosen], blocks.at_BNJ[chosen]]
        criterion = draft_loss(self.target.lm_head.weight, ce_weight=self.ce_weight, tv_weight=self.tv_weight)
        constants = [weight_P, label_P, target_PD]
        return chunked_sum(criterion, terms=terms, constants=constants, chunk_mb=self.chunk_mb)

    def _extra(self, blocks: Blocks, weight_P: Tensor, l1_P: Tensor) -> tuple[Tensor, Metrics]:
        """A further weighted loss sum and its metrics; DFlash has none."""
        return weight_P.new_zeros(()), {}

    def export(self, folder: Path, *, card: str) -> Path:
        save_pretrained(self.draft, folder / "draft", card=card)
        return folder / "draft"
