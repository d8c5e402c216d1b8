"""Losses over a frozen LM head, computed in chunks so that no full [positions, vocabulary] tensor ever exists.

Legend: P = supervised positions, D = width, R = rank of the transition code, V = vocabulary, K = slots.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ChunkLoss = Callable[..., tuple[Tensor, Tensor]]


def decay_weights(slots: int, *, gamma: float) -> Tensor:
    """w_k = exp(-k / gamma) for k = 0..slots-1 (DSpark, section 4; DeepSpec has gamma = 4 whatever the block)."""
    return torch.exp(-torch.arange(slots) / gamma)


class _ChunkedSum(torch.autograd.Function):
    """Sums a loss over row chunks and takes its gradient in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, fn: ChunkLoss, chunk: int, constants: Sequence[Tensor], rows: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[4:]
        grads = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needs, strict=True)]
        total, stats = torch.zeros((), device=tensors[0].device), []
        for start in range(0, max(1, tensors[0].shape[0]), chunk):  # without rows: one empty chunk
            part = slice(start, start + chunk)
            inputs = [
                (t[part] if i < rows else t).detach().requires_grad_(need)
                for i, (t, need) in enumerate(zip(tensors, needs, strict=True))
            ]
            with torch.enable_grad():
                loss, row_stats = fn(*inputs, *(c[part] for c in constants))
            wanted = [x for x in inputs if x.requires_grad]
            for x_grad, i in zip(
                torch.autograd.grad(loss, wanted, materialize_grads=True) if wanted else (),
                (i for i, n in enumerate(needs) if n),
                strict=True,
            ):
                grad = grads[i]
                if grad is not None:
                    (grad[part] if i < rows else grad).add_(x_grad)
            total = total + loss.detach()
            stats.append(row_stats.detach())
        ctx.grads = grads
        stacked = torch.cat(stats)
        ctx.mark_non_differentiable(stacked)
        return total, stacked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_stats: Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *(None if g is None else g * grad_total for g in ctx.grads))


def chunked_sum(
    fn: ChunkLoss,
    *,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    constants: Sequence[Tensor],
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Sum of `fn` over chunks of at most `chunk` rows, and its per-row statistics [P, M].

    `fn(*rows, *weights, *constants)` gets the chunk's slice of each row tensor [P, ...], the weights whole and the
    slices of the constants, and returns (scalar sum, statistics [p, M]). Gradients flow to rows and weights only.
    """
    total, stats = _ChunkedSum.apply(fn, chunk, tuple(constants), len(rows), *rows, *weights)
    return total, stats


def draft_loss(head_VD: Tensor, target_head_VD: Tensor, *, ce_weight: float, tv_weight: float) -> ChunkLoss:
    """Weighted CE on data tokens plus L1 distance (= 2 TV) to the target's law (DSpark, section 4).

    The returned function takes hidden [p, D], code [p, R], W2 [V, R], weight [p], label [p], target hidden [p, D];
    its statistics are (CE, L1, greedy match) a row. With R = 0 there is no transition bias.
    """

    def fn(
        hidden: Tensor, code: Tensor, w2_VR: Tensor, weight: Tensor, label: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, head_VD)
        if code.shape[-1]:
            logits = logits + F.linear(code, w2_VR)
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_draft = logits.to(wide).log_softmax(-1)
        target_logits = F.linear(target, target_head_VD)
        l1 = (log_draft.exp() - target_logits.to(wide).softmax(-1)).abs().sum(-1)
        ce = F.nll_loss(log_draft, label, reduction="none")
        match = (log_draft.argmax(-1) == target_logits.argmax(-1)).to(wide)
        total = (weight * (ce_weight * ce + tv_weight * l1)).sum()
        return total, torch.stack([ce, l1, match], -1)

    return fn


def token_loss(hidden: Tensor, head_VD: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Next-token cross-entropy as a ChunkLoss; statistics are (CE, correct) a row."""
    logits = F.linear(hidden, head_VD)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ce = F.cross_entropy(logits, label, reduction="none")
    return ce.sum(), torch.stack([ce, (logits.argmax(-1) == label).to(ce.dtype)], -1)


def consistency_loss(teacher_head_VD: Tensor, *, temperature: float) -> ChunkLoss:
    """Forward KL(teacher || student) of laws at `temperature`, teacher not differentiated (Jacobi Forcing, L_pc).

    The returned function takes student hidden [p, D], the student's head [V, D], weight [p], teacher hidden [p, D];
    its statistics are (KL, greedy match) a row.
    """

    def fn(hidden: Tensor, head_VD: Tensor, weight: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        student_logits, teacher_logits = F.linear(hidden, head_VD), F.linear(teacher, teacher_head_VD).detach()
        wide = torch.promote_types(student_logits.dtype, torch.float32)
        log_student, log_teacher = (
            (z.to(wide) / temperature).log_softmax(-1) for z in (student_logits, teacher_logits)
        )
        kl = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
        match = (student_logits.argmax(-1) == teacher_logits.argmax(-1)).to(wide)
        return (weight * kl).sum(), torch.stack([kl, match], -1)

    return fn


def confidence_loss(logits_P: Tensor, l1_P: Tensor) -> Tensor:
    """BCE [P] against the analytic acceptance c* = 1 - L1 / 2, which is not differentiated (DSpark, section 3)."""
    return F.binary_cross_entropy_with_logits(logits_P, (1 - l1_P / 2).detach(), reduction="none")
