"""Chunked losses against naive ones, in value and gradient.

Legend: P = supervised positions, D = width, R = rank of the transition code, V = vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.errors import UserError
from dspec.losses import (
    Workspace,
    check_chunk,
    chunked_sum,
    confidence_loss,
    consistency_loss,
    decay_weights,
    draft_loss,
    token_loss,
)

P, D, R, V = 11, 5, 3, 7
EXACT = {"rtol": 0, "atol": 1e-10}
CHUNKS = [1, 3, P, P + 5]


def _rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _inputs(rank: int = R) -> dict[str, Tensor]:
    return {
        "hidden": _rand(P, D, seed=0).requires_grad_(),
        "code": _rand(P, rank, seed=1).requires_grad_(),
        "w2": _rand(V, rank, seed=2).requires_grad_(),
        "weight": _rand(P, seed=3).abs(),
        "label": torch.randint(V, (P,), generator=torch.Generator().manual_seed(4)),
        "target": _rand(P, D, seed=5),
        "head": _rand(V, D, seed=6),
        "target_head": _rand(V, D, seed=7),
    }


def _naive(x: dict[str, Tensor], *, ce: float, tv: float) -> tuple[Tensor, list[list[float]]]:
    """Row by row and token by token, with explicit softmax."""
    total, stats = torch.zeros((), dtype=torch.float64), []
    for i in range(P):
        logits = [x["head"][v] @ x["hidden"][i] + x["w2"][v] @ x["code"][i] for v in range(V)]
        teacher = [x["target_head"][v] @ x["target"][i] for v in range(V)]
        q, p = (torch.stack([z.exp() for z in row]) for row in (logits, teacher))
        q, p = q / q.sum(), p / p.sum()
        cross = -q[x["label"][i]].log()
        distance = sum((q[v] - p[v]).abs() for v in range(V))
        total = total + x["weight"][i] * (ce * cross + tv * distance)
        stats.append([float(cross.detach()), float(distance.detach()), float(q.argmax() == p.argmax())])
    return total, stats


def _mb(rows: int, itemsize: int = 8) -> float:
    """MiB of the logits of so many rows."""
    return rows * V * itemsize / 2**20


def _chunked(x: dict[str, Tensor], *, ce: float, tv: float, chunk: int, itemsize: int = 8) -> tuple[Tensor, Tensor]:
    return chunked_sum(
        draft_loss(x["target_head"], ce_weight=ce, tv_weight=tv),
        terms=[(x["hidden"], x["head"]), (x["code"], x["w2"])],
        constants=[x["weight"], x["label"], x["target"]],
        chunk_mb=_mb(chunk, itemsize),
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("ce", "tv"), [(1.0, 0.0), (0.0, 1.0), (0.1, 0.9)])
def test_draft_loss_equals_the_naive_one(ce: float, tv: float, chunk: int) -> None:
    x, y = _inputs(), _inputs()
    total, stats = _chunked(x, ce=ce, tv=tv, chunk=chunk)
    expected, rows = _naive(y, ce=ce, tv=tv)
    torch.testing.assert_close(total, expected, **EXACT)
    torch.testing.assert_close(stats, torch.tensor(rows, dtype=torch.float64), **EXACT)
    (3 * total).backward()
    (3 * expected).backward()
    for name in ("hidden", "code", "w2"):
        assert (x[name].grad != 0).any()
        torch.testing.assert_close(x[name].grad, y[name].grad, **EXACT)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_without_a_sequential_head(chunk: int) -> None:
    """R = 0: no bias, and a code that needs a gradient gets an empty one."""
    x, y = _inputs(rank=0), _inputs(rank=0)
    total, _ = _chunked(x, ce=0.3, tv=0.7, chunk=chunk)
    expected, _ = _naive(y, ce=0.3, tv=0.7)
    torch.testing.assert_close(total, expected, **EXACT)
    total.backward()
    expected.backward()
    torch.testing.assert_close(x["hidden"].grad, y["hidden"].grad, **EXACT)
    assert x["code"].grad.shape == (P, 0)


@pytest.mark.parametrize("chunk", [2, P])
def test_gradcheck(chunk: int) -> None:
    x = _inputs()

    def loss(hidden: Tensor, code: Tensor, w2: Tensor) -> Tensor:
        return _chunked(x | {"hidden": hidden, "code": code, "w2": w2}, ce=0.4, tv=0.6, chunk=chunk)[0]

    assert torch.autograd.gradcheck(loss, (x["hidden"], x["code"], x["w2"]), atol=1e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_token_loss(chunk: int) -> None:
    """Next-token loss, whose head is a weight that is trained."""
    hidden, head = _rand(P, D, seed=0).requires_grad_(), _rand(V, D, seed=1).requires_grad_()
    label, weight = _inputs()["label"], _inputs()["weight"]
    total, stats = chunked_sum(token_loss, terms=[(hidden, head)], constants=[weight, label], chunk_mb=_mb(chunk))
    log_p = (hidden @ head.T).log_softmax(-1)
    ce = -log_p.gather(1, label[:, None])[:, 0]
    expected = (weight * ce).sum()
    torch.testing.assert_close(total, expected, **EXACT)
    torch.testing.assert_close(stats[:, 0], ce, **EXACT)
    assert torch.equal(stats[:, 1], (log_p.argmax(-1) == label).double())
    for got, want in zip(
        torch.autograd.grad(total, (hidden, head)), torch.autograd.grad(expected, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_chunk_is_counted_in_bytes_of_logits(chunk: int) -> None:
    x, seen = _inputs(), []

    def spy(
        work: Workspace, logits: Tensor, gradient: bool, weight: Tensor, at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert logits.shape == (len(weight), V)
        assert gradient
        seen.append((len(weight), logits.data_ptr()))
        torch.testing.assert_close(logits, x["hidden"].detach()[at] @ x["head"].T, **EXACT)
        return weight, at[:, None].double(), logits.fill_(1)

    constants = [x["weight"], torch.arange(P)]
    total, stats = chunked_sum(spy, terms=[(x["hidden"], x["head"])], constants=constants, chunk_mb=_mb(chunk) + 1e-9)
    assert [rows for rows, _ in seen] == [min(chunk, P - start) for start in range(0, P, chunk)]
    assert len({place for _, place in seen}) == 1  # all in the same memory
    total.backward()
    assert sum(rows for rows, _ in seen) == P  # one pass forward and none backward
    torch.testing.assert_close(total, x["weight"].sum(), **EXACT)
    assert torch.equal(stats[:, 0], torch.arange(P).double())
    torch.testing.assert_close(x["hidden"].grad, x["head"].sum(0).expand(P, D), **EXACT)


def test_a_chunk_holds_at_least_one_row() -> None:
    x = _inputs()
    total, _ = _chunked(x, ce=0.5, tv=0.5, chunk=1)
    torch.testing.assert_close(_chunked(x, ce=0.5, tv=0.5, chunk=0)[0], total, **EXACT)
    for nothing in (0, -1):
        with pytest.raises(UserError, match=r"method\.chunk_mb="):
            check_chunk(nothing)


def test_without_gradients_none_is_taken() -> None:
    """In validation the value and the statistics alone: the criterion is told so."""
    x, told = _inputs(), []
    inner = draft_loss(x["target_head"], ce_weight=0.1, tv_weight=0.9)

    def spy(work: Workspace, logits: Tensor, gradient: bool, *constants: Tensor) -> tuple[Tensor, Tensor, Any]:
        told.append(gradient)
        return inner(work, logits, gradient, *constants)

    terms = [(x["hidden"], x["head"]), (x["code"], x["w2"])]
    constants = [x["weight"], x["label"], x["target"]]
    expected, stats = chunked_sum(spy, terms=terms, constants=constants, chunk_mb=_mb(3))
    with torch.no_grad():
        total, same = chunked_sum(spy, terms=terms, constants=constants, chunk_mb=_mb(3))
    assert told == [True] * 4 + [False] * 4
    assert not total.requires_grad
    torch.testing.assert_close(total, expected.detach(), **EXACT)
    torch.testing.assert_close(same, stats, **EXACT)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x = _inputs()
    x["w2"].requires_grad_(False)
    total, stats = _chunked(x, ce=1.0, tv=1.0, chunk=4)
    assert not stats.requires_grad
    total.backward()
    assert x["w2"].grad is None
    assert x["hidden"].grad is not None
    frozen = {name: t.detach() for name, t in x.items()}
    assert not _chunked(frozen, ce=1.0, tv=1.0, chunk=4)[0].requires_grad


def test_no_rows_at_all() -> None:
    x = _inputs()
    empty: dict[str, Any] = {name: t[:0] for name, t in x.items() if name not in ("w2", "head", "target_head")}
    total, stats = _chunked(x | empty, ce=1.0, tv=1.0, chunk=4)
    assert float(total.detach()) == 0
    assert stats.shape == (0, 3)
    total.backward()
    assert (x["w2"].grad == 0).all()


def test_low_precision_is_summed_in_float32() -> None:
    """bf16 logits are widened before the softmax: the loss is that of the rounded logits."""
    x = {name: t if name in ("label", "weight") else t.detach().bfloat16() for name, t in _inputs().items()}
    x["weight"] = x["weight"].float()
    total, stats = _chunked(x, ce=0.5, tv=0.5, chunk=4, itemsize=4)
    assert total.dtype == stats.dtype == torch.float32
    wide = {name: t if name == "label" else t.double() for name, t in x.items()}
    logits = (x["hidden"] @ x["head"].T).double() + (x["code"] @ x["w2"].T).double()
    cross = -logits.log_softmax(-1).gather(1, wide["label"][:, None])[:, 0]
    torch.testing.assert_close(stats[:, 0].double(), cross, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["draft", "token", "consistency"])
@pytest.mark.parametrize("form", ["float32", "autocast", "bfloat16"])
def test_each_precision_is_near_the_exact_one(kind: str, form: str) -> None:
    """Value and gradients of single and of low precision, under autocast or not, beside those of float64; the
    gradients come in the type of what they belong to, and products alone are rounded."""
    low = torch.bfloat16 if form == "bfloat16" else torch.float32
    names = ("hidden", "head", "code", "w2", "target", "target_head")
    rounded = torch.float32 if form == "float32" else torch.bfloat16
    exact = {n: t.detach().to(rounded).double() if n in names else t for n, t in _inputs().items()}
    x = {n: t.to(low) if n in names else t.float() if n == "weight" else t for n, t in exact.items()}
    results = []
    for y in (x, exact):
        leaves = [y[n].requires_grad_() for n in ("hidden", "head", "code", "w2")]
        criterion, constants = {
            "draft": (draft_loss(y["target_head"], ce_weight=0.3, tv_weight=0.7), ("weight", "label", "target")),
            "token": (token_loss, ("weight", "label")),
            "consistency": (consistency_loss(y["target_head"], temperature=2.0), ("weight", "target")),
        }[kind]
        terms = [(leaves[0], leaves[1]), (leaves[2], leaves[3])]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "autocast" and y is x):
            total, stats = chunked_sum(criterion, terms=terms, constants=[y[n] for n in constants], chunk_mb=_mb(3, 4))
        results.append((total, stats, torch.autograd.grad(total, leaves)))
    (total, stats, grads), (exact_total, exact_stats, exact_grads) = results
    assert total.dtype == stats.dtype == torch.float32
    near = {"rtol": 1e-4, "atol": 1e-4} if form == "float32" else {"rtol": 0.03, "atol": 0.1}
    torch.testing.assert_close(total.double(), exact_total, **near)
    torch.testing.assert_close(stats[:, 0].double(), exact_stats[:, 0], **near)
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == low
        torch.testing.assert_close(got.double(), want, **near)


def test_gradients_of_many_chunks_are_summed_wide() -> None:
    """A weight's gradient in bf16 is rounded once, not once a chunk."""
    rows, ones = 600, torch.ones(600, 1, dtype=torch.bfloat16)
    head = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    label = torch.zeros(rows, dtype=torch.long)
    total, _ = chunked_sum(token_loss, terms=[(ones, head)], constants=[torch.ones(rows), label], chunk_mb=1e-9)
    (grad,) = torch.autograd.grad(total, head)
    assert grad[:, 0].tolist() == [-300.0, 300.0]  # bf16 sums of 0.5 stop at 128


def test_a_certain_token_costs_what_it_should() -> None:
    """Logits far apart: no -inf, no cancellation, exact zeros where the distribution is a point."""
    head = torch.eye(3, requires_grad=True)
    hidden = torch.tensor([[200.0, 0.0, 0.0], [200.0, 0.0, 0.0]], requires_grad=True)
    label = torch.tensor([0, 1])
    total, stats = chunked_sum(token_loss, terms=[(hidden, head)], constants=[torch.ones(2), label], chunk_mb=1)
    assert stats.tolist() == [[0.0, 1.0], [200.0, 0.0]]
    (grad,) = torch.autograd.grad(total, hidden)
    assert grad.tolist() == [[0.0, 0.0, 0.0], [1.0, -1.0, 0.0]]


def test_decay_weights() -> None:
    expected = [math.exp(-k / 4.0) for k in range(7)]
    torch.testing.assert_close(decay_weights(7, gamma=4.0), torch.tensor(expected))
    assert decay_weights(3, gamma=1e9).tolist() == pytest.approx([1, 1, 1])


def test_confidence_loss() -> None:
    logits = _rand(P, seed=0).requires_grad_()
    l1 = (_rand(P, seed=1).sigmoid() * 2).requires_grad_()
    got = confidence_loss(logits, l1)
    c = 1 - l1.detach() / 2
    p = logits.sigmoid()
    torch.testing.assert_close(got, -(c * p.log() + (1 - c) * (1 - p).log()), **EXACT)
    got.sum().backward()
    assert l1.grad is None  # the aim is not differentiated
    torch.testing.assert_close(logits.grad, (p - c).detach(), **EXACT)
    edge = confidence_loss(torch.tensor([90.0, -90.0, 90.0]), torch.tensor([0.0, 2.0, 2.0]))
    torch.testing.assert_close(edge, torch.tensor([0.0, 0.0, 90.0]))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_consistency_loss(chunk: int, temperature: float) -> None:
    """Forward KL from the teacher, token by token; gradient for the student's states and head, none for the teacher."""
    hidden, head = _rand(P, D, seed=0).requires_grad_(), _rand(V, D, seed=1).requires_grad_()
    teacher, teacher_head, weight = _rand(P, D, seed=2), _rand(V, D, seed=3), _rand(P, seed=4).abs()
    total, stats = chunked_sum(
        consistency_loss(teacher_head, temperature=temperature),
        terms=[(hidden, head)],
        constants=[weight, teacher],
        chunk_mb=_mb(chunk),
    )
    rows = []
    for i in range(P):
        p = torch.stack([(teacher_head[v] @ teacher[i] / temperature).exp() for v in range(V)])
        q = torch.stack([(head[v] @ hidden[i] / temperature).exp() for v in range(V)])
        p, q = p / p.sum(), q / q.sum()
        rows.append(sum(p[v] * (p[v] / q[v]).log() for v in range(V)))
    expected = sum(w * kl for w, kl in zip(weight, rows, strict=True))
    torch.testing.assert_close(total, expected, **EXACT)
    torch.testing.assert_close(stats[:, 0], torch.stack(rows), **EXACT)
    match = (hidden @ head.T).argmax(-1) == (teacher @ teacher_head.T).argmax(-1)
    assert torch.equal(stats[:, 1], match.double())
    for got, want in zip(
        torch.autograd.grad(total, (hidden, head)), torch.autograd.grad(expected, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(got, want, **EXACT)
