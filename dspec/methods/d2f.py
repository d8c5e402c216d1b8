"""D2F: a diffusion LM learns to see only earlier blocks, so that several blocks can be decoded at a time, and cached.

Source: "Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing" (arXiv 2508.09192), section 4.2;
released code SJTU-DENG-Lab/Discrete-Diffusion-Forcing@771f745. An answer is cut into blocks, which are masked at rates
that rise from block to block (masked_diffusion/noise.py). On the same noisy row

    teacher q: the weights before training (the adapter off) under full attention, without gradient
    student p: the same weights with the adapter on, under block-causal attention
    L = mean over the masked slots of  w_b KL

`kl`       student_teacher   KL(p || q)   eq. 3 of the paper
           teacher_student   KL(q || p)   the released code: cross-entropy with the teacher's distribution as target
`weight`   none              w_b = 1      eq. 3
           inverse_p         w_b = 1 / p_b, the rate of the slot's block   the released code

MASK's logit is left out of both softmaxes, as in decoding. Whether the token at a place is predicted one place before
it (`shift`) is the base's property: its config.json says so. Under block-causal attention the first token of a block is
then predicted at the last place of the block before, which does not see the block.

Decoding starts from fully masked blocks, which rates of at most 0.7 (the paper's) never show the student;
`rates.high: 1.0` does.

Departures: the divisor counts the masked slots of the micro-batch over all ranks (released code: over those of one);
EOS after a response up to a number of blocks, not to the batch's or a fixed length; no LoRA dropout; no clipping of
long prompts but data.max_length; 1 / p_b as in masked_diffusion/noise.py, where one slot of a row is always masked.

Legend: B = rows, L = places of a row, P = masked slots, D = width, V = vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Generator, Tensor

from dspec.attention import masks
from dspec.errors import UserError
from dspec.losses import check_chunk, chunked_sum, distillation_loss, head_terms
from dspec.masked_diffusion.answers import AnswerLayout, Answers
from dspec.masked_diffusion.noise import BlockRates, Noise
from dspec.masked_diffusion.slots import noisy_answers, predicting_states, response_and_tail_means
from dspec.method import Batch, LossOutput, Method
from dspec.models.export import export_language_model
from dspec.models.language_model import LanguageModel, require_causal
from dspec.models.target_model import TargetModel
from dspec.models.training_record import BLOCK_CAUSAL, TrainingRecord
from dspec.tuning import LoRA, Tuning

STUDENT_TEACHER: Final = "student_teacher"
TEACHER_STUDENT: Final = "teacher_student"
DIVERGENCES: Final = (STUDENT_TEACHER, TEACHER_STUDENT)
INVERSE_P: Final = "inverse_p"
WEIGHTS: Final = ("none", INVERSE_P)


class D2F(Method):
    """Distils a diffusion LM into itself under block-causal attention."""

    export_dtype = torch.bfloat16
    shown = ("match",)

    def __init__(
        self,
        *,
        target: TargetModel,
        tuning: Tuning,
        layout: AnswerLayout,
        rates: BlockRates,
        kl: str,
        weight: str,
        eos_blocks: bool,
        shift: bool | None,
        chunk_mb: float,
    ) -> None:
        """`eos_blocks` false leaves the EOS after a response out of the loss; they stay in the input, masked or not.
        `shift` None is what the base's config.json says; for a base whose config.json says nothing, true or false says
        how it was trained.

        Raises UserError for a target that is no diffusion LM or a D2F student, for full tuning, and for settings that
        are unknown or contradict the base's.
        """
        super().__init__()
        for name, value, known in (("kl", kl, DIVERGENCES), ("weight", weight, WEIGHTS)):
            if value not in known:
                raise UserError(f"method.{name}={value} is unknown; choose one of {', '.join(known)}")
        if not isinstance(tuning, LoRA):
            raise UserError(
                "recipe=d2f needs method/tuning=lora: its teacher is the same model with the adapter off, which full "
                "fine-tuning does not have"
            )
        self.target, self.tuning = require_causal(target), tuning
        self.mask_token_id = target.required_mask_token()
        self.shift = _shift(self.target, shift)
        self.layout, self.rates, self.chunk_mb = layout, rates, check_chunk(chunk_mb)
        self.kl, self.weight, self.eos_blocks = kl, weight, eos_blocks
        TrainingRecord(BLOCK_CAUSAL, layout.block_size, self.shift).write(self.target)
        tuning.prepare(target)

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        answers, noise = noisy_answers(
            batch, layout=self.layout, rates=self.rates, target=self.target, generators=generators
        )
        return self.loss_at(answers, noise)

    def loss_at(self, answers: Answers, noise: Noise) -> LossOutput:
        """The loss with given noise."""
        # 1. the same noisy rows under both masks
        ids_BL = answers.ids_BL.masked_fill(noise.masked_BL, self.mask_token_id)
        # a MASK in the text is only context
        chosen = noise.masked_BL & noise.in_loss_BL & (answers.ids_BL != self.mask_token_id)
        if not self.eos_blocks:
            chosen = chosen & ~answers.tail_BL
        student, teacher = (predicting_states(h, chosen, shift=self.shift) for h in self.hidden(answers, ids_BL))
        # 2. the distance of their distributions in the masked slots
        weight_BL = 1 / noise.probability_BL if self.weight == INVERSE_P else torch.ones_like(noise.probability_BL)
        loss_sum, stats = chunked_sum(
            distillation_loss(
                self.target.lm_head.weight, reverse=self.kl == STUDENT_TEACHER, banned=self.mask_token_id
            ),
            terms=head_terms(self.target.lm_head, student),
            constants=[weight_BL[chosen], teacher],
            chunk_mb=self.chunk_mb,
        )
        slots = noise.in_loss_BL.sum()
        metrics = {"mask_rate": ((noise.masked_BL & noise.in_loss_BL).sum(), slots)} | response_and_tail_means(
            {"kl": stats[:, 0], "match": stats[:, 1]}, answers.tail_BL[chosen]
        )
        return LossOutput(loss_sum, chosen.sum(), metrics)

    def hidden(self, answers: Answers, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [B, L, D] of the student and of the teacher."""
        with torch.no_grad(), self.tuning.disabled(self.target):
            teacher = self.target(ids_BL, mask=masks.full(answers.end_B)).hidden_BLD
        starts_B = torch.zeros_like(answers.end_B)
        student = self.target(ids_BL, mask=masks.block_causal(answers.blocks, starts_B)).hidden_BLD
        return student, teacher

    def finish(self) -> None:
        self.tuning.merge(self.target)

    def export(self, folder: Path, *, card: str) -> Path:
        return export_language_model(self.target, folder / "target", dtype=self.export_dtype, card=card)


def _shift(base: LanguageModel, wanted: bool | None) -> bool:
    """Whether the base's logits are shifted. Raises UserError for a base that is no teacher or contradicts `wanted`."""
    record = TrainingRecord.read(base)
    if record.attention == BLOCK_CAUSAL:
        raise UserError(
            f"target {base.name!r} is a D2F student (dspec_attention=block_causal in its config.json): take the "
            "diffusion LM that it was trained from"
        )
    if record.attention is None:
        if wanted is None:
            raise UserError(
                f"target {base.name!r} is not recorded as a diffusion LM (no dspec_attention in its config.json): make "
                "one with recipe=dllm_base; if it is one, say whether its logits are shifted: method.shift=true|false"
            )
        return wanted
    if wanted not in (None, record.shift):
        raise UserError(
            f"method.shift={str(wanted).lower()} contradicts target {base.name!r}, whose config.json says "
            f"dspec_logit_shift={str(record.shift).lower()}: leave it out (null)"
        )
    return record.shift
