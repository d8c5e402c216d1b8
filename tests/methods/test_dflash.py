"""DFlash and DSpark training: anchors, supervision, labels, and what each setting does to the loss.

Legend: B = rows, L = positions, N = anchors, J = draft slots.
"""

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.attention import masks
from dspec.errors import UserError
from dspec.losses import Workspace
from dspec.method import Batch, LossOutput
from dspec.methods.dflash import DFlash
from dspec.methods.drafter import sample_anchors
from dspec.methods.dspark import DSpark
from dspec.models.checkpoint import from_pretrained

SETTINGS = {
    "num_anchors": 4, "loss_decay": 4.0, "ce_weight": 0.4, "tv_weight": 0.6, "chunk_mb": 5e-4, "feature_cache_mb": 0,
}  # fmt: skip


def _seeded(seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + row) for row in range(4000)]


def _batch(*, rows: int = 3, length: int = 14, vocab: int = 10, seed: int = 0) -> Batch:
    """Prompts of different lengths, a hole in the supervision, padding."""
    generator = _seeded(seed)[0]
    loss = torch.zeros(rows, length, dtype=torch.bool)
    for b in range(rows):
        loss[b, 2 + b : length - b] = True
    loss[0, 7] = False
    return Batch(torch.randint(vocab, (rows, length), generator=generator), loss)


# ---- anchors


def _eligible(loss: Tensor) -> list[set[int]]:
    return [{p for p in range(len(row) - 1) if row[p] and row[p + 1]} for row in loss.tolist()]


@pytest.mark.parametrize("count", [1, 3, 8, 50])
def test_anchors_are_distinct_sorted_and_eligible(count: int) -> None:
    for seed in range(20):
        loss = torch.rand(4, 20, generator=_seeded(seed)[0]) < 0.7
        loss[3] = False
        anchors, valid = sample_anchors(loss, count, generators=_seeded(seed))
        assert anchors.shape == valid.shape == (4, min(count, 19))
        for row, ok, allowed in zip(anchors.tolist(), valid.tolist(), _eligible(loss), strict=True):
            chosen = [p for p, good in zip(row, ok, strict=True) if good]
            assert chosen == sorted(set(chosen))
            assert set(chosen) <= allowed
            assert len(chosen) == min(count, len(allowed))
            assert [p for p, good in zip(row, ok, strict=True) if not good] == [0] * (len(row) - len(chosen))
            assert ok == sorted(ok, reverse=True)  # valid ones first


def test_anchors_are_uniform_without_replacement() -> None:
    """Every pair of six eligible positions equally often; both rows alike and independent."""
    loss = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0]] * 4000, dtype=torch.bool)
    (allowed,) = {frozenset(e) for e in _eligible(loss[:1])}
    assert allowed == {1, 2, 5, 6, 7}
    anchors, valid = sample_anchors(loss, 2, generators=_seeded())
    assert valid.all()
    counts = Counter(map(tuple, anchors.tolist()))
    pairs = list(itertools.combinations(sorted(allowed), 2))
    assert set(counts) == set(pairs)
    expected = 4000 / len(pairs)
    statistic = sum((counts[pair] - expected) ** 2 / expected for pair in pairs)
    assert statistic < 9 + 4 * 18**0.5
    again, _ = sample_anchors(loss, 2, generators=_seeded())
    other, _ = sample_anchors(loss, 2, generators=_seeded(1))
    assert torch.equal(anchors, again)
    assert not torch.equal(anchors, other)


# ---- blocks


def _method(toys: SimpleNamespace, *, cls: type = DFlash, seed: int = 0, **change: Any) -> DFlash:
    target = toys.target(seed=seed)
    kinds = {name: change.pop(name) for name in ("block", "layout", "head", "confidence") if name in change}
    settings = SETTINGS | ({"confidence_weight": 1.0} if cls is DSpark else {}) | change
    return cls(target=target, draft=toys.draft(target, seed=seed, **kinds), **settings)


def _at(method: DFlash, batch: Batch, anchors: Tensor, valid: Tensor) -> LossOutput:
    return method.loss_at(batch, method.target(batch.ids_BL, taps=method.draft.config.target_layer_ids), anchors, valid)


@pytest.mark.parametrize(
    ("layout", "block"), [("anchor_first", 4), ("anchor_first", 1), ("fill_in", 4), ("fill_in", 2)]
)
def test_labels_and_supervision_against_brute_force(toys: SimpleNamespace, layout: str, block: int) -> None:
    method = _method(toys, layout=layout, block=block)
    batch, L = _batch(length=12), 12
    anchors = torch.tensor([[2, 4, 5, 10, 3], [3, 6, 7, 9, 5], [4, 8, 5, 6, 4]])
    valid = torch.tensor([[True] * 4 + [False]] * 3)
    blocks = method.draft_blocks(
        batch, method.target(batch.ids_BL, taps=method.draft.config.target_layer_ids), anchors, valid
    )
    J = block - (layout == "fill_in")
    assert blocks.hidden_BNJD.shape == (3, 5, J, 16)
    supervised = 0
    for b, n in itertools.product(range(3), range(5)):
        alive = bool(valid[b, n])
        for k in range(J):
            # anchor_first: slot k predicts anchor + k + 1. fill_in: slot s predicts anchor + s, slot 0 void: s = k + 1
            slot = k + (layout == "fill_in")
            predicts = int(anchors[b, n]) + slot + (layout == "anchor_first")
            alive = alive and predicts < L and bool(batch.supervised_BL[b, predicts])
            assert bool(blocks.supervised_BNJ[b, n, k]) == alive
            if alive:
                supervised += 1
                assert blocks.label_BNJ[b, n, k] == batch.ids_BL[b, predicts]
                assert blocks.previous_BNJ[b, n, k] == batch.ids_BL[b, predicts - 1]
                assert blocks.target_index_BNJ[b, n, k] == predicts - 1
    assert 0 < supervised < 3 * 4 * J or J == 1
    assert set(blocks.supervised_BNJ.long().diff(dim=-1).flatten().tolist()) <= {0, -1}  # contiguous


@torch.no_grad()
@pytest.mark.parametrize("layout", ["anchor_first", "fill_in"])
def test_blocks_see_what_the_decoder_sees(toys: SimpleNamespace, layout: str) -> None:
    """Every block of the training form equals the drafter run alone on the text up to its anchor."""
    method = _method(toys, layout=layout, block=3)
    draft, batch = method.draft, _batch(length=12)
    anchors = torch.tensor([[2, 4, 5], [3, 6, 9], [4, 8, 5]])
    output = method.target(batch.ids_BL, taps=method.draft.config.target_layer_ids)
    blocks = method.draft_blocks(batch, output, anchors, torch.ones_like(anchors, dtype=torch.bool))
    for b, n in itertools.product(range(3), range(3)):
        a = int(anchors[b, n])
        prefix = method.target(batch.ids_BL[b : b + 1, : a + 1], taps=method.draft.config.target_layer_ids)
        ids = torch.tensor([[int(batch.ids_BL[b, a]), 10, 10]])
        hidden = draft(ids, a + torch.arange(3)[None], mask=None, features_BSF=prefix.features_BLF[:, :a])
        expected = hidden[0, draft.config.first_slot :]
        torch.testing.assert_close(blocks.hidden_BNJD[b, n], expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["anchor_first", "fill_in"])
def test_the_aim_is_the_targets_own_law(toys: SimpleNamespace, layout: str) -> None:
    """`at` points at the hidden state from which the target predicts the slot's label."""
    method = _method(toys, layout=layout)
    batch = _batch()
    output = method.target(batch.ids_BL, taps=method.draft.config.target_layer_ids)
    anchors, valid = sample_anchors(batch.supervised_BL, 4, generators=_seeded())
    blocks = method.draft_blocks(batch, output, anchors, valid)
    for b, n, k in blocks.supervised_BNJ.nonzero().tolist():
        before = batch.ids_BL[b : b + 1, : int(anchors[b, n]) + k + 1]  # all tokens before the label
        own = method.target(before, taps=method.draft.config.target_layer_ids).hidden_BLD[0, -1]
        torch.testing.assert_close(output.hidden_BLD[b, blocks.target_index_BNJ[b, n, k]], own, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", ["anchor_first", "fill_in"])
def test_tiled_attention_equals_the_dense_one(
    toys: SimpleNamespace, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient of all parameters, rows with different and with invalid anchors, tiles of two blocks."""

    def dense(anchor_BN: Tensor, *, context: int, block: int) -> Tensor:
        (B, N), device = anchor_BN.shape, anchor_BN.device
        predicate = masks.draft_blocks(anchor_BN, torch.full((B,), context), block=block)
        return masks.dense(predicate, batch=B, queries=N * block, keys=context + N * block, device=device)

    def tiled(anchor_BN: Tensor, *, context: int, block: int) -> masks.Mask:
        return masks.tiles(anchor_BN, context=context, block=block, size=2)

    results = []
    batch = _batch()
    anchors, valid = sample_anchors(batch.supervised_BL, 8, generators=_seeded(3))
    assert not valid.all()
    for form in (dense, tiled):
        monkeypatch.setattr(masks, "training_blocks", form)
        method = _method(toys, layout=layout)
        loss = _at(method, batch, anchors, valid).loss_sum
        loss.backward()
        results.append([loss.detach()] + [p.grad for p in method.draft.trainable().values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


# ---- the loss


def _naive(method: DFlash, batch: Batch, anchors: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted CE + L1 + confidence, slot by slot with Python loops."""
    draft, J = method.draft, method.draft.config.num_drafts
    output = method.target(batch.ids_BL, taps=method.draft.config.target_layer_ids)
    blocks = method.draft_blocks(batch, output, anchors, valid)
    total = weight = torch.zeros((), dtype=torch.float64)
    for b, n in itertools.product(range(anchors.shape[0]), range(anchors.shape[1])):
        state = None
        for k in range(J):
            h, previous = blocks.hidden_BNJD[b, n, k], blocks.previous_BNJ[b, n, k]
            logits = draft.lm_head(h)
            if draft.markov_head is not None:
                code, state = draft.markov_head.step(previous, h, state)
                logits = logits + draft.markov_head.markov_w2(code)
            if not blocks.supervised_BNJ[b, n, k]:
                continue
            q = logits.softmax(-1)
            p = method.target.logits(output.hidden_BLD[b, blocks.target_index_BNJ[b, n, k]]).softmax(-1)
            l1 = (q - p).abs().sum()
            w = torch.exp(torch.tensor(-k / method.loss_decay)).double()
            loss = -method.ce_weight * q[blocks.label_BNJ[b, n, k]].log() + method.tv_weight * l1
            if draft.confidence_head is not None:
                c, z = 1 - l1.detach() / 2, draft.confidence(previous, h).sigmoid()
                loss = loss - method.confidence_weight * (c * z.log() + (1 - c) * (1 - z).log())
            total, weight = total + w * loss, weight + w
    return total, weight


KINDS = [
    (DFlash, {}),
    (DFlash, {"layout": "fill_in"}),
    (DSpark, {"head": "vanilla", "confidence": True}),
    (DSpark, {"head": "gated", "confidence": True}),
    (DSpark, {"head": "rnn", "confidence": True}),
    (DSpark, {"head": None, "confidence": True}),
    (DSpark, {"head": "vanilla", "confidence_weight": 0.0}),
]


@pytest.mark.parametrize(("cls", "kind"), KINDS)
def test_loss_and_gradient_equal_the_naive_ones(toys: SimpleNamespace, cls: type, kind: dict[str, Any]) -> None:
    batch = _batch()
    anchors, valid = sample_anchors(batch.supervised_BL, 3, generators=_seeded(3))
    gradients = []
    for naive in (False, True):
        method = _method(toys, cls=cls, **kind)
        if naive:
            total, weight = _naive(method, batch, anchors, valid)
        else:
            result = _at(method, batch, anchors, valid)
            total, weight = result.loss_sum, result.weight
        (total / weight).backward()
        gradients.append({name: p.grad for name, p in method.draft.trainable().items()} | {"": total / weight})
        frozen = {id(p) for p in method.draft.trainable().values()}
        assert all(p.grad is None for p in method.parameters() if id(p) not in frozen)
    got, expected = gradients
    for name, value in expected.items():
        assert (value != 0).any(), name
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7, msg=name)


def _value(toys: SimpleNamespace, cls: type = DSpark, *, seed: int = 0, **change: Any) -> tuple[float, float]:
    if cls is DSpark:
        change = {"head": "vanilla", "confidence": True} | change
    result = _method(toys, cls=cls, **change).loss(_batch(), generators=_seeded(seed))
    return float(result.loss_sum.detach()), float(result.weight)


def test_what_each_setting_does(toys: SimpleNamespace) -> None:
    total, weight = _value(toys)
    assert _value(toys) == (total, weight)
    assert _value(toys, seed=1) != (total, weight)
    for change in (
        {"num_anchors": 3},
        {"loss_decay": 2.0},
        {"ce_weight": 0.5},
        {"tv_weight": 0.5},
        {"confidence_weight": 0.5},
        {"block": 5},
        {"head": "rnn"},
    ):
        assert abs(_value(toys, **change)[0] - total) > 1e-3, change
    for chunk in (1e-9, 2e-4, 1.0):
        assert _value(toys, chunk_mb=chunk) == pytest.approx((total, weight), abs=1e-9)
    assert _value(toys, DFlash, tv_weight=0.0) != _value(toys, DFlash)
    # the loss is linear in each weight
    for name in ("ce_weight", "tv_weight", "confidence_weight"):
        zero, one, two = (_value(toys, **{name: w})[0] for w in (0.0, 1.0, 2.0))
        assert two - one == pytest.approx(one - zero, abs=1e-5)
        assert one > zero


def test_chunks_leave_the_gradient(toys: SimpleNamespace) -> None:
    gradients = []
    for chunk in (1e-9, 7e-4, 1.0):
        method = _method(toys, cls=DSpark, head="rnn", confidence=True, chunk_mb=chunk)
        method.loss(_batch(), generators=_seeded()).loss_sum.backward()
        gradients.append([p.grad for p in method.draft.trainable().values()])
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_metrics_are_sums_and_counts(toys: SimpleNamespace) -> None:
    method = _method(toys, cls=DSpark, head="vanilla", confidence=True)
    batch = _batch()
    anchors, valid = sample_anchors(batch.supervised_BL, 4, generators=_seeded())
    result = _at(method, batch, anchors, valid)
    blocks = method.draft_blocks(
        batch, method.target(batch.ids_BL, taps=method.draft.config.target_layer_ids), anchors, valid
    )
    count_J = blocks.supervised_BNJ.sum((0, 1))
    for name in ("accept", "match"):
        value, count = result.metrics[name]
        assert torch.equal(count.long(), count_J)
        assert ((value >= 0) & (value <= count)).all()
    decay = torch.exp(-torch.arange(4) / method.loss_decay)
    torch.testing.assert_close(result.weight, (decay * count_J).sum())
    parts = [result.metrics[name] for name in ("ce", "tv", "confidence")]
    assert all(torch.equal(weight, result.weight) for _, weight in parts)
    ce, tv, confidence = (value for value, _ in parts)
    whole = method.ce_weight * ce + method.tv_weight * 2 * tv + method.confidence_weight * confidence
    torch.testing.assert_close(whole.detach(), result.loss_sum.detach(), rtol=1e-6, atol=1e-6)
    assert not any(t.requires_grad for pair in result.metrics.values() for t in pair)


def _head_calls(method: DFlash, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which heads the loss multiplied with."""
    heads, seen, plain = (
        {id(method.draft.lm_head.weight): "draft", id(_own_head(method)): "target"},
        [],
        Workspace.logits,
    )

    def spy(self: Workspace, x: Tensor, w: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        seen.append(heads.get(id(w), "other"))
        return plain(self, x, w, out, add=add)

    monkeypatch.setattr(Workspace, "logits", spy)
    method.loss(batch, generators=_seeded())
    return set(seen)


def _own_head(method: DFlash) -> Tensor:
    """Gives the target a head of its own, so that the two can be told apart."""
    weight = torch.nn.Parameter(method.target.lm_head.weight.detach().clone(), requires_grad=False)
    method.target.lm_head.weight = weight
    return weight


@pytest.mark.parametrize(
    ("cls", "weights", "reads"),
    [
        (DFlash, {"tv_weight": 0.0}, False),
        (DFlash, {"tv_weight": 0.1}, True),
        (DSpark, {"tv_weight": 0.0, "confidence_weight": 0.0, "confidence": False}, False),
        (DSpark, {"tv_weight": 0.0, "confidence_weight": 0.1, "confidence": True}, True),
    ],
)
def test_a_step_reads_the_targets_distribution_only_if_the_loss_weighs_it(
    toys: SimpleNamespace, cls: type, weights: dict[str, Any], reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation shows the acceptance all the same; value and gradient are those of the whole loss."""
    kind = {"head": "vanilla"} if cls is DSpark else {}

    def made() -> DFlash:
        method = _method(toys, cls=cls, **kind, **weights)
        method.draft.lm_head = torch.nn.Linear(1, 1).requires_grad_(False)  # a head of the draft's own
        method.draft.lm_head.weight = torch.nn.Parameter(method.target.lm_head.weight.detach().clone() * 0.9, False)
        return method

    method = made()
    assert ("target" in _head_calls(method, _batch(), monkeypatch)) == reads
    with torch.no_grad():
        assert "target" in _head_calls(method, _batch(), monkeypatch)
        whole = method.loss(_batch(), generators=_seeded())
    step = method.loss(_batch(), generators=_seeded())
    assert {"ce", "accept", "match", "tv"} <= set(whole.metrics)
    assert set(step.metrics) == (set(whole.metrics) if reads else {"ce", "accuracy"})
    torch.testing.assert_close(step.loss_sum.detach(), whole.loss_sum, rtol=1e-7, atol=0)  # weights are float32
    for a, b in zip(step.metrics["ce"], whole.metrics["ce"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    other = made()
    monkeypatch.setattr(type(other), "_reads_target", lambda self: True)
    step.loss_sum.backward()
    other.loss(_batch(), generators=_seeded()).loss_sum.backward()
    for (name, a), b in zip(method.draft.trainable().items(), other.draft.trainable().values(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6, msg=name)


def test_refused_settings(toys: SimpleNamespace) -> None:
    for name, bad in (("num_anchors", 0), ("loss_decay", 0.0), ("loss_decay", -1.0), ("chunk_mb", 0.0)):
        with pytest.raises(UserError, match=rf"method\.{name}={bad} "):
            _method(toys, **{name: bad})


@pytest.mark.parametrize("cls", [DFlash, DSpark])
def test_nothing_to_learn_from(toys: SimpleNamespace, cls: type) -> None:
    """A batch without an eligible position has weight 0 and finite zero gradients, as its rank still takes part."""
    kind = {"head": "rnn", "confidence": True} if cls is DSpark else {}
    method = _method(toys, cls=cls, **kind)
    batch = _batch()
    loss = torch.zeros_like(batch.supervised_BL)
    loss[0, 3] = True  # alone: no pair of neighbours
    result = method.loss(Batch(batch.ids_BL, loss), generators=_seeded())
    assert float(result.loss_sum.detach()) == float(result.weight) == 0
    assert all(torch.isfinite(value).all() and (count == 0).all() for value, count in result.metrics.values())
    result.loss_sum.backward()
    for name, p in method.draft.trainable().items():
        assert p.grad is None or (p.grad == 0).all(), name


def test_losses_of_parts_add_up(toys: SimpleNamespace) -> None:
    """Sums and weights of rows pool to those of the batch: what makes the loss independent of the ranks."""
    method = _method(toys, cls=DSpark, head="gated", confidence=True)
    batch = _batch()
    anchors, valid = sample_anchors(batch.supervised_BL, 3, generators=_seeded())
    whole = _at(method, batch, anchors, valid)
    parts = [
        _at(
            method, Batch(batch.ids_BL[b : b + 1], batch.supervised_BL[b : b + 1]), anchors[b : b + 1], valid[b : b + 1]
        )
        for b in range(3)
    ]
    torch.testing.assert_close(sum(p.loss_sum for p in parts), whole.loss_sum, rtol=0, atol=1e-9)
    torch.testing.assert_close(sum(p.weight for p in parts), whole.weight)


def test_loss_survives_a_decoder_that_tapped_other_layers(toys: SimpleNamespace) -> None:
    method = _method(toys)
    before = method.loss(_batch(), generators=_seeded())
    toys.ar(method.target, [[1, 2]], 3)
    assert torch.equal(method.loss(_batch(), generators=_seeded()).loss_sum, before.loss_sum)


def _data() -> SimpleNamespace:
    """A data module whose rows are those of the batch, as far as they are supervised."""
    batch = _batch()
    ends = (batch.supervised_BL * torch.arange(1, batch.supervised_BL.shape[1] + 1)).amax(1).tolist()
    return SimpleNamespace(rows=[row[:end].tolist() for row, end in zip(batch.ids_BL, ends, strict=True)])


def test_kept_features_give_the_same_loss(toys: SimpleNamespace) -> None:
    """In value and gradient, first and later epochs; the target runs once, and again for what the budget leaves."""
    plain, kept = (_method(toys, cls=DSpark, head="vanilla", confidence=True, feature_cache_mb=mb) for mb in (0, 1))
    kept.begin(_data())
    calls: list[int] = []
    kept.target.register_forward_hook(lambda _, args, out: calls.append(args[0].shape[1]))
    for _ in range(3):
        one, two = (m.loss(_batch(), generators=_seeded()) for m in (plain, kept))
        torch.testing.assert_close(two.loss_sum, one.loss_sum, rtol=0, atol=1e-10)
        for (name, p), q in zip(plain.draft.trainable().items(), kept.draft.trainable().values(), strict=True):
            got, expected = (torch.autograd.grad(o.loss_sum, x, retain_graph=True)[0] for o, x in ((two, q), (one, p)))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9, msg=name)
    assert len(calls) == 1  # in the first epoch, all rows together
    few = _method(toys, cls=DSpark, head="vanilla", confidence=True, feature_cache_mb=1e-5)  # no row fits
    few.begin(_data())
    few.target.register_forward_hook(lambda _, args, out: calls.append(0))
    few.loss(_batch(), generators=_seeded())
    few.loss(_batch(), generators=_seeded())
    assert calls.count(0) == 2 * len(_batch().ids_BL)
    with pytest.raises(UserError, match="feature_cache_mb=-1"):
        _method(toys, feature_cache_mb=-1)


def test_kept_features_of_a_row_without_supervision(toys: SimpleNamespace) -> None:
    """It has no last supervised position, up to which outputs are computed, and adds nothing to the loss."""
    batch = _batch()
    batch.supervised_BL[1] = False
    plain, kept = (_method(toys, cls=DSpark, head="vanilla", confidence=True, feature_cache_mb=mb) for mb in (0, 1))
    kept.begin(_data())
    one, two = (m.loss(batch, generators=_seeded()) for m in (plain, kept))
    torch.testing.assert_close(two.loss_sum, one.loss_sum, rtol=0, atol=1e-10)
    assert one.weight == two.weight > 0


@pytest.mark.parametrize("cls", [DFlash, DSpark])
def test_training_learns(toys: SimpleNamespace, cls: type) -> None:
    """A few steps on one batch with fixed anchors lower the loss and raise the acceptance."""
    kind = {"head": "vanilla", "confidence": True} if cls is DSpark else {}
    method = _method(toys, cls=cls, **kind)
    optimizer = torch.optim.Adam(method.draft.trainable().values(), lr=1e-2)
    history = []
    for _ in range(60):
        result = method.loss(_batch(), generators=_seeded())
        loss = result.loss_sum / result.weight
        value, count = result.metrics["accept"]
        history.append((float(loss.detach()), float(value.sum() / count.sum())))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert history[-1][0] < 0.6 * history[0][0]
    assert history[-1][1] > history[0][1] + 0.1


def test_refusals(toys: SimpleNamespace) -> None:
    for kind in ({"head": "vanilla"}, {"confidence": True}):
        with pytest.raises(UserError, match=r"draft\.markov_head_type=null"):
            _method(toys, **kind)
        _method(toys, cls=DSpark, confidence_weight=0.0, **kind)
    with pytest.raises(UserError, match=r"needs draft\.confidence_head=true"):
        _method(toys, cls=DSpark, head="vanilla")


def test_export(toys: SimpleNamespace, tmp_path: Path) -> None:
    method = _method(toys, cls=DSpark, head="rnn", confidence=True)
    folder = method.export(tmp_path, card="# card")
    assert folder == tmp_path / "draft"
    read = from_pretrained(folder, target=method.target)
    assert all(torch.equal(p, read.trainable()[name]) for name, p in method.draft.trainable().items())
