"""Losses over an LM head, computed in chunks so that no full [positions, vocabulary] tensor ever exists.

Each chunk's gradient is computed in closed form, in buffers that all chunks share: fresh ones of many megabytes would
be mapped and unmapped at every operation. With p = softmax(draft logits z), q the target's, s = sign(p - q):

    d CE / dz = p - onehot(label)
    d sum_v |p_v - q_v| / dz = p * (s - sum_v p_v s_v)
    d KL(q || softmax(z / T)) / dz = (softmax(z / T) - q) / T
    d KL(p || q) / dz = p * (log p - log q - KL(p || q))

Legend: P = supervised positions, p = those of one chunk, D = width, V = vocabulary, M = statistics per row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dspec.errors import UserError


def decay_weights(slots: int, *, gamma: float) -> Tensor:
    """w_k = exp(-k / gamma) for k = 0..slots-1 (DSpark, section 4; DeepSpec uses gamma = 4 for every block size)."""
    return torch.exp(-torch.arange(slots) / gamma)


class Workspace:
    """Named buffers reused by every chunk, and matmuls in the dtype of autocast, if it is on."""

    def __init__(self, like: Tensor) -> None:
        kind, self._device = like.device.type, like.device
        autocast = like.dtype != torch.float64 and torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind) if autocast else like.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)  # dtype of everything except matmuls
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The buffer of that name, uninitialised; in the wide dtype unless one is given."""
        key, size = (name, dtype or self.wide), torch.Size(shape).numel()
        if key not in self._held or self._held[key].numel() < size:
            self._held[key] = torch.empty(size, dtype=key[1], device=self._device)
        return self._held[key][:size].view(*shape)

    def weight(self, w: Tensor) -> Tensor:
        """A weight in the matmuls' dtype, cast once."""
        if id(w) not in self._weights:
            self._weights[id(w)] = (w, w.to(self.dtype))  # holding w keeps its id from being reused
        return self._weights[id(w)][1]

    def narrow(self, x: Tensor) -> Tensor:
        """A chunk's wide tensor in the matmuls' dtype."""
        return x if x.dtype == self.dtype else self.take("narrow", x.shape, self.dtype).copy_(x)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """out = a b or, with `add`, out + a b: the factors in the matmuls' dtype, `out` wide."""
        if out.dtype == self.dtype:
            return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
        product = torch.mm(a, b, out=self.take("product", out.shape, self.dtype))
        return out.add_(product) if add else out.copy_(product)

    def logits(self, x_pD: Tensor, w_VD: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        return self.matmul(x_pD.to(self.dtype), self.weight(w_VD).T, out, add=add)


def head_terms(head: nn.Linear, x_PD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Terms of `chunked_sum` whose sum is head(x): a bias is the weight of a constant 1."""
    terms = [(x_PD, head.weight)]
    if head.bias is not None:
        terms.append((x_PD.new_ones(len(x_PD), 1), head.bias[:, None]))
    return terms


# (workspace, logits [p, V], whether the gradient is needed, *the chunk's constants) -> losses [p], statistics [p, M]
# and the gradient of the losses' sum with respect to the logits [p, V], or None; may overwrite the logits
Criterion = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


class _ChunkedSum(torch.autograd.Function):
    """Sums a criterion over row chunks and takes its gradient in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, criterion: Criterion, chunk_mb: float, constants: Sequence[Tensor], *factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        # 1. rows per chunk, and a wide gradient buffer for each factor that needs one
        work, needs = Workspace(factors[0]), ctx.needs_input_grad[3:]
        count, vocab = len(factors[0]), len(factors[1])
        rows = max(1, int(chunk_mb * 2**20 / (vocab * work.wide.itemsize)))
        grads = [torch.zeros_like(t, dtype=work.wide) if need else None for t, need in zip(factors, needs, strict=True)]
        losses, stats = [], []
        for start in range(0, max(1, count), rows):  # without rows: one empty chunk
            part = slice(start, start + rows)
            # 2. the chunk's logits, summed over the terms
            logits_pV = work.take("logits", (min(rows, count - start), vocab))
            for i in range(0, len(factors), 2):
                work.logits(factors[i][part], factors[i + 1], logits_pV, add=i > 0)
            # 3. its losses, its statistics and the gradient of its logits
            loss_p, stats_pM, grad_pV = criterion(work, logits_pV, any(needs), *(c[part] for c in constants))
            losses.append(loss_p.sum())
            stats.append(stats_pM)
            # 4. that gradient into the factors, before the next chunk reuses the buffers
            if grad_pV is not None:
                _into_factors(work, work.narrow(grad_pV), factors, grads, part)
        # 5. saved for backward in the factors' dtypes, as autograd's own would be
        ctx.grads = [None if g is None else g.to(t.dtype) for g, t in zip(grads, factors, strict=True)]
        stacked = torch.cat(stats)
        ctx.mark_non_differentiable(stacked)
        return torch.stack(losses).sum(), stacked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_stats: Tensor) -> tuple[Any, ...]:
        return (None, None, None, *(None if g is None else g * grad_total.to(g.dtype) for g in ctx.grads))


def _into_factors(
    work: Workspace,
    grad_pV: Tensor,
    factors: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    part: slice,
) -> None:
    """Adds a chunk's share to the gradients of the terms x W^T: dz W to x's rows, dz^T x to W."""
    for i in range(0, len(factors), 2):
        x_grad, w_grad = grads[i], grads[i + 1]
        if x_grad is not None:
            work.matmul(grad_pV, work.weight(factors[i + 1]), x_grad[part])
        if w_grad is not None:
            work.matmul(grad_pV.T, factors[i][part].to(work.dtype), w_grad, add=True)


def chunked_sum(
    criterion: Criterion,
    *,
    terms: Sequence[tuple[Tensor, Tensor]],
    constants: Sequence[Tensor],
    chunk_mb: float,
) -> tuple[Tensor, Tensor]:
    """Sum of a criterion's losses over P rows, and its statistics [P, M], with `chunk_mb` MiB of logits at a time.

    The logits are the sum over `terms` (x [P, D], W [V, D]) of x W^T; gradients flow to those factors only. The
    criterion receives a chunk's logits and its slices of the constants [P, ...].
    """
    factors = [t for term in terms for t in term]
    if not torch.is_grad_enabled():
        factors = [t.detach() for t in factors]
    total, stats = _ChunkedSum.apply(criterion, chunk_mb, tuple(constants), *factors)
    return total, stats


def check_chunk(chunk_mb: float) -> float:
    """Raises UserError unless `chunk_mb` is positive."""
    if chunk_mb <= 0:
        raise UserError(f"method.chunk_mb={chunk_mb} MiB of logits at a time must be above 0")
    return chunk_mb


def _cross_entropy(logits_pV: Tensor, label_p: Tensor, probs_pV: Tensor) -> tuple[Tensor, Tensor]:
    """CE [p] and greedy tokens [p]; writes the softmax to `probs_pV`."""
    top, best = logits_pV.max(-1)
    torch.softmax(logits_pV, -1, out=probs_pV)
    gap = top - logits_pV.gather(-1, label_p[:, None]).squeeze(-1)
    return gap - probs_pV.gather(-1, best[:, None]).squeeze(-1).log(), best  # the top token's p is at least 1 / V


def token_loss(
    work: Workspace, logits_pV: Tensor, gradient: bool, weight_p: Tensor, label_p: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weighted cross-entropy as a Criterion; statistics are (CE, correct) per row."""
    weight_p = weight_p.to(work.wide)
    probs = work.take("probs", logits_pV.shape)
    ce, best = _cross_entropy(logits_pV, label_p, probs)
    stats = torch.stack([ce, (best == label_p).to(ce)], -1)
    if gradient:
        probs.mul_(weight_p[:, None]).scatter_add_(-1, label_p[:, None], -weight_p[:, None])
    return weight_p * ce, stats, probs if gradient else None


def token_loss_without(banned: int) -> Criterion:
    """`token_loss` under a softmax that leaves the token `banned` out, which must be no label."""

    def criterion(
        work: Workspace, logits_pV: Tensor, gradient: bool, weight_p: Tensor, label_p: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits_pV[:, banned] = -torch.inf  # its probability and its gradient are exact zeros
        return token_loss(work, logits_pV, gradient, weight_p, label_p)

    return criterion


def draft_loss(target_head_VD: Tensor, *, ce_weight: float, tv_weight: float) -> Criterion:
    """Weighted CE on data tokens plus L1 distance (= 2 TV) to the target's distribution (DSpark, section 4).

    The constants are weight [p], label [p] and target hidden [p, D]; statistics are (CE, L1, greedy match) per row.
    """

    def criterion(
        work: Workspace, logits_pV: Tensor, gradient: bool, weight_p: Tensor, label_p: Tensor, target_pD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        weight_p = weight_p.to(work.wide)
        draft = work.take("draft", logits_pV.shape)
        ce, best = _cross_entropy(logits_pV, label_p, draft)
        target_logits = work.logits(target_pD, target_head_VD, logits_pV)  # the draft's are not read again
        match = (best == target_logits.argmax(-1)).to(ce)
        target = torch.softmax(target_logits, -1, out=work.take("target", logits_pV.shape))
        difference = torch.sub(draft, target, out=logits_pV)
        l1 = torch.abs(difference, out=target).sum(-1)
        stats = torch.stack([ce, l1, match], -1)
        if not gradient:
            return weight_p * (ce_weight * ce + tv_weight * l1), stats, None
        ce_p, tv_p = (weight_p * ce_weight)[:, None], (weight_p * tv_weight)[:, None]
        signed = torch.mul(draft, difference.sign_(), out=target)
        grad = torch.mul(signed, tv_p, out=logits_pV).addcmul_(draft, ce_p - tv_p * signed.sum(-1, keepdim=True))
        grad.scatter_add_(-1, label_p[:, None], -ce_p)
        return weight_p * (ce_weight * ce + tv_weight * l1), stats, grad

    return criterion


def consistency_loss(teacher_head_VD: Tensor, *, temperature: float) -> Criterion:
    """Forward KL(teacher || student) at `temperature`, the teacher detached (Jacobi Forcing, L_pc).

    The logits are the student's, the constants weight [p] and teacher hidden [p, D]; statistics are (KL, greedy
    match) per row.
    """

    def criterion(
        work: Workspace, logits_pV: Tensor, gradient: bool, weight_p: Tensor, teacher_pD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        weight_p, shape = weight_p.to(work.wide), logits_pV.shape
        teacher_logits = work.logits(teacher_pD, teacher_head_VD, work.take("teacher", shape))
        match = (logits_pV.argmax(-1) == teacher_logits.argmax(-1)).to(weight_p)
        log_student = torch.log_softmax(logits_pV.div_(temperature), -1, out=work.take("student", shape))
        log_teacher = torch.log_softmax(teacher_logits.div_(temperature), -1, out=logits_pV)
        teacher = torch.exp(log_teacher, out=teacher_logits)
        kl = log_teacher.sub_(log_student).mul_(teacher).sum(-1)
        grad = log_student.exp_().sub_(teacher).mul_((weight_p / temperature)[:, None]) if gradient else None
        return weight_p * kl, torch.stack([kl, match], -1), grad

    return criterion


def distillation_loss(teacher_head_VD: Tensor, *, reverse: bool, banned: int) -> Criterion:
    """KL(student || teacher) if `reverse`, else KL(teacher || student); both softmaxes leave the token `banned` out,
    the teacher is detached.

    The logits are the student's, the constants weight [p] and teacher hidden [p, D]; statistics are (KL, greedy
    match) per row.
    """

    def criterion(
        work: Workspace, logits_pV: Tensor, gradient: bool, weight_p: Tensor, teacher_pD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        weight_p, shape = weight_p.to(work.wide), logits_pV.shape
        teacher_logits = work.logits(teacher_pD, teacher_head_VD, work.take("teacher", shape))
        logits_pV[:, banned] = teacher_logits[:, banned] = -torch.inf
        match = (logits_pV.argmax(-1) == teacher_logits.argmax(-1)).to(weight_p)
        log_student = torch.log_softmax(logits_pV, -1, out=work.take("student", shape))
        log_teacher = torch.log_softmax(teacher_logits, -1, out=logits_pV)
        student = torch.exp(log_student, out=teacher_logits)
        log_student[:, banned] = log_teacher[:, banned] = 0  # the probabilities stay 0: nothing is added below
        if reverse:
            ratio = log_student.sub_(log_teacher)
            kl = (ratio * student).sum(-1)
            grad = ratio.sub_(kl[:, None]).mul_(student) if gradient else None
        else:
            difference = torch.sub(log_teacher, log_student, out=log_student)
            teacher = log_teacher.exp_()
            teacher[:, banned] = 0
            kl = difference.mul_(teacher).sum(-1)
            grad = student.sub_(teacher) if gradient else None
        if grad is not None:
            grad.mul_(weight_p[:, None])
        return weight_p * kl, torch.stack([kl, match], -1), grad

    return criterion


def confidence_loss(logits_P: Tensor, l1_P: Tensor) -> Tensor:
    """BCE [P] against the analytic acceptance c* = 1 - L1 / 2, which is detached (DSpark, section 3)."""
    return F.binary_cross_entropy_with_logits(logits_P, (1 - l1_P / 2).detach(), reduction="none")
