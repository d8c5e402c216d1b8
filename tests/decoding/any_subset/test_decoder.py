"""Any-subset decoding, pass by pass: the logits of queries, the output of each row, the counts of passes. The output
distribution of speculative decoding is tested in test_any_subset_distribution.py."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.decoding.any_subset import decoder as any_subset
from dspec.decoding.any_subset.bigrams import Bigrams
from dspec.decoding.any_subset.decoder import DRAFTS
from dspec.decoding.any_subset.queries import RowQuery, query_logits
from dspec.decoding.generation import Generation, Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY, Sampling
from dspec.decoding.state import State
from dspec.errors import UserError

VOCAB = 9
SAMPLINGS = (GREEDY, Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=1.3, top_p=1.0))
KINDS: dict[str, dict[str, Any]] = {
    "sequential": {"num_drafts": 1},
    "model": {"num_drafts": 4},
    "self, bonus": {"num_drafts": 3, "bonus": True},
    "bigrams": {"num_drafts": 3, "drafted_by": "bigrams"},
    "bigrams, bonus": {"num_drafts": 2, "drafted_by": "bigrams", "bonus": True},
    "bigrams of one": {"num_drafts": 1, "drafted_by": "bigrams"},
    "tolerant": {"num_drafts": 4, "tolerance": 0.2},
}
LOSSLESS = [kind for kind in KINDS if kind != "tolerant"]


@pytest.fixture(params=["causal", "xlnet"])
def toys(request: pytest.FixtureRequest, toys: SimpleNamespace) -> SimpleNamespace:
    """Every test runs on both backbones."""
    if request.param == "causal":
        return toys

    def xlnet(*family: str, seed: int = 0, **shape: Any) -> Any:
        return toys.xlnet(seed=seed + 9, **shape)  # with others many tokens are the same

    return SimpleNamespace(**vars(toys) | {"target": xlnet})


def blocks(of: Any) -> Any:
    """The feed-forward part of each layer: each reads all places of a pass."""
    return (
        [layer.ff for layer in of.model.transformer.layer]
        if of.name == "tiny-xlnet"
        else [layer.mlp for layer in of.model.get_decoder().layers]
    )


def model(toys: SimpleNamespace, seed: int = 3, **shape: Any) -> Any:
    return toys.target(toys.FAMILIES[seed % 3], seed=seed, vocab=VOCAB, scale=0.35, **shape)


def infilling(toys: SimpleNamespace, seed: int, count: int = 7, **common: Any) -> list[Request]:
    return toys.infilling(random.Random(seed), count, vocab=VOCAB, samplings=SAMPLINGS, **common)


def seventeen_holes(sampling: Sampling, seed: int = 0) -> Request:
    """Three tokens shown, seventeen to generate."""
    shown = (2, 9, 15)
    holes = [p for p in range(20) if p not in shown]
    return Request(
        ids=[1, 4, 1], positions=[*shown, *holes], sampling=sampling, max_new_tokens=17, stop_ids=(), seed=seed
    )


def without_attention(toys: SimpleNamespace) -> Any:
    """A model whose predictions do not depend on the context: drafts come from the oracle's distribution."""
    target = model(toys)
    with torch.no_grad():
        for name, p in target.model.named_parameters():
            if "o_proj" in name or name.endswith("rel_attn.o"):
                p.zero_()
    return target


def record_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[RowQuery], Tensor]]:
    """The queries and the logits of each pass from now on, in a list that grows."""
    seen: list[tuple[list[RowQuery], Tensor]] = []

    def recorded(target: Any, rows: Sequence[RowQuery], **cache: Any) -> Tensor:
        logits = query_logits(target, rows, **cache)
        seen.append((list(rows), logits.clone()))
        return logits

    monkeypatch.setattr(any_subset, "query_logits", recorded)
    return seen


def outcome(generation: Generation) -> tuple:
    """What must not depend on the other rows of the batch: everything but the number of positions computed."""
    made = [(p.kind, p.committed, p.drafted, p.accepted, p.valid) for p in generation.passes]
    return generation.tokens, generation.stopped, made


# ---- the logits of a pass


@pytest.mark.parametrize("kind", KINDS)
def test_every_query_is_the_conditional_it_asks_for(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With a cache, other rows and other queries, the logits are those of the query alone, without a cache. So neither
    other queries nor the tokens at places from the limit on (drafts, rejected tokens) influence it."""
    target, seen = model(toys), record_passes(monkeypatch)
    decode(toys.any_subset(target=target, **KINDS[kind]), infilling(toys, 1, 25), in_flight=4)
    compared = 0
    for rows, logits in seen:
        for row, got in zip(rows, logits, strict=True):
            for q, (place, limit) in enumerate(zip(row.queried, row.limits, strict=True)):
                alone = toys.conditional(target, row.tokens[:limit], row.positions, prompt=row.prompt, place=place)
                torch.testing.assert_close(got[q], alone, rtol=0, atol=1e-10)
                compared += 1
    assert compared > 40
    assert any(row.start > 0 for rows, _ in seen for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_passes_equal_uncached_ones(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The same pass over the whole text without a cache, row by row: the same logits."""
    target, seen = model(toys, seed=1), record_passes(monkeypatch)
    decode(toys.any_subset(target=target, **KINDS[kind]), infilling(toys, 2), in_flight=3)
    for rows, logits in seen:
        for row, got in zip(rows, logits, strict=True):
            if row.queried:
                anew = query_logits(target, [replace(row, start=0)])[0]
                torch.testing.assert_close(got[: len(row.queried)], anew, rtol=0, atol=1e-10)
    assert len(seen) > 5


def test_lemma_1(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft query of a pass has the oracle's distribution; the later ones do not."""
    target, seen = model(toys), record_passes(monkeypatch)
    decode(toys.any_subset(target=target, num_drafts=4), infilling(toys, 5))
    first, later = 0, []
    for rows, logits in seen:
        for row, got in zip(rows, logits, strict=True):
            if len(row.queried) < 2 or row.limits[0] == row.limits[1]:
                n = len(row.tokens)
                own = {"prompt": row.prompt, "positions": row.positions}
                for q, place in enumerate(row.queried):
                    text = [*row.tokens, *range(place - n)]  # any tokens at the places between
                    gap = (got[q] - toys.conditional(target, text, place=place, **own)).nan_to_num(0).abs().max()
                    if q:
                        later.append(float(gap))
                    else:
                        first += 1
                        assert gap < 1e-12
    assert first > 10
    assert min(later) > 1e-3


def test_lemma_1_does_not_hold_for_bigrams(toys: SimpleNamespace) -> None:
    """Their first draft is drawn from another distribution than the oracle's, so all are verified."""
    target, (request, *_) = model(toys), infilling(toys, 5)
    bigrams, n = Bigrams(), len(request.ids)
    bigrams.update(request.ids, request.positions)
    uniform = torch.tensor([0.5], dtype=torch.float64)
    _, probs = bigrams.draft(request.positions[n : n + 1], uniform, vocab=VOCAB, dtype=torch.float64)
    oracle = toys.conditional(target, request.ids, request.positions, prompt=n, place=n).softmax(-1)
    assert (probs[0] - oracle).abs().sum() > 0.2
    for made in decode(toys.any_subset(target=target, num_drafts=3, drafted_by="bigrams"), infilling(toys, 5)):
        assert all(p.drafted > 0 for p in made.passes if p.kind != "auxiliary")


@torch.no_grad()
def test_queries_do_not_depend_on_one_another(toys: SimpleNamespace) -> None:
    target = model(toys)
    base = RowQuery(
        tokens=[1, 4, 2], start=0, prompt=2, positions=[0, 7, 1, 2, 4, 5, 9], queried=[3, 4, 5], limits=[3, 3, 3]
    )
    (kept,) = query_logits(target, [base])
    (moved,) = query_logits(target, [replace(base, queried=[3, 6, 5])])
    torch.testing.assert_close(moved[[0, 2]], kept[[0, 2]], rtol=0, atol=1e-12)
    assert (moved[1] - kept[1]).nan_to_num(0).abs().max() > 1e-3  # but its own position counts
    (fewer,) = query_logits(target, [replace(base, queried=[5], limits=[3])])
    torch.testing.assert_close(fewer[0], kept[2], rtol=0, atol=1e-12)


@torch.no_grad()
def test_tokens_from_the_limit_on_are_not_seen(toys: SimpleNamespace) -> None:
    target, positions, places = model(toys), [0, 7, 1, 2, 4, 5, 9], range(3, 6)
    base = RowQuery(tokens=[1, 4, 2, 5, 0], start=0, prompt=2, positions=positions, queried=places, limits=places)
    (kept,) = query_logits(target, [base])
    (other,) = query_logits(target, [replace(base, tokens=[1, 4, 2, 5, 3])])
    torch.testing.assert_close(other[:2], kept[:2], rtol=0, atol=1e-12)
    assert (other[2] - kept[2]).nan_to_num(0).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_density_in_one_pass_is_the_sequential_one(toys: SimpleNamespace, seed: int) -> None:
    target, rng = model(toys, seed), random.Random(seed)
    for request in infilling(toys, seed, count=4):
        m = len(request.ids)
        ids = [*request.ids, *(rng.randrange(VOCAB - 1) for _ in range(request.max_new_tokens))]
        expected = [
            toys.conditional(target, ids[:place], request.positions, prompt=m, place=place).log_softmax(-1)[ids[place]]
            for place in range(m, len(ids))
        ]
        got = toys.joint_log_density(target, ids, request.positions, m)
        torch.testing.assert_close(got, torch.stack(expected), rtol=0, atol=1e-10)


def test_a_density_sums_to_one(toys: SimpleNamespace) -> None:
    """Over the texts without the mask token, whose probability is given to the others."""
    target = toys.target(vocab=4, layers=2, hidden=8)
    total = sum(toys.joint_log_density(target, [1, x, y], [1, 0, 2], 1).sum().exp() for x in range(3) for y in range(3))
    assert abs(total - 1) < 1e-12
    assert toys.joint_log_density(target, [1, 3, 0], [1, 0, 2], 1)[0] == -torch.inf


# ---- the output of a row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_theorem_1(toys: SimpleNamespace, kind: str, seed: int) -> None:
    """No more passes of the model than tokens, for each row, alone and in a batch."""
    rng, target = random.Random(seed), model(toys, seed)
    for settings in (KINDS[kind], KINDS[kind] | {"num_drafts": rng.randint(1, 6)}):
        requests = toys.infilling(rng, 12, vocab=VOCAB, longest=20, samplings=SAMPLINGS)
        for in_flight in (None, 1):
            for request, made in zip(
                requests, decode(toys.any_subset(target=target, **settings), requests, in_flight=in_flight), strict=True
            ):
                assert len(made.tokens) == request.max_new_tokens
                assert made.nfe <= len(made.tokens)
                assert all(p.committed for p in made.passes if p.kind != "auxiliary")
                if settings["num_drafts"] == 1:
                    assert made.nfe == len(made.tokens) or settings.get("bonus")


def test_drafts_save_passes(toys: SimpleNamespace) -> None:
    """Theorem 1 is not vacuous: if every draft is accepted, NFE is far below the number of tokens."""
    target, request = without_attention(toys), seventeen_holes(SAMPLINGS[2])
    holes = request.max_new_tokens
    for k, bonus in ((4, False), (4, True), (2, False), (1, False)):
        (made,) = decode(toys.any_subset(target=target, num_drafts=k, bonus=bonus), [request])
        per_pair = k + bonus  # tokens of a draft and an oracle pass: 1 and k - 1, and the bonus
        pairs, rest = divmod(holes, per_pair)
        assert made.nfe == (holes if k == 1 else 2 * pairs + min(rest, 2))


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_the_sequential_one(toys: SimpleNamespace, kind: str, seed: int) -> None:
    target = model(toys, seed)
    requests = toys.infilling(random.Random(seed), 8, vocab=VOCAB, samplings=[GREEDY])
    plain = []
    for request in requests:
        text = list(request.ids)
        while len(text) < len(request.positions):
            known = {"prompt": len(request.ids), "place": len(text)}
            text.append(int(toys.conditional(target, text, request.positions, **known).argmax()))
        plain.append(text[len(request.ids) :])
    assert [made.tokens for made in decode(toys.any_subset(target=target, **KINDS[kind]), requests)] == plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_output_does_not_depend_on_the_batch(toys: SimpleNamespace, kind: str, seed: int) -> None:
    """Nor on when a request joins it. Lengths, prompts, samplings, limits and stop tokens differ."""
    decoder = toys.any_subset(target=model(toys), **KINDS[kind])
    these = [*infilling(toys, seed, 5), *infilling(toys, seed + 9, 4, stop_ids=(3, 5))]
    these.append(Request(ids=[2, 4, 4], sampling=SAMPLINGS[1], max_new_tokens=5, stop_ids=(), seed=7))
    random.Random(seed).shuffle(these)
    assert len({r.sampling for r in these}) > 1
    alone = [outcome(decode(decoder, [request])[0]) for request in these]
    for in_flight in (None, 1, 2, 3):
        assert [outcome(made) for made in decode(decoder, these, in_flight=in_flight)] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_joining_in_the_middle_and_leaving(toys: SimpleNamespace, kind: str) -> None:
    decoder = toys.any_subset(target=model(toys), **KINDS[kind])
    first, second, third = [r for r in infilling(toys, 11, 40) if r.max_new_tokens > 5][:3]
    alone = {id(r): outcome(decode(decoder, [r])[0]) for r in (first, second, third)}
    with torch.inference_mode():
        for steps in range(4):
            rows = toys.joined(decoder, [first, second, third], steps)
            assert [outcome(row.generation) for row in rows] == [alone[id(third)], alone[id(first)]]


def test_without_positions_from_left_to_right(toys: SimpleNamespace) -> None:
    target, common = model(toys), {"sampling": SAMPLINGS[1], "max_new_tokens": 8, "stop_ids": (), "seed": 4}
    decoder = toys.any_subset(target=target, num_drafts=3)
    one, other = decode(decoder, [Request(ids=[1, 2], **common), Request(ids=[1, 2], positions=range(10), **common)])
    assert outcome(one) == outcome(other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_token_is_never_generated(toys: SimpleNamespace, kind: str) -> None:
    """Not even by a model for which it is often the most likely token."""
    target, raw = model(toys), []
    with torch.no_grad():
        # the mask token's logit is larger wherever token 5's is positive
        target.lm_head.weight[VOCAB - 1] = 2 * target.lm_head.weight[5]
    target.lm_head.register_forward_hook(lambda _, args, out: raw.append(out.argmax(-1).flatten()))
    for made in decode(toys.any_subset(target=target, **KINDS[kind]), infilling(toys, 8, 12)):
        assert VOCAB - 1 not in made.tokens
    assert (torch.cat(raw) == VOCAB - 1).float().mean() > 0.3


def test_stops_end_the_text_in_order_of_generation(toys: SimpleNamespace) -> None:
    target = model(toys)
    for kind, settings in KINDS.items():
        decoder = toys.any_subset(target=target, **settings)
        requests = infilling(toys, 6, 6)
        whole = decode(decoder, requests)
        for request, made in zip(requests, whole, strict=True):
            stop = made.tokens[len(made.tokens) // 2]
            (ended,) = decode(decoder, [replace(request, stop_ids=(stop,))])
            assert ended.tokens == made.tokens[: made.tokens.index(stop) + 1], kind
            assert ended.stopped
            assert ended.nfe <= len(ended.tokens)


# ---- the counts of passes


def test_passes_are_counted_apart(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft passes of the model are `prefill` and `decode`, oracle passes `verify`, with n-gram drafts from the
    first on: these are no pass of the model. The positions of all add up to what the model computed."""
    target, shapes = model(toys), []
    blocks(target)[0].register_forward_hook(lambda _, args, out: shapes.append(args[0][..., 0].numel()))
    for settings in KINDS.values():
        shapes.clear()
        made = decode(toys.any_subset(target=target, **settings), infilling(toys, 4, 6))
        for one in made:
            big = [p for p in one.passes if p.kind != "auxiliary"]
            from_bigrams = settings.get("drafted_by") == "bigrams"
            assert [p.kind for p in big].count("prefill") == 1 - from_bigrams == one.prefill_forwards
            assert big[0].kind == ("verify" if from_bigrams else "prefill")
            assert sum(p.committed for p in big) == len(one.tokens)
            assert one.nfe == len(big)
            assert (one.draft_forwards, one.auxiliary_forwards) == (0, len(big) if from_bigrams else 0)
            assert all((p.drafted > 0) == (p.kind == "verify") for p in big)
            assert {p.kind for p in big} == {"verify"} or not from_bigrams
            assert all(p.accepted <= p.drafted < 5 for p in big)
            for p in big:  # and one more token, unless all drafts were accepted without a bonus
                assert p.accepted <= p.committed <= p.accepted + 1
                if not settings.get("bonus") and p.drafted and p.accepted == p.drafted:
                    assert p.committed == p.accepted
        after_prefill = shapes if settings.get("drafted_by") == "bigrams" else shapes[1:]
        assert sum(g.positions_computed for g in made) == sum(after_prefill)


def test_the_bonus_is_one_token_after_all_drafts(toys: SimpleNamespace) -> None:
    target, request = without_attention(toys), seventeen_holes(SAMPLINGS[2])
    for bonus in (False, True):
        (made,) = decode(toys.any_subset(target=target, num_drafts=3, bonus=bonus), [request])
        full = [p for p in made.rounds[:-1] if p.accepted == p.drafted == 2]
        assert len(full) > 2
        assert {p.committed for p in full} == {2 + bonus}


def test_a_pass_computes_no_more_than_it_needs(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single row computes the anchor and k draft queries, or the anchor, all drafts but the last, and an oracle query
    for each draft."""
    target, seen = model(toys), record_passes(monkeypatch)
    (made,) = decode(toys.any_subset(target=target, num_drafts=4), [seventeen_holes(SAMPLINGS[1])])
    for (rows, _), done in zip(seen[1:], made.passes[1:], strict=True):
        (row,) = rows
        assert row.width == done.positions
        if done.kind == "verify":
            assert row.width == 2 * done.drafted
        assert row.width <= max(5, 6)


def test_a_tolerance_accepts_more(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """u < p / q + epsilon: epsilon 1 accepts every sampled draft. Greedy rows have no tolerance. The decoder reports
    that it is lossy."""
    target, verify, tested = model(toys), any_subset.verify_sampled, []

    def recorded(draft: Tensor, count: Tensor, q: Tensor, p: Tensor, uniform: Tensor, last: Tensor) -> Any:
        tested.append(uniform.clone())
        return verify(draft, count, q, p, uniform, last)

    monkeypatch.setattr(any_subset, "verify_sampled", recorded)
    requests = [r for r in infilling(toys, 2, 9) if r.max_new_tokens > 2]
    for drafted_by in ("model", "bigrams"):
        made = decode(toys.any_subset(target=target, num_drafts=3, drafted_by=drafted_by, tolerance=1.0), requests)
        plain = decode(toys.any_subset(target=target, num_drafts=3, drafted_by=drafted_by), requests)
        for request, one, without in zip(requests, made, plain, strict=True):
            if request.sampling.greedy:
                assert outcome(one) == outcome(without)
            else:
                assert all(p.accepted == p.drafted for p in one.passes)
        assert [one.tokens for one in made] != [one.tokens for one in plain]
    tested.clear()
    sampled = next(r for r in requests if not r.sampling.greedy)
    both = [replace(sampled, sampling=GREEDY), sampled]
    decode(toys.any_subset(target=target, num_drafts=3, tolerance=0.25), both)
    decode(toys.any_subset(target=target, num_drafts=3), both)
    (_, first, *_), without = tested, tested[len(tested) // 2 :]
    verified = next(t for t in without if t.shape == first.shape and t.shape[1])
    torch.testing.assert_close(verified - first, torch.tensor([[0.0], [0.25]]).double().expand_as(first))
    assert {e: toys.any_subset(target=target, num_drafts=3, tolerance=e).lossless for e in (0.0, 0.1)} == {
        0.0: True,
        0.1: False,
    }


# ---- the n-grams


def test_bigrams_against_loops() -> None:
    """Equation 23 over the known tokens of a text, which became known in random order."""
    rng = random.Random(0)
    for _ in range(30):
        length = rng.randint(2, 12)
        text = [rng.randrange(4) for _ in range(length)]
        order = rng.sample(range(length), length)
        known = rng.randint(1, length - 1)
        bigrams, begun = Bigrams(), rng.randint(0, known)
        bigrams.update([text[p] for p in order[:begun]], order)
        bigrams.update([text[p] for p in order[:known]], order)
        seen = set(order[:known])
        holes = sorted(set(range(length)) - seen)
        uniform = torch.rand(len(holes), dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        drafts, probs = bigrams.draft(holes, uniform, vocab=5, dtype=torch.float64)
        filled = {p: text[p] for p in seen} | dict(zip(holes, drafts, strict=True))
        for hole, probs_V in zip(holes, probs, strict=True):
            before = filled.get(hole - 1)
            successors = [text[p + 1] for p in seen if p + 1 in seen and text[p] == before]
            drawn_from = successors or [text[p] for p in seen]
            expected = torch.tensor([drawn_from.count(x) / len(drawn_from) for x in range(5)]).double()
            torch.testing.assert_close(probs_V, expected)
        assert all(probs_V[token] > 0 for probs_V, token in zip(probs, drafts, strict=True))
        best, same = bigrams.draft(holes[:1], None, vocab=5, dtype=torch.float64)
        assert best == [int(probs[0].argmax())]
        assert torch.equal(same, probs[:1])


# ---- bad input


def test_refusals(toys: SimpleNamespace) -> None:
    target = model(toys)
    of_16_positions = {"max_positions": property(lambda self: 16)}
    target.__class__ = type("Short", (type(target),), of_16_positions)  # XLNet has no longest text
    fine: dict[str, Any] = {"sampling": GREEDY, "stop_ids": (), "seed": 0}
    for ids, positions, new, message in (
        ([], [0, 1], 2, "prompt 1 is empty"),
        ([1, 2], [0, 1, 2], 2, "request 1 has 3 positions for 2 visible tokens and 2 to generate"),
        ([1, 2], [0, 1, 2, 3, 4], 2, "request 1 has 5 positions"),
        ([1, 2], [0, 3, 3, 4], 2, "request 1 has two tokens at position 3"),
        ([1, 2], [0, 1, 2, 16], 2, r"request 1 has position 16, outside the context .*16 positions"),
        ([1, 2], [-1, 1, 2, 3], 2, "request 1 has position -1"),
        ([1, VOCAB - 1], [0, 5, 2, 3], 2, "request 1 shows the mask token at position 5"),
        ([1, 2], [0, 1], 0, "max_new_tokens=0"),
        ([1] * 10, list(range(20)), 10, "exceed the context"),
    ):
        bad = Request(ids=ids, positions=positions, max_new_tokens=new, **fine)
        good = Request(ids=[1], positions=[3, 0], max_new_tokens=1, **fine)
        with pytest.raises(UserError, match=message) as error:
            decode(toys.any_subset(target=target, num_drafts=2), [good, bad])
        assert "\n" not in str(error.value)
    for settings, message in (
        ({"num_drafts": 0}, "num_drafts >= 1, not 0"),
        ({"num_drafts": 2, "tolerance": -0.1}, "tolerance=-0.1 must be at least 0"),
        ({"num_drafts": 2, "tolerance": float("nan")}, "tolerance=nan"),
        ({"num_drafts": 2, "drafted_by": "bigram"}, "drafted_by=bigram"),
    ):
        with pytest.raises(UserError, match=message):
            toys.any_subset(target=target, **settings)
    for token in (None, VOCAB):
        target.mask_token_id = token
        with pytest.raises(UserError, match=r"no mask token .*set target\.mask_token=<.*target\.mask_token=add"):
            toys.any_subset(target=target, num_drafts=2)
        with pytest.raises(UserError, match="no mask token"):
            toys.joint_log_density(target, [1, 2], [0, 1], 1)


def test_refusals_of_densities(toys: SimpleNamespace) -> None:
    target = model(toys)
    for prompt, positions, message in (
        (0, [0, 1], "a prompt of 0 among 2 tokens"),
        (2, [0, 1], "a prompt of 2 among 2 tokens"),
        (1, [0, 0], "two tokens at position 0"),
        (1, [0], "1 positions for 1 visible"),
    ):
        with pytest.raises(UserError, match=message):
            toys.joint_log_density(target, [1, 2], positions, prompt)


def test_other_decoders_refuse_positions(toys: SimpleNamespace) -> None:
    from dspec.decoding.autoregressive import Autoregressive
    from dspec.decoding.jacobi import Jacobi
    from dspec.decoding.jacobi_state import JacobiConfig
    from dspec.decoding.proposers import PromptLookupProposer
    from dspec.decoding.speculative import Speculative
    from dspec.decoding.verification import VerifyAll

    target = model(toys)
    lookup = PromptLookupProposer(num_drafts=3, max_ngram=2, device=torch.device("cpu"))
    config = JacobiConfig(block_size=4, blocks=2, activation=0.5, pool_size=4, candidates=0)
    (request,) = infilling(toys, 1, 1)
    for decoder in (
        Autoregressive(target=target),
        Speculative(target=target, proposer=lookup, policy=VerifyAll()),
        Jacobi(target=target, config=config),
    ):
        with pytest.raises(UserError, match=r"request 0 names the positions .* take decoder=any_subset or assd"):
            decode(decoder, [request])


def test_a_step_of_rows_that_are_all_done(toys: SimpleNamespace) -> None:
    for kind in ("model", "bigrams"):
        for sampling in SAMPLINGS[:2]:
            decoder = toys.any_subset(target=model(toys), **KINDS[kind])
            state = decoder.start([Request(ids=[1], sampling=sampling, max_new_tokens=1, stop_ids=(), seed=0)])
            before = outcome(state.rows[0].generation)
            decoder.step(state)
            assert outcome(state.rows[0].generation) == before
            assert state.rows[0].generation.idle_positions == 1


def test_drafts_wait_in_the_state(toys: SimpleNamespace) -> None:
    """At most k - 1 drafts of a row are unverified, and none past its last token."""
    target, waiting = model(toys), []

    def observe(state: State) -> None:
        for row, drafts in zip(state.rows, state.parts[DRAFTS], strict=True):
            left = row.request.max_new_tokens - len(row.generation.tokens)
            assert len(drafts.tokens) <= min(3, left)
            waiting.append(len(drafts.tokens))

    decode(toys.any_subset(target=target, num_drafts=4), infilling(toys, 2, 9), observe=observe)
    assert {0, 3} <= set(waiting)
