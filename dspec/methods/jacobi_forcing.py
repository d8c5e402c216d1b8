"""Jacobi Forcing: train a causal LM to map the noisy states of its own Jacobi trajectories to their fixed points.

Source: "Fast and Accurate Causal Parallel Decoding using Jacobi Forcing" (arXiv 2512.14681; released code
hao-ai-lab/JacobiForcing@028dbd6), training section:
L(theta) = L_pc + lambda L_AR on packed rows under the noise-conditioned mask (attention/masks.py). CLLM (arXiv
2403.00835) is window 1 without a schedule; keeping part of the weight change is WiSE-FT (arXiv 2109.01903).

L_pc is the forward KL from the distribution on the clean copy to the one on the noisy copy, token by token: at token t
both predict token t + 1, so a block's last token predicts the next block's first. A response's last token predicts
nothing and is left out. Tokens for which both copies see the same text need no such exception: their KL is zero, in
value and gradient. L_AR is computed on the clean copies, which form a plain causal text.

Departures: lambda, temperature, weights and the normalisation of the sums are parameters (the released code fixes 10
on L_AR, divides L_pc twice and trains on prompts); `decay` lowers the KL's weight after a block's first wrong token,
since decoding accepts tokens from the left; `interpolation` keeps part of the weight change.

Legend: B = rows, L = indices in a row, P = chosen tokens, D = width, V = vocabulary, N = blocks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor

from dspec.attention import masks
from dspec.errors import UserError
from dspec.jacobi_forcing.noise import Distance, Schedule, depth
from dspec.jacobi_forcing.packing import TrajectoryBatch
from dspec.jacobi_forcing.teachers import Teacher
from dspec.losses import check_chunk, chunked_sum, consistency_loss, token_loss
from dspec.method import Batch, LossOutput, Method
from dspec.models.export import export_language_model
from dspec.models.language_model import LanguageModel, require_causal
from dspec.precision import widest
from dspec.tuning import Tuning

Normalisation = Callable[[TrajectoryBatch], tuple[Tensor, Tensor]]


def per_token(batch: TrajectoryBatch) -> tuple[Tensor, Tensor]:
    """Weight [B, L] of each noisy token, and the divisor of the sums: a mean over the response's tokens."""
    return torch.ones_like(batch.ids_BL, dtype=widest(batch.ids_BL.device)), batch.supervised_BL.sum()


def per_sample(batch: TrajectoryBatch) -> tuple[Tensor, Tensor]:
    """As in the paper: KL summed over a block and averaged over a response's blocks; CE summed; mean over samples."""
    last = batch.last_BL & ~batch.noisy_BL
    weight = torch.zeros_like(batch.ids_BL, dtype=widest(batch.ids_BL.device))
    for row, index in last.nonzero().tolist():
        same_document = batch.document_BL[row] == batch.document_BL[row, index]  # type: ignore[index]
        weight[row, same_document] = 1 / float(batch.block_BL[row, index] + 1)
    return weight, last.sum()


class JacobiForcing(Method):
    """Progressive consistency plus next-token loss on packed trajectories."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        schedule: Schedule,
        distance: Distance,
        window: int | None,
        teacher: Teacher,
        tuning: Tuning,
        normalisation: Normalisation,
        consistency_weight: float,
        ar_weight: float,
        ar_on_prompt: bool,
        temperature: float,
        decay: float | None,
        chunk_mb: float,
    ) -> None:
        """`window` is the mask's (None: all earlier blocks noisy, 1: all clean); the schedule has its own. A token d
        tokens after its block's first wrong one has weight exp(-d / decay) in the KL (None: all equal)."""
        super().__init__()
        if window is not None and window < 1:
            raise UserError(f"method.window={window} must be at least 1 block (null: no limit)")
        if temperature <= 0:
            raise UserError(f"method.temperature={temperature} must be above 0")
        if decay is not None and decay <= 0:
            raise UserError(f"method.decay={decay} must be above 0 tokens (null: all tokens count equally)")
        target = require_causal(target)
        self.target, self.schedule, self.distance, self.window = target, schedule, distance, window
        self.teacher, self.tuning, self.normalisation = teacher, tuning, normalisation
        self.consistency_weight, self.ar_weight, self.ar_on_prompt = consistency_weight, ar_weight, ar_on_prompt
        self.temperature, self.decay, self.chunk_mb = temperature, decay, check_chunk(chunk_mb)
        tuning.prepare(target)
        teacher.bind(target)

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        """Raises UserError for a batch without trajectories."""
        if not isinstance(batch, TrajectoryBatch):
            raise UserError("Jacobi Forcing trains on trajectories: use recipe=jacobi_forcing, with any data")
        ratio_NK = self.distance(batch.states_NKn, batch.fixed_points, batch.length_N)
        blocks_B = torch.bincount(batch.row_N, minlength=len(batch.ids_BL)).tolist()  # blocks are ordered by row
        uniform_N = torch.cat([torch.rand(n, generator=g) for n, g in zip(blocks_B, generators, strict=False)])
        chosen_N = self.schedule.choose(ratio_NK, batch.count_N, batch.index_N, uniform_N.to(ratio_NK.device))
        output = self.loss_at(batch, chosen_N)
        noise = ratio_NK.gather(1, chosen_N[:, None]).sum()
        output.metrics["noise"] = (noise, torch.ones_like(noise) * len(chosen_N))
        return output

    def loss_at(self, batch: TrajectoryBatch, chosen_N: Tensor) -> LossOutput:
        """The loss with given states in the noisy copies."""
        # 1. one pass over both copies of every block
        ids_BL = batch.with_states(chosen_N)
        positions, document = batch.positions_BL, batch.document_BL
        if positions is None or document is None:
            raise UserError("a packed row needs positions and documents")
        mask = masks.noise_conditioned(document, batch.block_BL, batch.noisy_BL, window=self.window)
        hidden = self.target(ids_BL, positions_BL=positions, mask=mask).hidden_BLD
        teacher, teacher_head = self.teacher(self.target, ids_BL, positions_BL=positions, mask=mask, student_BLD=hidden)
        # 2. L_pc on the noisy copies, down-weighted after a block's first wrong token
        weight_BL, total = self.normalisation(batch)
        if self.decay is not None:
            weight_BL = weight_BL * self._decayed(batch, chosen_N, self.decay, torch.ones_like(weight_BL))
        kl_sum, kl = self._consistency(batch, hidden, teacher, teacher_head, weight_BL)
        # 3. L_AR on the clean ones
        ce_sum, ce = self._next_token(batch, ids_BL, hidden)
        noisy_count, clean_count = (torch.tensor(float(len(stats)), device=stats.device) for stats in (kl, ce))
        metrics = {
            "kl": (kl[:, 0].sum(), noisy_count),
            "match": (kl[:, 1].sum(), noisy_count),
            "ce": (ce[:, 0].sum(), clean_count),
        }
        return LossOutput(self.consistency_weight * kl_sum + self.ar_weight * ce_sum, total, metrics)

    def _decayed(self, batch: TrajectoryBatch, chosen_N: Tensor, decay: float, onto_BL: Tensor) -> Tensor:
        """exp(-d / decay) at noisy tokens d tokens after their block's first wrong one, else `onto_BL`."""
        depth_Nn = depth(batch.states(chosen_N), batch.fixed_points, batch.length_N).to(onto_BL)
        return batch.scatter_to_noisy(torch.exp(-depth_Nn / decay), onto_BL)

    def _consistency(
        self, batch: TrajectoryBatch, hidden: Tensor, teacher: Tensor, teacher_head: Tensor, weight_BL: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Token t of a noisy copy against token t of the clean one: both predict token t + 1."""
        chosen = batch.noisy_BL & ~batch.last_BL
        row = chosen.nonzero()[:, 0]
        return chunked_sum(
            consistency_loss(teacher_head, temperature=self.temperature),
            terms=[(hidden[chosen], self.target.lm_head.weight)],
            constants=[weight_BL[chosen], teacher[row, batch.clean_index_BL[chosen]].detach()],
            chunk_mb=self.chunk_mb,
        )

    def _next_token(self, batch: TrajectoryBatch, ids_BL: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Each clean token, predicted from the previous one in the clean text."""
        prompt = (batch.block_BL < 0) & (batch.document_BL >= 0)  # type: ignore[operator]
        wanted = batch.supervised_BL | prompt if self.ar_on_prompt else batch.supervised_BL
        chosen = wanted & (batch.previous_index_BL >= 0)
        row, label_P = chosen.nonzero()[:, 0], ids_BL[chosen]
        return chunked_sum(
            token_loss,
            terms=[(hidden[row, batch.previous_index_BL[chosen]], self.target.lm_head.weight)],
            constants=[torch.ones_like(label_P, dtype=hidden.dtype), label_P],
            chunk_mb=self.chunk_mb,
        )

    def after_step(self) -> None:
        self.teacher.after_step(self.target)

    def finish(self) -> None:
        self.tuning.merge(self.target)

    def export(self, folder: Path, *, card: str) -> Path:
        return export_language_model(self.target, folder / "target", dtype=self.export_dtype, card=card)
