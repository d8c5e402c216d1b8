"""The one loop: requests that join and leave, each with its own sampling and limits, and traces of their passes."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Request, make_requests
from dspec.decoding.jacobi import BLOCKS, Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer, Proposal
from dspec.decoding.sampling import GREEDY, Sampling, SamplingBatch, Streams
from dspec.decoding.speculative import Speculative
from dspec.decoding.state import State
from dspec.decoding.verification import ConfidenceThreshold, VerifyAll
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.temperatures import Calibration

KINDS = ("autoregressive", "speculative", "thresholded", "lookup", "jacobi", "recycling")
SAMPLINGS = (GREEDY, Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=1.3, top_p=1.0))


def decoders(toys: SimpleNamespace) -> tuple[Any, dict[str, Any]]:
    target = toys.target("llama", seed=3, vocab=9, scale=0.35)
    draft = toys.draft(target, seed=1, head="vanilla", confidence=True, scale=0.4)
    lookup = PromptLookupProposer(num_drafts=3, max_ngram=2, device=torch.device("cpu"))
    blocks = {"block_size": 5, "blocks": 2, "activation": 0.4, "pool_size": 4}
    sure = ConfidenceThreshold(0.5, calibration=None)
    return target, {
        "autoregressive": Autoregressive(target=target),
        "speculative": Speculative(target=target, proposer=DraftProposer(draft), policy=VerifyAll()),
        "thresholded": Speculative(target=target, proposer=DraftProposer(draft), policy=sure),
        "lookup": Speculative(target=target, proposer=lookup, policy=VerifyAll()),
        "jacobi": Jacobi(target=target, config=JacobiConfig(**blocks, candidates=0)),
        "recycling": Jacobi(target=target, config=JacobiConfig(**blocks, candidates=3)),
    }


def asked(toys: SimpleNamespace, seed: int, count: int = 7) -> list[Request]:
    """Requests that differ in everything a request has."""
    rng = random.Random(seed)
    return [
        Request(
            ids=ids,
            sampling=rng.choice(SAMPLINGS),
            max_new_tokens=rng.randint(1, 18),
            stop_ids=rng.choice([(), (3,), (3, 5)]),
            seed=rng.randrange(1000),
            should_stop=rng.choice([None, lambda tokens, known: 6 if known < 6 <= len(tokens) else None]),
        )
        for ids in toys.prompts(rng, count, vocab=9)
    ]


def seen(generation: Generation) -> tuple:
    """What must not depend on the batch: all but the width of shared passes."""
    passes = [(p.kind, p.committed, p.branches, p.drafted, p.accepted, p.valid) for p in generation.passes]
    return generation.tokens, generation.stopped, passes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_request_gives_what_it_gives_alone(toys: SimpleNamespace, kind: str, seed: int) -> None:
    """Whatever is decoded beside it, and whenever it joins: greedy and sampled rows, limits and stops of their own."""
    _, made = decoders(toys)
    these = asked(toys, seed)
    assert len({r.sampling for r in these}) > 1
    alone = [seen(decode(made[kind], [request])[0]) for request in these]
    for in_flight in (None, 1, 2, 3):
        assert [seen(g) for g in decode(made[kind], these, in_flight=in_flight)] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_joining_in_the_middle_and_leaving(toys: SimpleNamespace, kind: str) -> None:
    """By hand, as an engine would: join after any number of steps, drop a row that is not done, go on."""
    _, made = decoders(toys)
    decoder, (first, second, third) = made[kind], asked(toys, 11, 3)
    alone = {id(r): seen(decode(decoder, [r])[0]) for r in (first, second, third)}
    with torch.inference_mode():
        for steps in range(4):
            rows = toys.joined(decoder, [first, second, third], steps)
            assert [row.request for row in rows] == [third, first]
            assert [seen(row.generation) for row in rows] == [alone[id(third)], alone[id(first)]]


@pytest.mark.parametrize("kind", KINDS)
def test_batch_in_small_chunks(toys: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions some rows at a time, as with a large vocabulary: each row by its own sampling."""
    _, made = decoders(toys)
    these = asked(toys, 2)
    alone = [seen(decode(made[kind], [request])[0]) for request in these]
    monkeypatch.setattr("dspec.decoding.sampling._CHUNK_BYTES", 2000)
    assert [seen(g) for g in decode(made[kind], these)] == alone


def test_streams_go_on_behind_a_join() -> None:
    """Past what is drawn at a time: the uniforms of a row are its seed's, whenever it joined."""
    cpu, seeds = torch.device("cpu"), (3, 4, 5)
    one, other = Streams(seeds[:2], cpu), Streams(seeds[2:], cpu)
    begun = [*one.take(100), *other.take(7)]
    one.join(other)
    for row, (first, rest) in enumerate(zip(begun, one.take(1200), strict=True)):
        fresh = torch.rand(4096, generator=torch.Generator().manual_seed(seeds[row]), dtype=torch.float64)
        assert torch.equal(torch.cat([first, rest]), fresh[: len(first) + 1200])


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_than_in_flight(toys: SimpleNamespace, kind: str) -> None:
    """And while others wait no place is held by a row that is done."""
    _, made = decoders(toys)
    these, sizes, idle, begun = asked(toys, 3, 9), [], [], set()

    def observe(state: State) -> None:
        sizes.append(len(state.rows))
        begun.update(id(row.request) for row in state.rows)
        idle.append(len(begun) < len(these) - 2 and any(row.done for row in state.rows))

    assert len(decode(made[kind], these, in_flight=3, observe=observe)) == 9
    assert max(sizes) == 3
    assert not any(idle)


def test_steps_of_an_engine_need_no_inference_mode(toys: SimpleNamespace) -> None:
    target, made = decoders(toys)
    target.model.requires_grad_(True)
    for decoder in made.values():
        state = decoder.start(asked(toys, 11, 2))
        decoder.step(state)
        assert all(not layer.keys.requires_grad for layer in state.cache.layers)


def test_states_of_two_decoders_do_not_join(toys: SimpleNamespace) -> None:
    _, made = decoders(toys)
    state, other = (made[kind].start(asked(toys, 11, 1)) for kind in ("autoregressive", "jacobi"))
    for bad in (other, state):
        with pytest.raises(ValueError, match="same decoder"):
            state.join(bad)
    assert len(state.rows) == 1


def test_each_row_is_calibrated_by_its_own_sampling() -> None:
    fitted = Calibration((0.2, 5.0), SAMPLINGS[1].temperature, SAMPLINGS[1].top_p)
    policy = ConfidenceThreshold(0.6, calibration=fitted)
    logits = torch.full((2, 2), 0.3, dtype=torch.float64)
    proposal = Proposal(torch.zeros(2, 2, dtype=torch.long), torch.tensor([2, 2]), confidence_BJ=logits)
    with pytest.warns(UserWarning, match="not used"):
        counts = policy(proposal, [SAMPLINGS[0], SAMPLINGS[1]], policy.new_memory(2))
    assert counts.tolist() == [0, 1]  # raw: sigmoid(0.3) = 0.57; calibrated: sigmoid(1.5), then sigmoid(0.06)


def test_a_trace_adds_up(toys: SimpleNamespace) -> None:
    _, made = decoders(toys)
    for kind, decoder in made.items():
        for generation in decode(decoder, asked(toys, 5)):
            kinds = [p.kind for p in generation.passes]
            assert kinds.count("prefill") == 1 == generation.prefill_forwards
            assert sum(p.committed for p in generation.passes) == len(generation.tokens)
            big = len(kinds) - kinds.count("draft")
            assert (generation.nfe, generation.forwards) == (big, big - 1)
            drafts = generation.forwards if kind in ("speculative", "thresholded") else 0
            assert generation.draft_forwards == drafts
            assert len(generation.rounds) == (0 if kind == "autoregressive" else generation.forwards)
            widths = [p.positions for p in generation.passes if p.kind in ("decode", "verify")]
            assert generation.positions_computed == sum(widths) + generation.idle_positions
            assert all(p.positions >= 1 + p.branches * p.drafted for p in generation.passes if p.kind == "verify")


def branches_along_the_batch(target: Any, decoder: Jacobi, request: Request) -> tuple[list[int], list[tuple]]:
    """Jacobi decoding with each continuation in a row of its own, over the whole text anew: no cache, no mask."""
    state = decoder.start([request])
    blocks, (row,) = state.parts[BLOCKS][0], state.rows
    rounds = []
    uniforms = torch.rand(512, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
    while not row.done:
        tried, predictions = blocks.drafts(), []
        for draft in tried:
            ids = torch.tensor([[*row.text, *draft]])
            logits = target.logits(target(ids).hidden_BLD)[0, len(row.text) - 1 :]
            if request.sampling.greedy:
                predictions.append(logits.argmax(-1).tolist())
            else:
                at = len(row.generation.tokens) + torch.arange(len(logits))
                cdf = request.sampling.probs(logits).cumsum(-1)
                drawn = torch.searchsorted(cdf, (uniforms[at] * cdf[:, -1])[:, None], right=True)
                predictions.append(drawn[:, 0].tolist())
        winner, accepted = blocks.advance(tried, predictions)
        row.commit_round(tried[winner], accepted, predictions[winner][accepted], branches=len(tried))
        rounds.append((winner, accepted, len(tried)))
    return row.generation.tokens, rounds


@pytest.mark.parametrize("seed", range(6))
def test_branches_in_one_row_equal_branches_along_the_batch(toys: SimpleNamespace, seed: int) -> None:
    target = toys.target(toys.FAMILIES[seed % 3], seed=seed, vocab=7, scale=0.3)
    config = JacobiConfig(block_size=6, blocks=1 + seed % 2, activation=0.4, pool_size=6, candidates=4)
    decoder, rng, won = Jacobi(target=target, config=config), random.Random(seed), 0
    for sampling in SAMPLINGS[:2]:
        for ids in toys.prompts(rng, 3, vocab=7):
            request = Request(ids=ids, sampling=sampling, max_new_tokens=30, stop_ids=(), seed=seed)
            with torch.inference_mode():
                tokens, rounds = branches_along_the_batch(target, decoder, request)
            (got,) = decode(decoder, [request])
            assert got.tokens == tokens
            assert [(r.accepted, r.branches) for r in got.rounds] == [
                (min(a, r.valid), n) for (_, a, n), r in zip(rounds, got.rounds, strict=True)
            ]
            won += sum(winner > 0 and accepted > 0 for winner, accepted, _ in rounds)
    assert won > 0  # candidates did win, and their keys and values were needed afterwards


def test_no_pass_copies_the_cache(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a winner's keys and values the accepted places alone are moved; nothing else of the cache is copied."""
    target = toys.target(seed=0, vocab=7, scale=0.3)
    moved: list[int] = []
    move = PositionCache.move

    def refused(self: PositionCache, *args: object) -> None:
        raise AssertionError("the cache is copied")

    def counted(self: PositionCache, rows: Any, source: Any, goal: Any) -> None:
        moved.append(len(rows))
        move(self, rows, source, goal)

    monkeypatch.setattr(PositionCache, "select", refused)
    monkeypatch.setattr(PositionCache, "join", refused)
    monkeypatch.setattr(PositionCache, "move", counted)
    config = JacobiConfig(block_size=6, blocks=2, activation=0.4, pool_size=6, candidates=4)
    tokens, branched = 0, 0
    for ids in toys.prompts(random.Random(0), 6, vocab=7):
        (got,) = decode(
            Jacobi(target=target, config=config),
            [Request(ids=ids, sampling=GREEDY, max_new_tokens=30, stop_ids=(), seed=0)],
        )
        branched += sum(r.branches > 1 for r in got.rounds)
        tokens += len(got.tokens)
    assert branched > 10
    assert 0 < sum(moved) < tokens
    assert 0 not in moved


def test_mixed_samplings_are_each_rows_own() -> None:
    logits = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixed = SamplingBatch(SAMPLINGS)
    assert not mixed.greedy
    assert SamplingBatch([GREEDY] * 3).greedy
    for row, sampling in enumerate(SAMPLINGS):
        assert torch.equal(mixed.probs(logits)[row], sampling.probs(logits[row]))
        assert torch.equal(mixed.probs(logits[:2], [row, 0])[0], sampling.probs(logits[0]))
    point = mixed.probs(logits)[0]  # greedy: all on the best token
    assert torch.equal(point.argmax(-1), logits[0].argmax(-1))
    assert set(point.flatten().tolist()) == {0.0, 1.0}


def test_states_are_seen_before_each_step(toys: SimpleNamespace) -> None:
    _, made = decoders(toys)
    sizes: list[list[int]] = []

    def observe(state: State) -> None:
        sizes.append([len(row.text) for row in state.rows])

    (got,) = decode(made["autoregressive"], asked(toys, 5, 1), observe=observe)
    assert len(sizes) == got.forwards
    assert all(later[0] == before[0] + 1 for before, later in itertools.pairwise(sizes))


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(toys: SimpleNamespace, kind: str) -> None:
    _, made = decoders(toys)
    common: dict[str, Any] = {"sampling": GREEDY, "stop_ids": ()}

    def cases() -> Iterator[tuple[Any, str]]:
        yield [], "no prompts"
        yield make_requests([[1], []], seeds=[0, 0], max_new_tokens=4, **common), "prompt 1 is empty"
        yield make_requests([[1]], seeds=[0], max_new_tokens=0, **common), "max_new_tokens=0"
        yield make_requests([[1], [2] * 100], seeds=[0, 0], max_new_tokens=40, **common), "100 tokens"

    for these, message in cases():
        with pytest.raises(UserError, match=message):
            decode(made[kind], these)
    fine = make_requests([[1]] * 2, seeds=[0, 0], max_new_tokens=4, **common)
    empty = make_requests([[]], seeds=[0], max_new_tokens=4, **common)
    with pytest.raises(UserError, match="prompt 2 is empty"):  # before any is decoded, by the caller's number
        decode(made[kind], [*fine, *empty], in_flight=1)
    for room in (0, -1):
        with pytest.raises(UserError, match=f"in_flight={room}"):
            decode(made[kind], fine, in_flight=room)
    with pytest.raises(UserError, match="2 seeds for 1 prompts"):
        make_requests([[1]], seeds=[0, 1], max_new_tokens=4, **common)
