"""Any-subset decoding, pass by pass: what is asked for, what is held, what is counted. (The law of the output is
test_any_subset_law.py's.)"""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.decoding import any_subset
from dspec.decoding.any_subset import DRAFTS, Inquiry, ask, joint_log_density
from dspec.decoding.generation import Generation, Request
from dspec.decoding.loop import decode
from dspec.decoding.ngram import Bigrams
from dspec.decoding.sampling import GREEDY, Sampling
from dspec.decoding.state import State
from dspec.errors import UserError

VOCAB = 9
SAMPLINGS = (GREEDY, Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=1.3, top_p=1.0))
KINDS: dict[str, dict[str, Any]] = {
    "sequential": {"num_drafts": 1},
    "self": {"num_drafts": 4},
    "self, bonus": {"num_drafts": 3, "bonus": True},
    "ngram": {"num_drafts": 3, "draft": "ngram"},
    "ngram, bonus": {"num_drafts": 2, "draft": "ngram", "bonus": True},
    "ngram of one": {"num_drafts": 1, "draft": "ngram"},
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


def some(toys: SimpleNamespace, seed: int, count: int = 7, **common: Any) -> list[Request]:
    return toys.infilling(random.Random(seed), count, vocab=VOCAB, samplings=SAMPLINGS, **common)


def long(sampling: Sampling, seed: int = 0) -> Request:
    """Three tokens shown, seventeen to generate."""
    shown = (2, 9, 15)
    holes = [p for p in range(20) if p not in shown]
    return Request(
        ids=[1, 4, 1], positions=[*shown, *holes], sampling=sampling, max_new_tokens=17, stop_ids=(), seed=seed
    )


def context_free(toys: SimpleNamespace) -> Any:
    """A model that attends to nothing: what it drafts is drawn from the oracle's own distribution."""
    of = model(toys)
    with torch.no_grad():
        for name, p in of.model.named_parameters():
            if "o_proj" in name or name.endswith("rel_attn.o"):
                p.zero_()
    return of


def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Inquiry], Tensor]]:
    """What each pass from now on asks, and the logits that it gets."""
    seen: list[tuple[list[Inquiry], Tensor]] = []

    def noted(of: Any, rows: Sequence[Inquiry], **cache: Any) -> Tensor:
        logits = ask(of, rows, **cache)
        seen.append((list(rows), logits.clone()))
        return logits

    monkeypatch.setattr(any_subset, "ask", noted)
    return seen


def shown(generation: Generation) -> tuple:
    """What must not depend on the company: all but the width of shared passes."""
    made = [(p.kind, p.committed, p.drafted, p.accepted, p.valid) for p in generation.passes]
    return generation.tokens, generation.stopped, made


# ---- what a pass gives


@pytest.mark.parametrize("kind", KINDS)
def test_every_query_is_the_conditional_it_asks_for(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With the cache, in a batch, beside other queries: as one query alone over the text anew. So neither what other
    queries ask nor what stands in places behind the limit (drafts, rejected tokens) can matter."""
    of, seen = model(toys), passes(monkeypatch)
    decode(toys.any_subset(target=of, **KINDS[kind]), some(toys, 1, 25), in_flight=4)
    compared = 0
    for rows, logits in seen:
        for row, got in zip(rows, logits, strict=True):
            for q, (place, limit) in enumerate(zip(row.asked, row.limits, strict=True)):
                alone = toys.conditional(of, row.tokens[:limit], row.positions, prompt=row.prompt, place=place)
                torch.testing.assert_close(got[q], alone, rtol=0, atol=1e-10)
                compared += 1
    assert compared > 40
    assert any(row.start > 0 for rows, _ in seen for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_passes_equal_uncached_ones(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The same pass over the whole text without a cache, row by row: the same logits."""
    of, seen = model(toys, seed=1), passes(monkeypatch)
    decode(toys.any_subset(target=of, **KINDS[kind]), some(toys, 2), in_flight=3)
    for rows, logits in seen:
        for row, got in zip(rows, logits, strict=True):
            if row.asked:
                anew = ask(of, [replace(row, start=0)])[0]
                torch.testing.assert_close(got[: len(row.asked)], anew, rtol=0, atol=1e-10)
    assert len(seen) > 5


def test_lemma_1(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft pass asks for its first token what the oracle would ask; for the later ones it does not."""
    of, seen = model(toys), passes(monkeypatch)
    decode(toys.any_subset(target=of, num_drafts=4), some(toys, 5))
    first, later = 0, []
    for rows, logits in seen:
        for row, got in zip(rows, logits, strict=True):
            if len(row.asked) < 2 or row.limits[0] == row.limits[1]:
                n = len(row.tokens)
                own = {"prompt": row.prompt, "positions": row.positions}
                for q, place in enumerate(row.asked):
                    text = [*row.tokens, *range(place - n)]  # some tokens for the places between
                    gap = (got[q] - toys.conditional(of, text, place=place, **own)).nan_to_num(0).abs().max()
                    if q:
                        later.append(float(gap))
                    else:
                        first += 1
                        assert gap < 1e-12
    assert first > 10
    assert min(later) > 1e-3


def test_lemma_1_does_not_hold_for_bigrams(toys: SimpleNamespace) -> None:
    """Their first draft is drawn from another distribution than the oracle's, so all are tested."""
    of, (request, *_) = model(toys), some(toys, 5)
    bigrams, n = Bigrams(), len(request.ids)
    bigrams.read(request.ids, request.positions)
    uniform = torch.tensor([0.5], dtype=torch.float64)
    _, law = bigrams.draft(request.positions[n : n + 1], uniform, vocab=VOCAB, dtype=torch.float64)
    oracle = toys.conditional(of, request.ids, request.positions, prompt=n, place=n).softmax(-1)
    assert (law[0] - oracle).abs().sum() > 0.2
    for made in decode(toys.any_subset(target=of, num_drafts=3, draft="ngram"), some(toys, 5)):
        assert all(p.drafted > 0 for p in made.passes if p.kind != "draft")


@torch.no_grad()
def test_queries_know_nothing_of_one_another(toys: SimpleNamespace) -> None:
    of = model(toys)
    base = Inquiry(
        tokens=[1, 4, 2], start=0, prompt=2, positions=[0, 7, 1, 2, 4, 5, 9], asked=[3, 4, 5], limits=[3, 3, 3]
    )
    (kept,) = ask(of, [base])
    (moved,) = ask(of, [replace(base, asked=[3, 6, 5])])
    torch.testing.assert_close(moved[[0, 2]], kept[[0, 2]], rtol=0, atol=1e-12)
    assert (moved[1] - kept[1]).nan_to_num(0).abs().max() > 1e-3  # but its own position counts
    (fewer,) = ask(of, [replace(base, asked=[5], limits=[3])])
    torch.testing.assert_close(fewer[0], kept[2], rtol=0, atol=1e-12)


@torch.no_grad()
def test_tokens_behind_the_limit_cannot_matter(toys: SimpleNamespace) -> None:
    of, positions, places = model(toys), [0, 7, 1, 2, 4, 5, 9], range(3, 6)
    base = Inquiry(tokens=[1, 4, 2, 5, 0], start=0, prompt=2, positions=positions, asked=places, limits=places)
    (kept,) = ask(of, [base])
    (other,) = ask(of, [replace(base, tokens=[1, 4, 2, 5, 3])])
    torch.testing.assert_close(other[:2], kept[:2], rtol=0, atol=1e-12)
    assert (other[2] - kept[2]).nan_to_num(0).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_density_in_one_pass_is_the_sequential_one(toys: SimpleNamespace, seed: int) -> None:
    of, rng = model(toys, seed), random.Random(seed)
    for request in some(toys, seed, count=4):
        m = len(request.ids)
        ids = [*request.ids, *(rng.randrange(VOCAB - 1) for _ in range(request.max_new_tokens))]
        expected = [
            toys.conditional(of, ids[:place], request.positions, prompt=m, place=place).log_softmax(-1)[ids[place]]
            for place in range(m, len(ids))
        ]
        got = joint_log_density(of, ids, request.positions, m)
        torch.testing.assert_close(got, torch.stack(expected), rtol=0, atol=1e-10)


def test_a_density_sums_to_one(toys: SimpleNamespace) -> None:
    """Over the texts without the mask token, whose probability is given to the others."""
    of = toys.target(vocab=4, layers=2, hidden=8)
    total = sum(joint_log_density(of, [1, x, y], [1, 0, 2], 1).sum().exp() for x in range(3) for y in range(3))
    assert abs(total - 1) < 1e-12
    assert joint_log_density(of, [1, 3, 0], [1, 0, 2], 1)[0] == -torch.inf


# ---- what a row gives


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_theorem_1(toys: SimpleNamespace, kind: str, seed: int) -> None:
    """No more passes of the model than tokens, row by row, alone and in company."""
    rng, of = random.Random(seed), model(toys, seed)
    for settings in (KINDS[kind], KINDS[kind] | {"num_drafts": rng.randint(1, 6)}):
        asked = toys.infilling(rng, 12, vocab=VOCAB, longest=20, samplings=SAMPLINGS)
        for in_flight in (None, 1):
            for request, made in zip(
                asked, decode(toys.any_subset(target=of, **settings), asked, in_flight=in_flight), strict=True
            ):
                assert len(made.tokens) == request.max_new_tokens
                assert made.nfe <= len(made.tokens)
                assert all(p.committed for p in made.passes if p.kind != "draft")
                if settings["num_drafts"] == 1:
                    assert made.nfe == len(made.tokens) or settings.get("bonus")


def test_drafts_save_passes(toys: SimpleNamespace) -> None:
    """Not vacuous: where all drafts are right NFE is far below the tokens."""
    of, request = context_free(toys), long(SAMPLINGS[2])
    holes = request.max_new_tokens
    for k, bonus in ((4, False), (4, True), (2, False), (1, False)):
        (made,) = decode(toys.any_subset(target=of, num_drafts=k, bonus=bonus), [request])
        share = k + bonus  # tokens of two passes: one and k - 1, and the bonus
        pairs, rest = divmod(holes, share)
        assert made.nfe == (holes if k == 1 else 2 * pairs + min(rest, 2))


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_the_sequential_one(toys: SimpleNamespace, kind: str, seed: int) -> None:
    of = model(toys, seed)
    asked = toys.infilling(random.Random(seed), 8, vocab=VOCAB, samplings=[GREEDY])
    plain = []
    for request in asked:
        text = list(request.ids)
        while len(text) < len(request.positions):
            known = {"prompt": len(request.ids), "place": len(text)}
            text.append(int(toys.conditional(of, text, request.positions, **known).argmax()))
        plain.append(text[len(request.ids) :])
    assert [made.tokens for made in decode(toys.any_subset(target=of, **KINDS[kind]), asked)] == plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_request_gives_what_it_gives_alone(toys: SimpleNamespace, kind: str, seed: int) -> None:
    """Whatever is decoded beside it and whenever it joins: lengths, prompts, samplings, limits and stops differ."""
    decoder = toys.any_subset(target=model(toys), **KINDS[kind])
    these = [*some(toys, seed, 5), *some(toys, seed + 9, 4, stop_ids=(3, 5))]
    these.append(Request(ids=[2, 4, 4], sampling=SAMPLINGS[1], max_new_tokens=5, stop_ids=(), seed=7))
    random.Random(seed).shuffle(these)
    assert len({r.sampling for r in these}) > 1
    alone = [shown(decode(decoder, [request])[0]) for request in these]
    for in_flight in (None, 1, 2, 3):
        assert [shown(made) for made in decode(decoder, these, in_flight=in_flight)] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_joining_in_the_middle_and_leaving(toys: SimpleNamespace, kind: str) -> None:
    decoder = toys.any_subset(target=model(toys), **KINDS[kind])
    first, second, third = [r for r in some(toys, 11, 40) if r.max_new_tokens > 5][:3]
    alone = {id(r): shown(decode(decoder, [r])[0]) for r in (first, second, third)}
    with torch.inference_mode():
        for steps in range(4):
            rows = toys.joined(decoder, [first, second, third], steps)
            assert [shown(row.generation) for row in rows] == [alone[id(third)], alone[id(first)]]


def test_without_positions_from_left_to_right(toys: SimpleNamespace) -> None:
    of, common = model(toys), {"sampling": SAMPLINGS[1], "max_new_tokens": 8, "stop_ids": (), "seed": 4}
    decoder = toys.any_subset(target=of, num_drafts=3)
    one, other = decode(decoder, [Request(ids=[1, 2], **common), Request(ids=[1, 2], positions=range(10), **common)])
    assert shown(one) == shown(other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_token_is_never_generated(toys: SimpleNamespace, kind: str) -> None:
    """Not even by a model that would rather say nothing else."""
    of, raw = model(toys), []
    with torch.no_grad():
        of.lm_head.weight[VOCAB - 1] = 2 * of.lm_head.weight[5]  # where that token is likely, the mask token is more so
    of.lm_head.register_forward_hook(lambda _, args, out: raw.append(out.argmax(-1).flatten()))
    for made in decode(toys.any_subset(target=of, **KINDS[kind]), some(toys, 8, 12)):
        assert VOCAB - 1 not in made.tokens
    assert (torch.cat(raw) == VOCAB - 1).float().mean() > 0.3


def test_stops_end_the_text_in_order_of_generation(toys: SimpleNamespace) -> None:
    of = model(toys)
    for kind, settings in KINDS.items():
        decoder = toys.any_subset(target=of, **settings)
        asked = some(toys, 6, 6)
        whole = decode(decoder, asked)
        for request, made in zip(asked, whole, strict=True):
            stop = made.tokens[len(made.tokens) // 2]
            (ended,) = decode(decoder, [replace(request, stop_ids=(stop,))])
            assert ended.tokens == made.tokens[: made.tokens.index(stop) + 1], kind
            assert ended.stopped
            assert ended.nfe <= len(ended.tokens)


# ---- what is counted


def test_passes_are_counted_apart(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft passes of the model are `prefill` and `decode`, oracle passes `verify`; n-gram drafts are no pass of the
    model. The positions of all add up to what the model computed."""
    of, shapes = model(toys), []
    blocks(of)[0].register_forward_hook(lambda _, args, out: shapes.append(args[0][..., 0].numel()))
    for settings in KINDS.values():
        shapes.clear()
        made = decode(toys.any_subset(target=of, **settings), some(toys, 4, 6))
        for one in made:
            big = [p for p in one.passes if p.kind != "draft"]
            assert [p.kind for p in big].count("prefill") == 1 == one.prefill_forwards
            assert big[0].kind == "prefill"
            assert sum(p.committed for p in big) == len(one.tokens)
            assert one.nfe == len(big)
            assert one.draft_forwards == (len(big) if settings.get("draft") == "ngram" else 0)
            assert all((p.drafted > 0) == (p.kind == "verify") for p in big[1:])
            assert {p.kind for p in big} <= {"prefill", "verify"} or settings.get("draft") != "ngram"
            assert all(p.accepted <= p.drafted < 5 for p in big)
            for p in big:  # and one more token but where all drafts were accepted without a bonus
                assert p.accepted <= p.committed <= p.accepted + 1
                if not settings.get("bonus") and p.drafted and p.accepted == p.drafted:
                    assert p.committed == p.accepted
        assert sum(g.positions_computed for g in made) == sum(shapes[1:])


def test_the_bonus_is_one_token_behind_all_drafts(toys: SimpleNamespace) -> None:
    of, request = context_free(toys), long(SAMPLINGS[2])
    for bonus in (False, True):
        (made,) = decode(toys.any_subset(target=of, num_drafts=3, bonus=bonus), [request])
        full = [p for p in made.rounds[:-1] if p.accepted == p.drafted == 2]
        assert len(full) > 2
        assert {p.committed for p in full} == {2 + bonus}


def test_a_pass_computes_no_more_than_it_needs(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone: the anchor and k queries, or the anchor, the drafts but the last one, and a query each."""
    of, seen = model(toys), passes(monkeypatch)
    (made,) = decode(toys.any_subset(target=of, num_drafts=4), [long(SAMPLINGS[1])])
    for (rows, _), done in zip(seen[1:], made.passes[1:], strict=True):
        (row,) = rows
        assert row.width == done.positions
        if done.kind == "verify":
            assert row.width == 2 * done.drafted
        assert row.width <= max(5, 6)


def test_a_tolerance_accepts_more(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """u < p / q + epsilon: with 1 every sampled draft; greedy rows have none; and the decoder says that it is lossy."""
    of, verify, tested = model(toys), any_subset.verify_sampled, []

    def noted(draft: Tensor, count: Tensor, q: Tensor, p: Tensor, uniform: Tensor, last: Tensor) -> Any:
        tested.append(uniform.clone())
        return verify(draft, count, q, p, uniform, last)

    monkeypatch.setattr(any_subset, "verify_sampled", noted)
    asked = [r for r in some(toys, 2, 9) if r.max_new_tokens > 2]
    for draft in ("self", "ngram"):
        made = decode(toys.any_subset(target=of, num_drafts=3, draft=draft, tolerance=1.0), asked)
        plain = decode(toys.any_subset(target=of, num_drafts=3, draft=draft), asked)
        for request, one, without in zip(asked, made, plain, strict=True):
            if request.sampling.greedy:
                assert shown(one) == shown(without)
            else:
                assert all(p.accepted == p.drafted for p in one.passes)
        assert [one.tokens for one in made] != [one.tokens for one in plain]
    tested.clear()
    sampled = next(r for r in asked if not r.sampling.greedy)
    both = [replace(sampled, sampling=GREEDY), sampled]
    decode(toys.any_subset(target=of, num_drafts=3, tolerance=0.25), both)
    decode(toys.any_subset(target=of, num_drafts=3), both)
    (_, first, *_), without = tested, tested[len(tested) // 2 :]
    verified = next(t for t in without if t.shape == first.shape and t.shape[1])
    torch.testing.assert_close(verified - first, torch.tensor([[0.0], [0.25]]).double().expand_as(first))
    assert {e: toys.any_subset(target=of, num_drafts=3, tolerance=e).lossless for e in (0.0, 0.1)} == {
        0.0: True,
        0.1: False,
    }


# ---- the n-grams


def test_bigrams_against_loops() -> None:
    """Equation 23 over the known part of a text, by position, whatever the order in which it became known."""
    rng = random.Random(0)
    for _ in range(30):
        length = rng.randint(2, 12)
        text = [rng.randrange(4) for _ in range(length)]
        order = rng.sample(range(length), length)
        known = rng.randint(1, length - 1)
        bigrams, begun = Bigrams(), rng.randint(0, known)
        bigrams.read([text[p] for p in order[:begun]], order)
        bigrams.read([text[p] for p in order[:known]], order)
        seen = set(order[:known])
        holes = sorted(set(range(length)) - seen)
        uniform = torch.rand(len(holes), dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        drafts, laws = bigrams.draft(holes, uniform, vocab=5, dtype=torch.float64)
        filled = {p: text[p] for p in seen} | dict(zip(holes, drafts, strict=True))
        for hole, law in zip(holes, laws, strict=True):
            before = filled.get(hole - 1)
            behind = [text[p + 1] for p in seen if p + 1 in seen and text[p] == before]
            drawn_from = behind or [text[p] for p in seen]
            expected = torch.tensor([drawn_from.count(x) / len(drawn_from) for x in range(5)]).double()
            torch.testing.assert_close(law, expected)
        assert all(law[token] > 0 for law, token in zip(laws, drafts, strict=True))
        best, same = bigrams.draft(holes[:1], None, vocab=5, dtype=torch.float64)
        assert best == [int(laws[0].argmax())]
        assert torch.equal(same, laws[:1])


# ---- bad input


def test_refusals(toys: SimpleNamespace) -> None:
    of = model(toys)
    of_16_positions = {"max_positions": property(lambda self: 16)}
    of.__class__ = type("Short", (type(of),), of_16_positions)  # XLNet has no longest text
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
            decode(toys.any_subset(target=of, num_drafts=2), [good, bad])
        assert "\n" not in str(error.value)
    for settings, message in (
        ({"num_drafts": 0}, "num_drafts >= 1, not 0"),
        ({"num_drafts": 2, "tolerance": -0.1}, "tolerance=-0.1 must be at least 0"),
        ({"num_drafts": 2, "tolerance": float("nan")}, "tolerance=nan"),
        ({"num_drafts": 2, "draft": "bigram"}, "not bigram"),
    ):
        with pytest.raises(UserError, match=message):
            toys.any_subset(target=of, **settings)
    for token in (None, VOCAB):
        of.mask_token_id = token
        with pytest.raises(UserError, match=r"no mask token .*set target\.mask_token_id"):
            toys.any_subset(target=of, num_drafts=2)
        with pytest.raises(UserError, match="no mask token"):
            joint_log_density(of, [1, 2], [0, 1], 1)


def test_refusals_of_densities(toys: SimpleNamespace) -> None:
    of = model(toys)
    for prompt, positions, message in (
        (0, [0, 1], "a prompt of 0 among 2 tokens"),
        (2, [0, 1], "a prompt of 2 among 2 tokens"),
        (1, [0, 0], "two tokens at position 0"),
        (1, [0], "1 positions for 1 visible"),
    ):
        with pytest.raises(UserError, match=message):
            joint_log_density(of, [1, 2], positions, prompt)


def test_other_decoders_refuse_positions(toys: SimpleNamespace) -> None:
    from dspec.decoding.autoregressive import Autoregressive
    from dspec.decoding.jacobi import Jacobi
    from dspec.decoding.jacobi_state import JacobiConfig
    from dspec.decoding.proposers import PromptLookupProposer
    from dspec.decoding.speculative import Speculative
    from dspec.decoding.verification import VerifyAll

    of = model(toys)
    lookup = PromptLookupProposer(num_drafts=3, max_ngram=2, device=torch.device("cpu"))
    config = JacobiConfig(block_size=4, blocks=2, activation=0.5, pool_size=4, candidates=0)
    (request,) = some(toys, 1, 1)
    for decoder in (
        Autoregressive(target=of),
        Speculative(target=of, proposer=lookup, policy=VerifyAll()),
        Jacobi(target=of, config=config),
    ):
        with pytest.raises(UserError, match=r"request 0 names the positions .* take decoder=any_subset or assd"):
            decode(decoder, [request])


def test_a_step_of_rows_that_are_all_done(toys: SimpleNamespace) -> None:
    for kind in ("self", "ngram"):
        for sampling in SAMPLINGS[:2]:
            decoder = toys.any_subset(target=model(toys), **KINDS[kind])
            state = decoder.start([Request(ids=[1], sampling=sampling, max_new_tokens=1, stop_ids=(), seed=0)])
            before = shown(state.rows[0].generation)
            decoder.step(state)
            assert shown(state.rows[0].generation) == before
            assert state.rows[0].generation.idle_positions == 1


def test_drafts_wait_in_the_state(toys: SimpleNamespace) -> None:
    """What an engine sees: none behind the last token, never more than k - 1."""
    of, waiting = model(toys), []

    def observe(state: State) -> None:
        for row, drafts in zip(state.rows, state.parts[DRAFTS], strict=True):
            left = row.request.max_new_tokens - len(row.generation.tokens)
            assert len(drafts.tokens) <= min(3, left)
            waiting.append(len(drafts.tokens))

    decode(toys.any_subset(target=of, num_drafts=4), some(toys, 2, 9), observe=observe)
    assert {0, 3} <= set(waiting)
