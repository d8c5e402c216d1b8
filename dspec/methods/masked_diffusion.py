"""Masked diffusion: an AR base becomes a diffusion LM, which fills the masked slots of an answer in any order.

Sources: LLaDA (arXiv 2502.09992), eq. 3 and algorithm 2 (responses alone are masked); Dream (arXiv 2508.15487) for the
start from an AR base. With t ~ U(low, high) for each row, each of the N slots of its answer is masked with
probability t, and all slots see each other and the prompt:

    L = E_t [ 1 / t  sum_{i masked} - log p(x_i | prompt, the slots that are not masked) ] / N

`shift`: the token at place i is predicted at the hidden state of place i - 1, as in the AR base and in Dream, which
keeps what the base knows; without, at place i itself, as in LLaDA. MASK is never predicted: its logit is left out of
the softmax, as in decoding. The model's config says how it was trained (models/training_record.py).

The loss is the sum over all slots of the batch, divided by their number, EOS after the responses included
(masked_diffusion/answers.py): an unbiased mean over slots, since each one is counted with one over the probability of
being masked. With `rates.schedule=blockwise` it is that of two blocks per row (masked_diffusion/noise.py).

Departures: the rates of rows follow a low-discrepancy sequence; at least one slot of a row is masked, and the weight is
one over the probability that this gives, not 1 / t (masked_diffusion/noise.py); LLaDA divides each row by its own
length. Like Dream we switch from causal to full attention at once; unlike Dream we do not reweight tokens by their
distance to known ones (CART).

Legend: B = rows, L = places of a row, P = masked slots, D = width.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Generator

from dspec.attention import masks
from dspec.errors import UserError
from dspec.losses import check_chunk, chunked_sum, head_terms, token_loss_without
from dspec.masked_diffusion.answers import AnswerLayout, Answers
from dspec.masked_diffusion.noise import BlockRates, Noise
from dspec.masked_diffusion.slots import noisy_answers, predicting_states, response_and_tail_means
from dspec.method import Batch, LossOutput, Method
from dspec.models.export import export_language_model
from dspec.models.language_model import require_causal
from dspec.models.target_model import TargetModel
from dspec.models.training_record import FULL, TrainingRecord
from dspec.tuning import Tuning


class MaskedDiffusion(Method):
    """Trains a target to fill masked slots under full attention."""

    export_dtype = torch.bfloat16
    shown = ("accuracy",)

    def __init__(
        self,
        *,
        target: TargetModel,
        tuning: Tuning,
        layout: AnswerLayout,
        rates: BlockRates,
        shift: bool,
        chunk_mb: float,
    ) -> None:
        """Raises UserError for a target without a mask token, and for a diffusion LM with the other shift."""
        super().__init__()
        self.target, self.tuning = require_causal(target), tuning
        self.mask_token_id = target.required_mask_token()
        self.layout, self.rates, self.shift, self.chunk_mb = layout, rates, shift, check_chunk(chunk_mb)
        trained = TrainingRecord.read(self.target)
        if trained.attention is not None and trained.shift != shift:
            said = str(trained.shift).lower()
            raise UserError(
                f"method.shift={str(shift).lower()} contradicts target {target.name!r}, a diffusion LM whose "
                f"config.json says dspec_logit_shift={said}: set method.shift={said}"
            )
        TrainingRecord(FULL, layout.block_size, shift).write(self.target)
        tuning.prepare(target)

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        answers, noise = noisy_answers(
            batch, layout=self.layout, rates=self.rates, target=self.target, generators=generators
        )
        return self.loss_at(answers, noise)

    def loss_at(self, answers: Answers, noise: Noise) -> LossOutput:
        """The loss with given noise."""
        # 1. all slots see each other
        ids_BL = answers.ids_BL.masked_fill(noise.masked_BL, self.mask_token_id)
        hidden = self.target(ids_BL, mask=masks.full(answers.end_B)).hidden_BLD
        # 2. cross-entropy of the masked slots; a MASK in the text is only context: it has no probability
        chosen = noise.masked_BL & noise.in_loss_BL & (answers.ids_BL != self.mask_token_id)
        loss_sum, stats = chunked_sum(
            token_loss_without(self.mask_token_id),
            terms=head_terms(self.target.lm_head, predicting_states(hidden, chosen, shift=self.shift)),
            constants=[1 / noise.probability_BL[chosen], answers.ids_BL[chosen]],
            chunk_mb=self.chunk_mb,
        )
        slots = noise.in_loss_BL.sum()
        metrics = {"mask_rate": ((noise.masked_BL & noise.in_loss_BL).sum(), slots)} | response_and_tail_means(
            {"ce": stats[:, 0], "accuracy": stats[:, 1]}, answers.tail_BL[chosen]
        )
        return LossOutput(loss_sum, slots, metrics)

    def finish(self) -> None:
        self.tuning.merge(self.target)

    def export(self, folder: Path, *, card: str) -> Path:
        return export_language_model(self.target, folder / "target", dtype=self.export_dtype, card=card)
