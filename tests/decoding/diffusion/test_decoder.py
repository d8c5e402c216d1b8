"""Decoding of diffusion LMs against plain references that compute everything anew, row by row and branch by branch."""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.decoding.diffusion import decoder as diffusion
from dspec.decoding.diffusion.block_state import BlockRules
from dspec.decoding.diffusion.decoder import BlockDiffusion, DiffusionConfig
from dspec.decoding.diffusion.forward import guess
from dspec.decoding.diffusion.lookahead import Lookahead
from dspec.decoding.diffusion.row_state import SingleProcess
from dspec.decoding.generation import Generation, Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY, Sampling, SamplingBatch
from dspec.errors import UserError

VOCAB = 11
STOPS = (3, 6)
WARM = Sampling(temperature=0.7, top_p=0.9)
ALONE: dict[str, Any] = {"branches": 0, "branch_score": "mean", "segment": 2}


def model(toys: SimpleNamespace, seed: int = 0, *, shift: bool = False, **shape: Any) -> Any:
    target = toys.target(toys.FAMILIES[seed % 3], seed=seed, vocab=VOCAB, **{"scale": 0.4} | shape)
    target.model.config.dspec_logit_shift = shift
    return target


def decoder(
    target: Any,
    *,
    attention: str = "block_causal",
    cache: str = "committed",
    confidence_measure: str = "probability",
    **change: Any,
) -> BlockDiffusion:
    rules = {"block_size": 4, "append_ratio": 0.4, "activate_ratio": 0.7, "threshold": 0.5, "min_fills": 1}
    ahead = {key: change.pop(key, value) for key, value in ALONE.items()}
    config = DiffusionConfig(
        rules=BlockRules(**rules | change),
        attention=attention,
        cache=cache,
        lookahead=Lookahead(**ahead),
        confidence_measure=confidence_measure,
    )
    return BlockDiffusion(target=target, config=config, executor=SingleProcess())


def some(
    seed: int, count: int, *, samplings: Sequence[Sampling] = (GREEDY,), stops: Sequence[int] = STOPS
) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            ids=[rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 7))],
            sampling=rng.choice(samplings),
            max_new_tokens=rng.randint(5, 19),
            stop_ids=rng.choice([stops, ()]),
            seed=rng.randrange(99),
        )
        for _ in range(count)
    ]


def trace(generation: Generation) -> tuple:
    """What must not depend on the batch or caches."""
    made = [(p.kind, p.committed, p.filled, p.beyond, p.branches) for p in generation.passes]
    return generation.tokens, generation.stopped, made


# ---- plain references


@torch.no_grad()
def guesses(
    target: Any, text: Sequence[int], positions: Sequence[int], prompt: int, block: int | None
) -> dict[int, tuple]:
    """(token, probability) at these positions, from the whole text in one pass; `block` None is full attention."""
    n = len(text)

    def at(position: int) -> int:
        return 0 if block is None or position < prompt else 1 + (position - prompt) // block

    sees = torch.tensor([[at(k) <= at(q) for k in range(n)] for q in range(n)])
    hidden = target(torch.tensor([list(text)]), mask=lambda b, h, q, kv: sees[q, kv]).hidden_BLD[0]
    return {position: _best(target, hidden[position - target.model.config.dspec_logit_shift]) for position in positions}


def _best(target: Any, hidden: Tensor) -> tuple[int, float]:
    logits = target.logits(hidden)
    logits[target.mask_token_id] = -torch.inf
    probability, token = logits.softmax(-1).max(-1)
    return int(token), float(probability)


def reference(
    target: Any,
    request: Request,
    *,
    block_size: int | None = 4,
    append_ratio: float = 0.4,
    activate_ratio: float = 0.7,
    threshold: float = 0.5,
    min_fills: int = 1,
    full: bool = False,
    branches: int = 0,
) -> tuple[list[int], list[list[int]]]:
    """D2F and LoPA as the papers write them, greedy: nothing is cached and branches are computed one after another.
    Returns the answer, and the slots that each pass filled."""
    prompt, limit, mask = len(request.ids), request.max_new_tokens, target.mask_token_id
    size = block_size or limit
    slots: list[int | None] = [None] * limit
    ends, active, rounds, tried = [0], [], [], []

    def empty(values: Sequence[int | None], first: int, last: int) -> int:
        return sum(token is None for token in values[first:last])

    def end() -> int:
        return next((i + 1 for i, token in enumerate(slots) if token in request.stop_ids), limit)

    def activated(values: Sequence[int | None]) -> list[bool]:
        now = [True]
        for b in range(1, len(ends) - 1):
            width = ends[b] - ends[b - 1]
            now.append(active[b] or (width - empty(values, ends[b - 1], ends[b])) / width >= activate_ratio)
        return now

    while None in slots[: end()]:
        width = ends[-1] - ends[-2] if len(ends) > 1 else 1
        share = 1.0 if len(ends) == 1 else (width - empty(slots, ends[-2], ends[-1])) / width
        if (
            ends[-1] < limit
            and end() == limit
            and not any(t in request.stop_ids for t in slots)
            and share >= append_ratio
        ):
            ends.append(min(ends[-1] + size, limit))
            active.append(False)
        active = activated(slots)
        seen = limit if full else ends[-1]
        open_slots = [i for i in range(min(end(), ends[-1])) if slots[i] is None]
        best = None
        for extra in [{}, *tried]:
            text = [extra.get(i, slots[i]) for i in range(seen)]
            asked = [i for i in open_slots if i not in extra]
            found = guesses(
                target, [*request.ids, *(mask if t is None else t for t in text)], [prompt + i for i in asked], prompt,
                None if full else size,
            )  # fmt: skip
            found = {i: found[prompt + i] for i in asked}
            score = sum(p for _, p in found.values()) / len(found) if found else 1.0
            if best is None or score > best[0]:
                best = score, extra, found
        _, extra, found = best
        fills = dict(extra)
        slots = [extra.get(i, token) for i, token in enumerate(slots)]
        active = activated(slots)
        for b in range(len(ends) - 1):
            of_block = [i for i in found if ends[b] <= i < ends[b + 1] and i < end_before_fills(slots, request)]
            sure = [i for i in of_block if found[i][1] > threshold]
            if active[b] and len(sure) < min_fills:
                sure = sorted({*sure, *sorted(of_block, key=lambda i: -found[i][1])[: min_fills - len(sure)]})
            fills |= {i: found[i][0] for i in sure}
        slots = [fills.get(i, token) for i, token in enumerate(slots)]
        rounds.append(sorted(fills))
        left = [i for i in found if slots[i] is None and i < end()]
        tried = [{i: found[i][0]} for i in sorted(left, key=lambda i: (-found[i][1], i))[:branches]]
    return slots[: end()], rounds


def end_before_fills(slots: Sequence[int | None], request: Request) -> int:
    return next((i + 1 for i, token in enumerate(slots) if token in request.stop_ids), len(slots))


def same(made: Generation, expected: tuple[list[int], list[list[int]]]) -> None:
    tokens, rounds = expected
    assert made.tokens == tokens
    assert [p.filled + p.beyond for p in made.passes] == [len(fills) for fills in rounds]
    assert [p.filled for p in made.passes] == [sum(i < len(tokens) for i in fills) for fills in rounds]
    assert sum(p.committed for p in made.passes) == len(tokens)


WAYS: dict[str, dict[str, Any]] = {
    "d2f": {},
    "eager": {"append_ratio": 0.0, "activate_ratio": 0.0, "threshold": 0.3},
    "one block": {"block_size": None},
    "block after block": {"append_ratio": 1.0, "threshold": 0.4},
    "several per pass": {"append_ratio": 1.0, "activate_ratio": 1.0, "threshold": 1.0, "min_fills": 3},
    "lopa": {"branches": 3},
    "eager lopa": {"branches": 5, "append_ratio": 0.0, "activate_ratio": 0.0, "threshold": 0.6},
}


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_cached_equals_the_plain_reference(toys: SimpleNamespace, way: str, shift: bool) -> None:
    """Exact cache under block-causal attention, branches in one pass, rows in any phase: as computed anew, alone."""
    target, asked = model(toys, len(way), shift=shift), some(len(way), 7)
    made = decode(decoder(target, **WAYS[way]), asked, in_flight=3)
    for request, one in zip(asked, made, strict=True):
        same(one, reference(target, request, **WAYS[way]))
    assert any(p.filled > 1 for one in made for p in one.passes)  # several tokens per pass
    assert any(one.stopped for one in made)
    if "branches" in WAYS[way]:
        assert [trace(one) for one in made] != [
            trace(one) for one in decode(decoder(target, **WAYS[way] | {"branches": 0}), asked)
        ]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("way", ["block after block", "one block", "several per pass", "lopa"])
def test_full_attention_without_a_cache(toys: SimpleNamespace, way: str, shift: bool) -> None:
    """Sees all of the answer's slots, also those after the appended blocks."""
    target, asked = model(toys, 1 + len(way), shift=shift), some(len(way), 6)
    made = decode(decoder(target, attention="full", cache="none", **WAYS[way]), asked, in_flight=4)
    for request, one in zip(asked, made, strict=True):
        same(one, reference(target, request, full=True, **WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_cached_equals_uncached(toys: SimpleNamespace, way: str, sampling: Sampling) -> None:
    target, asked = model(toys, 2), some(5, 6, samplings=[sampling])
    cached, anew = (decode(decoder(target, cache=cache, **WAYS[way]), asked) for cache in ("committed", "none"))
    assert [trace(one) for one in cached] == [trace(one) for one in anew]
    total = [sum(p.positions for one in made for p in one.passes) for made in (cached, anew)]
    assert total[0] < total[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", ["committed", "none"])
@pytest.mark.parametrize("attention", ["full", "block_causal"])
def test_a_request_gives_what_it_gives_alone(toys: SimpleNamespace, way: str, attention: str, cache: str) -> None:
    """Whatever is decoded beside it and whenever it joins; samplings, lengths, limits and stops differ."""
    target = model(toys, 3, shift=cache == "committed")
    these, one = some(9, 8, samplings=[GREEDY, WARM]), decoder(target, attention=attention, cache=cache, **WAYS[way])
    alone = [trace(decode(one, [request])[0]) for request in these]
    for in_flight in (None, 3):
        assert [trace(made) for made in decode(one, these, in_flight=in_flight)] == alone


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [False, True])
def test_caches_of_a_block_in_a_batch(toys: SimpleNamespace, cache: str, shift: bool) -> None:
    target, these = model(toys, 4, shift=shift), some(4, 7, samplings=[GREEDY, WARM])
    one = decoder(target, attention="full", cache=cache, append_ratio=1.0)
    alone = [trace(decode(one, [request])[0]) for request in these]
    assert [trace(made) for made in decode(one, these, in_flight=3)] == alone


@pytest.mark.parametrize("way", WAYS)
def test_joining_in_the_middle_and_leaving(toys: SimpleNamespace, way: str) -> None:
    one, asked = decoder(model(toys, 5), **WAYS[way]), [replace(r, max_new_tokens=17, stop_ids=()) for r in some(6, 3)]
    rows = toys.joined(one, asked, steps=1)
    expected = [trace(decode(one, [asked[i]])[0]) for i in (2, 0)]
    assert [trace(row.generation) for row in rows] == expected


# ---- the identities of the issue


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_lopa_without_branches_is_d2f(toys: SimpleNamespace, sampling: Sampling) -> None:
    target, asked = model(toys, 6), some(7, 8, samplings=[sampling])
    common: dict[str, Any] = {
        "target": target,
        "block_size": 5,
        "append_ratio": 0.2,
        "activate_ratio": 0.6,
        "threshold": 0.4,
    }
    plain = decode(toys.build_decoder("d2f", **common), asked)
    ahead = {
        "branch_score": "mean",
        "segment": 1,
        "confidence_measure": "probability",
        "cache": "committed",
        "process_timeout_s": None,
    }
    lopa = toys.build_decoder("lopa", **common, **ahead, window_attention="block_causal", branches=0)
    assert [trace(one) for one in decode(lopa, asked)] == [trace(one) for one in plain]
    for request, one in zip(asked, plain, strict=True):
        if sampling.greedy:
            same(one, reference(target, request, block_size=5, append_ratio=0.2, activate_ratio=0.6, threshold=0.4))


def test_d2f_with_one_block_is_the_threshold_decoder(toys: SimpleNamespace) -> None:
    """Under the same mask, whatever the shares at which blocks would be appended."""
    target, asked = model(toys, 7), some(8, 8, samplings=[GREEDY, WARM])
    rules = {"block_size": None, "append_ratio": 0.1, "activate_ratio": 0.95, "threshold": 0.4}
    d2f = toys.build_decoder("d2f", target=target, **rules)
    plain = toys.build_decoder(
        "fast_dllm",
        target=target,
        draft=None,
        threshold=0.4,
        block_size=None,
        attention="block_causal",
        cache="none",
    )
    assert [trace(one) for one in decode(d2f, asked)] == [trace(one) for one in decode(plain, asked)]


def test_the_baseline_fills_one_token_a_pass(toys: SimpleNamespace) -> None:
    target, asked = model(toys, 8), some(2, 8)
    for attention in (None, "full", "block_causal"):
        for block_size in (None, 4):
            one = toys.build_decoder(
                "diffusion", target=target, draft=None, tokens_per_step=1, block_size=block_size, attention=attention
            )
            assert one.lossless
            for made in decode(one, asked):
                assert all(p.filled + p.beyond == 1 for p in made.passes)
                assert made.nfe >= len(made.tokens)
    two = toys.build_decoder("diffusion", target=target, tokens_per_step=2, block_size=None, attention=None)
    assert not two.lossless
    assert not toys.build_decoder(
        "d2f", target=target, draft=None, block_size=4, append_ratio=0.1, activate_ratio=1.0, threshold=0.9
    ).lossless
    assert all(p.filled + p.beyond == 2 for made in decode(two, asked) for p in made.passes[:-1])


# ---- approximate caches


@torch.no_grad()
def with_copies(target: Any, request: Request, *, branches: int, **rules: Any) -> Generation:
    """LoPA with full window attention as its authors run it: each branch on a copy of the cache, one after another;
    the winner's copy becomes the cache."""

    class OneByOne(SingleProcess):
        pass

    one = decoder(target, attention="full", branches=branches, **rules)
    plain = diffusion.compute

    def apart(model: Any, rows: Sequence[Any], *, cache: Any) -> Tensor:
        (row,) = rows
        if len(row.branches) < 2:
            return plain(model, rows, cache=cache)
        parts = []
        for b in row.branches:
            branch_cache = copy.deepcopy(cache)
            alone = replace(row, branches=[b], texts=[row.texts[0], row.texts[1 + b]])
            parts.append(plain(model, [alone], cache=branch_cache))
            for layer, branch_layer in zip(cache.layers, branch_cache.layers, strict=True):
                first = row.start + b * len(row.window)
                for name in ("keys", "values"):
                    piece = getattr(branch_layer, name)[:, :, row.start : row.start + len(row.window)]
                    layer.room(branch_layer.keys, branch_layer.values, first + len(row.window))
                    getattr(layer, name)[:, :, first : first + len(row.window)] = piece
        return torch.cat(parts, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "compute", apart)
        return decode(one, [request])[0]


@pytest.mark.parametrize("shift", [False, True])
def test_branches_in_one_pass_equal_branches_one_by_one(toys: SimpleNamespace, shift: bool) -> None:
    target = model(toys, 9, shift=shift)
    for request in some(11, 5):
        packed = decode(decoder(target, attention="full", branches=4), [request])[0]
        assert trace(packed) == trace(with_copies(target, request, branches=4))


@torch.no_grad()
@pytest.mark.parametrize("shift", [False, True])
def test_the_winners_keys_and_values_are_cached(toys: SimpleNamespace, shift: bool) -> None:
    """Under full attention the cache holds what the winning branch computed for the blocks that were filled before the
    pass: as a pass over that branch alone gives, on the cache as it was."""
    target, winners, moved = model(toys, 10, shift=shift), list[int](), 0
    one = decoder(target, attention="full", branches=4, append_ratio=0.5, threshold=0.8)

    class Noting(SingleProcess):
        def select_best(self, results: Any, slots: int) -> Any:
            winners.append(results[0].branch)
            return super().select_best(results, slots)

    one.executor = Noting()
    (request,) = [replace(r, max_new_tokens=60, stop_ids=()) for r in some(3, 1)]
    state = one.start([request])
    while not state.rows[0].done:
        row_state = state.parts[diffusion.ROW_STATES][0]
        before, answer, tried, last = (
            copy.deepcopy(state.cache),
            row_state.answer,
            row_state.lookahead_tokens,
            row_state.hidden_before_window,
        )
        one.step(state)
        if answer.settled == answer.cached:
            continue
        end = answer.prompt + answer.blocks[-1].end
        winner = winners[-1]
        moved += winner > 0
        text = one._text(state.rows[0], replace(row_state, answer=answer, lookahead_tokens=tried), winner)[
            answer.cached : end
        ]
        out = target(
            torch.tensor([text]), positions_BL=torch.arange(answer.cached, end)[None], cache=before,
            start_B=[answer.cached], mask=lambda b, h, q, kv: (kv >= 0) & (q >= 0),
        )  # fmt: skip
        for layer, expected in zip(state.cache.layers, before.layers, strict=True):
            for name in ("keys", "values"):
                kept = getattr(layer, name)[:, :, : answer.settled]
                torch.testing.assert_close(kept, getattr(expected, name)[:, :, : answer.settled], rtol=0, atol=1e-10)
        if not shift:
            assert row_state.hidden_before_window is None
            continue
        at = answer.settled - 1 - answer.cached
        torch.testing.assert_close(row_state.hidden_before_window, out.hidden_BLD[0, at], rtol=0, atol=1e-10)
        assert last is None or not torch.equal(last, row_state.hidden_before_window)
    assert moved


@torch.no_grad()
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_of_a_block(toys: SimpleNamespace, cache: str, shift: bool) -> None:
    """A block's first pass is one over everything; the later ones see the surroundings as they were in it."""
    target = model(toys, 12, shift=shift)
    one = decoder(target, attention="full", cache=cache, append_ratio=1.0, threshold=0.6)
    (request,) = [replace(r, max_new_tokens=14, stop_ids=()) for r in some(1, 1)]
    seen: list[tuple] = []
    plain = diffusion.compute

    def noted(model: Any, rows: Sequence[Any], *, cache: Any) -> Tensor:
        hidden = plain(model, rows, cache=cache)
        seen.append((rows[0], hidden.clone()))
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "compute", noted)
        decode(one, [request])
    n, frozen, begun = len(request.ids), None, 0
    for row, hidden in seen:
        whole = row.start == 0
        first = n + 4 * begun if whole else row.window[0]
        assert whole or first == frozen[0]
        window = list(range(first, n + 14 if cache == "prefix" else min(first + 4, n + 14)))
        assert (row.width, row.start) == ((n + 14, 0) if whole else (len(window), n + 14 - len(window)))
        assert list(row.window)[-len(window) :] == window
        positions = list(row.window)
        if whole:
            frozen, begun = (first, row.texts[0]), begun + 1
            ids = torch.tensor([[row.texts[0][p] for p in positions]])
            out = target(ids, positions_BL=torch.tensor([positions]), mask=lambda b, h, q, kv: (kv >= 0) & (q >= 0))
            torch.testing.assert_close(hidden, out.hidden_BLD, rtol=0, atol=1e-10)
            continue
        around = [p for p in range(n + 14) if p not in row.window]
        kv = target.new_cache()
        every = [*around, *row.window]
        pos = torch.tensor([every])
        target(
            torch.tensor([[frozen[1][p] for p in every]]),
            positions_BL=pos,
            cache=kv,
            mask=lambda b, h, q, kv: (kv >= 0) & (q >= 0),
        )
        ids = torch.tensor([[row.texts[0][p] for p in row.window]])
        out = target(
            ids, positions_BL=pos[:, len(around) :], cache=kv, start_B=[len(around)],
            mask=lambda b, h, q, kv: (kv >= 0) & (q >= 0),
        )  # fmt: skip
        torch.testing.assert_close(hidden, out.hidden_BLD, rtol=0, atol=1e-10)
    assert begun == 4
    assert len(seen) > 4


# ---- ranking, temperature, stops


@pytest.mark.parametrize(("attention", "cache", "windows"), [("full", "committed", 4), ("full", "none", 9)])
def test_a_pass_over_branches_is_one_forward_pass(
    toys: SimpleNamespace, attention: str, cache: str, windows: int
) -> None:
    """Four slots after a prompt of five, one fill per pass: each branch has a window of its own."""
    request = Request(ids=[1, 2, 3, 4, 5], sampling=GREEDY, max_new_tokens=4, stop_ids=(), seed=0)
    lookahead = decoder(model(toys), attention=attention, cache=cache, threshold=1.0, branches=2)
    (made,) = decode(lookahead, [request])
    filled = 0
    for i, one in enumerate(made.passes):
        assert one.branches == (1 + min(2, 4 - filled) if i else 1)
        assert one.positions == (one.branches * windows if i else 9)
        filled += one.filled
    assert made.forwards == made.nfe == len(made.passes) < 4
    assert made.branch_forwards == sum(p.branches for p in made.passes) > made.nfe
    assert made.positions_computed == 9 + windows * (made.branch_forwards - 1)


def test_entropy_ranks_but_does_not_accept(toys: SimpleNamespace) -> None:
    """The order of guesses differs; which are sure enough does not."""
    target, asked = model(toys, 13), some(5, 10)
    runs = [
        decode(decoder(target, confidence_measure=how, branches=2, threshold=0.6), asked)
        for how in ("probability", "entropy")
    ]
    assert [trace(one) for one in runs[0]] != [trace(one) for one in runs[1]]
    everything = [
        decode(decoder(target, confidence_measure=how, threshold=0.0), asked) for how in ("probability", "entropy")
    ]
    assert [trace(one) for one in everything[0]] == [trace(one) for one in everything[1]]


def test_confidence_measures() -> None:
    """The higher, the surer: the probability of the token, or the negative entropy of its distribution; float32."""
    weight = torch.tensor([[3.0, 0.0], [0.0, 1.0], [9.0, 9.0]], dtype=torch.float64)  # MASK has the highest logit
    target: Any = SimpleNamespace(
        vocab_size=3, device=torch.device("cpu"), logits=lambda x: x @ weight.T, required_mask_token=lambda: 2
    )
    hidden = [torch.tensor(x, dtype=torch.float64) for x in ([1.0, 0.0], [0.0, 1.0])]
    for how in ("probability", "entropy"):
        made = guess(target, hidden, SamplingBatch([GREEDY]), [0, 0], [0.0, 0.0], confidence_measure=how)
        probs = [torch.tensor([logit, 0.0]).sigmoid().tolist() for logit in (3.0, 1.0)]
        tops = [p for p, _ in probs]
        lows = [sum(q * torch.tensor(q).log().item() for q in (p, 1 - p)) for p in tops]
        assert [one.token for one in made] == [0, 1]
        assert [one.probability for one in made] == pytest.approx(tops, abs=1e-6)
        assert [one.confidence for one in made] == pytest.approx(tops if how == "probability" else lows, abs=1e-6)
        assert made[0].confidence > made[1].confidence
        for value in (one.confidence for one in made):
            assert torch.tensor(value, dtype=torch.float32).item() == value


def test_only_one_token_per_pass_is_lossless(toys: SimpleNamespace) -> None:
    target, strict = model(toys), {"append_ratio": 1.0, "threshold": 1.0}
    assert decoder(target, **strict).lossless
    assert decoder(target, attention="full", cache="none", **strict).lossless
    for cache in ("committed", "prefix", "dual"):
        assert not decoder(target, attention="full", cache=cache, **strict).lossless
    for change in ({"branches": 1}, {"min_fills": 2}, {"threshold": 0.9}, {"append_ratio": 0.9}):
        assert not decoder(target, **strict | change).lossless


def test_a_guess_is_one_draw(toys: SimpleNamespace) -> None:
    """With a temperature the token that is filled is the one whose probability was tested, drawn from the request's
    distribution: the frequencies of the first slot of a one-slot answer."""
    target = model(toys, 14)
    asked = [Request(ids=[1, 2], sampling=WARM, max_new_tokens=1, stop_ids=(), seed=s) for s in range(400)]
    made = decode(decoder(target, block_size=1), asked, in_flight=100)
    with torch.no_grad():
        hidden = target(torch.tensor([[1, 2, VOCAB - 1]]), mask=lambda b, h, q, kv: (kv < 2) | (kv == q)).hidden_BLD[
            0, 2
        ]
        logits = target.logits(hidden)
    logits[VOCAB - 1] = -torch.inf
    law = WARM.probs(logits)
    share = torch.bincount(torch.tensor([g.tokens[0] for g in made]), minlength=VOCAB) / len(made)
    assert float((share - law).abs().sum()) < 0.15
    assert ((share > 0) <= (law > 0)).all()
    assert (share > 0).sum() > 1


def test_the_mask_token_is_never_filled_in(toys: SimpleNamespace) -> None:
    target = model(toys, 15)
    with torch.no_grad():
        target.lm_head.weight[VOCAB - 1] = target.lm_head.weight[:-1].sum(0) * 9
    made = decode(decoder(target), some(1, 12, samplings=[GREEDY, WARM]))
    assert all(VOCAB - 1 not in one.tokens for one in made)


def test_what_follows_a_stop_does_not_count(toys: SimpleNamespace) -> None:
    made = decode(decoder(model(toys, 16), append_ratio=0.0, activate_ratio=0.0, threshold=0.2), some(3, 30))
    assert any(p.beyond for one in made for p in one.passes)
    for one in made:
        assert sum(p.filled for p in one.passes) == sum(p.committed for p in one.passes) == len(one.tokens)
        assert not one.stopped or not {*STOPS} & {*one.tokens[:-1]}
        assert all(p.kind == "decode" for p in one.passes)
        assert one.nfe <= len(one.tokens) + sum(p.beyond for p in one.passes)


def test_stop_strings_end_an_answer(toys: SimpleNamespace) -> None:
    """They are looked for in the leading tokens only, which are final."""
    target, (request,) = model(toys, 17), some(2, 1, stops=())
    request = replace(request, max_new_tokens=15, stop_ids=())
    (whole,) = decode(decoder(target), [request])
    (made,) = decode(
        decoder(target), [replace(request, should_stop=lambda tokens, known: 6 if len(tokens) >= 6 else None)]
    )
    assert made.tokens == whole.tokens[:6]
    assert made.stopped
    assert sum(p.filled for p in made.passes) == 6


# ---- refusals


def test_refusals(toys: SimpleNamespace) -> None:
    target, (request,) = model(toys), some(0, 1)
    bad = [
        ({"attention": "causal"}, "attention=causal"), ({"cache": "exact"}, "cache=exact"),
        ({"confidence_measure": "margin"}, "confidence_measure=margin"), ({"cache": "prefix"}, "cache=prefix"),
        ({"cache": "dual", "attention": "full"}, "one block after the other"),
        ({"cache": "dual", "attention": "full", "append_ratio": 1.0, "branches": 1}, "cache=dual"),
        ({"branches": -1}, "branches=-1"), ({"threshold": 1.5}, "threshold=1.5"),
    ]  # fmt: skip
    for wrong, words in bad:
        with pytest.raises(UserError, match=words):
            decoder(target, **wrong)
    for wrong, words in (
        ({"max_new_tokens": 3}, "block_size=4 is larger than max_new_tokens=3"),
        ({"ids": [1, VOCAB - 1]}, "contains the mask token"),
        ({"max_new_tokens": 999}, "exceed the context"),
    ):
        with pytest.raises(UserError, match=words):
            decode(decoder(target), [replace(request, **wrong)])
    target.mask_token_id = None
    with pytest.raises(UserError, match="no mask token"):
        decoder(target)


@pytest.mark.parametrize(
    ("attention", "blocks", "said"),
    [
        ("block_causal", 8, []),
        ("block_causal", 4, ["blocks of 4, trained with blocks of 8"]),
        ("block_causal", None, ["one block, trained with blocks of 8"]),
        ("full", 4, ["full attention, trained under block_causal"]),  # where blocks are an order, no mask
    ],
)
def test_another_mask_than_the_trained_one_is_said(
    toys: SimpleNamespace, attention: str, blocks: int | None, said: list[str]
) -> None:
    """In results; the shift is the model's own. The evaluation says it, too (tests/eval/test_decoder_settings.py)."""
    target = model(toys, shift=True)
    target.model.config.dspec_attention, target.model.config.dspec_block_size = "block_causal", 8
    made = toys.build_decoder("diffusion", target=target, tokens_per_step=1, block_size=blocks, attention=attention)
    told = made.settings(GREEDY)
    assert (told["not_as_trained"], told["logit_shift"]) == (said, True)
    del target.model.config.dspec_attention, target.model.config.dspec_block_size
    assert (
        made.__class__(target=target, config=made.config, executor=made.executor).settings(GREEDY)["not_as_trained"]
        == []
    )  # nothing is recorded


def test_another_attention_than_the_trained_one_is_said(toys: SimpleNamespace) -> None:
    target = model(toys)
    target.model.config.dspec_attention, target.model.config.dspec_block_size = "bidirectional", 8
    one = toys.build_decoder("d2f", target=target, block_size=4, append_ratio=0.1, activate_ratio=0.95, threshold=0.9)
    told = one.settings(GREEDY)
    assert (told["attention"], told["trained_attention"], told["trained_block_size"]) == ("block_causal", "full", 8)
    plain = toys.build_decoder("diffusion", target=target, tokens_per_step=1, block_size=None, attention=None)
    assert plain.settings(GREEDY)["attention"] == "full"
    target.model.config.dspec_attention = "block_causal"
    plain = toys.build_decoder("diffusion", target=target, tokens_per_step=1, block_size=8, attention=None)
    assert (plain.settings(GREEDY)["attention"], plain.settings(GREEDY)["cache"]) == ("block_causal", "committed")
    target.model.config.dspec_attention = "sideways"
    with pytest.raises(UserError, match="dspec_attention=sideways"):
        decoder(target)


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_size", "eight"), ("block_size", 0), ("block_size", True), ("logit_shift", "no"), ("logit_shift", 1)],
)
def test_a_damaged_record_is_refused(toys: SimpleNamespace, key: str, value: Any) -> None:
    """A text as the shift would otherwise be true, whatever it says."""
    target = model(toys)
    setattr(target.model.config, f"dspec_{key}", value)
    with pytest.raises(UserError, match=f"dspec_{key}={value}"):
        decoder(target)
