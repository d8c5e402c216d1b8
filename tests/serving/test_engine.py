"""The engine: whatever joins, leaves or fails beside a request, it is answered once, with what it gives alone."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Request
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import Decoder, decode
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sampling import GREEDY, Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.state import State
from dspec.decoding.verification import ConfidenceThreshold, VerifyAll
from dspec.errors import UserError
from dspec.serving.engine import Answer, Engine

KINDS = ("autoregressive", "thresholded", "lookup", "jacobi")
SAMPLINGS = (GREEDY, Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=1.3, top_p=1.0))
VOCAB = 9


def decoder(toys: SimpleNamespace, kind: str) -> Decoder:
    target = toys.target("llama", seed=3, vocab=VOCAB, scale=0.35)
    if kind == "autoregressive":
        return Autoregressive(target=target)
    if kind == "jacobi":
        config = JacobiConfig(block_size=5, blocks=2, activation=0.4, pool_size=4, candidates=2)
        return Jacobi(target=target, config=config)
    draft = toys.draft(target, seed=1, head="vanilla", confidence=True, scale=0.4)
    lookup = PromptLookupProposer(num_drafts=3, max_ngram=2, device=torch.device("cpu"))
    return Speculative(
        target=target,
        proposer=lookup if kind == "lookup" else DraftProposer(draft),
        policy=ConfidenceThreshold(0.5, calibration=None) if kind == "thresholded" else VerifyAll(),
    )


def request(rng: random.Random, **changes: Any) -> Request:
    """One that differs from others in everything a request has."""
    return Request(
        **{
            "ids": [rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 9))],
            "sampling": rng.choice(SAMPLINGS),
            "max_new_tokens": rng.randint(1, 18),
            "stop_ids": rng.choice([(), (3,), (3, 5)]),
            "seed": rng.randrange(1000),
            "should_stop": rng.choice([None, lambda tokens, known: 6 if known < 6 <= len(tokens) else None]),
        }
        | changes
    )


def seen(generation: Generation) -> tuple:
    """What must not depend on company: all but the width of shared passes."""
    passes = [(p.kind, p.committed, p.branches, p.drafted, p.accepted, p.valid) for p in generation.passes]
    return generation.tokens, generation.stopped, passes


def run(engine: Engine) -> dict[int, Answer]:
    """Everything that is submitted, to its end."""
    answers = {answer.number: answer for answer in engine.finished()}
    for _ in range(10_000):
        if not engine.busy:
            return answers
        engine.step()
        for answer in engine.finished():
            assert answer.number not in answers
            answers[answer.number] = answer
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_request_gives_what_it_gives_alone(toys: SimpleNamespace, kind: str, seed: int) -> None:
    """Submitted and cancelled at random times: greedy and sampled rows, limits and stops of their own."""
    rng, made = random.Random(seed), decoder(toys, kind)
    engine = Engine(made, max_in_flight=rng.randint(2, 4), max_cache_tokens=None)
    asked: dict[int, Request] = {}
    answers: dict[int, Answer] = {}
    cancelled: set[int] = set()
    while len(asked) < 14 or engine.busy:
        for _ in range(rng.randint(0, 3) if len(asked) < 14 else 0):
            one = request(rng)
            asked[engine.submit(one)] = one
        alive = sorted(asked.keys() - answers.keys() - cancelled)
        if alive and rng.random() < 0.3:
            cancelled.add(number := rng.choice(alive))
            assert engine.cancel(number)
        engine.step()
        for answer in engine.finished():
            assert answer.number not in answers
            answers[answer.number] = answer
    assert answers.keys() == asked.keys()
    for number, answer in answers.items():
        (alone,) = decode(made, [asked[number]])
        tokens, stopped, passes = seen(answer.generation)
        assert answer.error is None
        if number in cancelled:
            assert answer.reason == "cancelled"
            assert tokens == alone.tokens[: len(tokens)]
        else:
            assert (tokens, stopped, passes) == seen(alone)
            assert answer.reason == ("stop" if alone.stopped else "length")
    assert cancelled
    assert len({a.reason for a in answers.values()}) == 3


@pytest.mark.parametrize("kind", ["thresholded", "jacobi"])
def test_rows_and_cache_tokens_are_bounded(toys: SimpleNamespace, kind: str) -> None:
    """First come, first served; one that does not fit lets none past it, and none starves."""
    rng, made = random.Random(1), decoder(toys, kind)
    engine = Engine(made, max_in_flight=3, max_cache_tokens=60)
    asked = [request(rng, max_new_tokens=rng.choice([2, 8, 40])) for _ in range(12)]
    numbers = [engine.submit(one) for one in asked]
    sizes, order, step = [], [], made.step

    def watched(state: State) -> None:
        tokens = [len(row.request.ids) + row.request.max_new_tokens for row in state.rows]
        assert len(tokens) <= 3
        assert len(tokens) * max(tokens) <= 60
        sizes.append(len(tokens))
        order.extend(ticket.number for ticket in engine._running if ticket.number not in order)
        assert len(tokens) == engine.in_flight
        step(state)

    made.step = watched
    answers = run(engine)
    assert set(sizes) == {1, 2, 3}
    assert order == sorted(order)
    assert sorted(answers) == numbers


def test_places_are_given_to_others(toys: SimpleNamespace) -> None:
    """No more rows in any cache than may be in flight, nothing in an idle engine, no copy of rows that stay."""
    rng, made = random.Random(2), decoder(toys, "thresholded")
    engine = Engine(made, max_in_flight=4, max_cache_tokens=None)
    for _ in range(25):
        engine.submit(request(rng, sampling=GREEDY, max_new_tokens=rng.randint(4, 12)))
    places = set()
    while engine.busy:
        engine.step()
        if engine._state is not None and engine._state.rows:
            caches = (engine._state.cache, engine._state.parts["drafter"])
            assert all(layer.shape[0] <= 4 for cache in caches for layer in cache.layers)
            places |= {layer.keys.data_ptr() for layer in engine._state.cache.layers}
    assert len(places) == len(made.target.model.get_decoder().layers)
    assert engine._state is not None
    assert (engine._state.rows, list(engine._state.cache.layers)) == ([], [])
    assert (engine.in_flight, engine.waiting) == (0, 0)
    before = len(engine.finished())
    engine.step()  # nothing to do
    assert (before, engine.finished()) == (25, [])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"ids": []}, "prompt 0 is empty"),
    "long": ({"ids": [1] * 120, "max_new_tokens": 9}, "a prompt of 120 tokens and max_new_tokens=9 exceed the context"),
    "cache": ({"ids": [1] * 70, "max_new_tokens": 31}, "exceed max_cache_tokens=100"),
    "none": ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    "half": ({"max_new_tokens": 2.5}, r"max_new_tokens must be whole numbers, not \[2.5\]"),
    "nan": ({"max_new_tokens": math.nan}, "max_new_tokens must be whole numbers"),
    "token": ({"ids": [1, VOCAB]}, r"prompt 0 has token ids 1 to 9, but those of 'tiny-llama' are 0 to 8"),
    "negative": ({"ids": [-1]}, "prompt 0 has token ids -1 to -1"),
    "text": ({"ids": "hello"}, "ids must be whole numbers, not 'hello'"),
    "no ids": ({"ids": None}, "ids must be whole numbers, not None"),
    "seed": ({"seed": 2**64}, "seed=18446744073709551616 of request 0 must fit in 64 bits"),
    "low seed": ({"seed": -(2**63) - 1}, "must fit in 64 bits"),
    "no seed": ({"seed": None}, "seed must be whole numbers"),
    "stops": ({"stop_ids": None}, "stop_ids must be whole numbers"),
    "sampling": ({"sampling": {"temperature": math.nan}}, "sampling must be a Sampling"),
    "should_stop": ({"should_stop": "stop"}, "should_stop must be a function"),
    "positions": ({"ids": [1], "positions": [0, 1], "max_new_tokens": 1}, "names the positions of its tokens"),
    "odd positions": ({"positions": ["a"]}, "positions must be whole numbers"),
}


def test_bad_requests_get_an_error_and_others_notice_nothing(toys: SimpleNamespace) -> None:
    rng, made = random.Random(3), decoder(toys, "thresholded")
    engine = Engine(made, max_in_flight=4, max_cache_tokens=100)
    good: dict[int, Request] = {}
    bad: dict[int, str] = {}
    for name, (changes, _) in BAD.items():
        one = request(rng)
        good[engine.submit(one)] = one
        bad[engine.submit(request(rng, **changes))] = name
        engine.step()
    answers = run(engine)
    assert answers.keys() == good.keys() | bad.keys()
    for number, name in bad.items():
        answer = answers[number]
        assert (answer.reason, answer.generation) == ("error", Generation())
        assert pytest.RaisesExc(UserError, match=BAD[name][1]).matches(UserError(answer.error)), answer.error
        assert "\n" not in answer.error
    for number, one in good.items():
        assert seen(answers[number].generation) == seen(decode(made, [one])[0])


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, 1e-9])
def test_absurd_temperatures_make_no_request(bad: float) -> None:
    with pytest.raises(UserError, match="temperature"):
        Sampling(temperature=bad, top_p=1.0)


def test_a_stop_that_fails_ends_its_own_request(toys: SimpleNamespace) -> None:
    """It raises, or gives lengths that cannot be: an error, what was decoded until then, and nothing else."""

    def fails(tokens: Any, known: int) -> int | None:
        raise ValueError("two\nlines") if len(tokens) > 3 else None

    def absurd(value: Any) -> Any:
        return lambda tokens, known: value if known == 2 else None

    rng, made = random.Random(4), decoder(toys, "autoregressive")
    engine = Engine(made, max_in_flight=3, max_cache_tokens=None)
    stops = [lambda tokens, known: 1 / 0, *(absurd(value) for value in (0, 2, 99, 2.5, "x"))]
    broken = {engine.submit(request(rng, should_stop=stop, max_new_tokens=9, stop_ids=())): None for stop in stops}
    silent = engine.submit(request(rng, should_stop=absurd(None), max_new_tokens=9, stop_ids=()))
    fine = request(rng, max_new_tokens=18)
    number, answers = engine.submit(fine), run(engine)
    for one in broken:
        answer = answers[one]
        assert answer.reason == "error"
        assert answer.error.startswith("should_stop ")
        assert len(answer.generation.tokens) == (1 if "ZeroDivisionError" in answer.error else 3)
    assert len(answers[silent].generation.tokens) == 9
    assert seen(answers[number].generation) == seen(decode(made, [fine])[0])


def test_a_should_stop_that_fails_on_drafts_ends_its_request_at_once(toys: SimpleNamespace) -> None:
    """Whether it is asked about drafts or about what was accepted of them."""
    calls: list[int] = []

    def fails_once(tokens: Any, known: int) -> None:
        calls.append(known)
        if len(calls) == 2:
            raise ValueError("no text")

    one = request(random.Random(0), max_new_tokens=18, stop_ids=(), should_stop=fails_once)
    engine = Engine(decoder(toys, "thresholded"), max_in_flight=1, max_cache_tokens=None)
    number = engine.submit(one)
    answer = run(engine)[number]
    assert answer.error == "should_stop failed: ValueError: no text"
    assert len(answer.generation.tokens) == 2


def test_cancelling(toys: SimpleNamespace) -> None:
    rng, made = random.Random(5), decoder(toys, "thresholded")
    engine = Engine(made, max_in_flight=2, max_cache_tokens=None)
    long = {"max_new_tokens": 18, "stop_ids": (), "should_stop": None}
    asked = [request(rng, **long) for _ in range(4)]
    first, second, third, fourth = (engine.submit(one) for one in asked)
    engine.step()
    assert engine.cancel(first)  # in flight
    assert engine.cancel(third)  # waiting
    assert not engine.cancel(third)
    assert not engine.cancel(first)
    assert not engine.cancel(99)
    early = {answer.number: answer for answer in engine.finished()}
    assert {number: answer.reason for number, answer in early.items()} == {first: "cancelled", third: "cancelled"}
    assert early[third].generation == Generation()
    assert 0 < len(early[first].generation.tokens) < 18
    assert early[first].generation.tokens == decode(made, asked[:1])[0].tokens[: len(early[first].generation.tokens)]
    engine.step()
    assert {ticket.number for ticket in engine._running} == {second, fourth}
    answers = run(engine)
    for number in (second, fourth):
        assert seen(answers[number].generation) == seen(decode(made, [asked[number]])[0])
        assert not engine.cancel(number)
    alone = engine.submit(asked[0])
    engine.step()
    engine.cancel(alone)
    assert [answer.number for answer in engine.finished()] == [alone]
    assert not engine.busy


def test_a_request_may_cancel_others_in_the_middle_of_a_pass(toys: SimpleNamespace) -> None:
    rng, made = random.Random(6), decoder(toys, "autoregressive")
    engine = Engine(made, max_in_flight=3, max_cache_tokens=None)
    plain = {"max_new_tokens": 12, "stop_ids": ()}

    def cancels(tokens: Any, known: int) -> None:
        if len(tokens) == 4:
            assert engine.cancel(0)
            assert engine.cancel(1)  # itself

    asked = [request(rng, should_stop=stop, **plain) for stop in (None, cancels, None)]
    for one in asked:
        engine.submit(one)
    answers = run(engine)
    assert [answers[number].reason for number in range(3)] == ["cancelled", "cancelled", "length"]
    assert [len(answers[number].generation.tokens) for number in range(3)] == [4, 4, 12]
    assert seen(answers[2].generation) == seen(decode(made, [asked[2]])[0])


def test_a_request_may_cancel_itself_at_its_first_token(toys: SimpleNamespace) -> None:
    made = decoder(toys, "autoregressive")
    engine = Engine(made, max_in_flight=2, max_cache_tokens=None)

    def cancels(tokens: Any, known: int) -> None:
        assert engine.cancel(0) == (known == 0)

    one, other = (request(random.Random(k), max_new_tokens=5, stop_ids=(), should_stop=None) for k in range(2))
    for asked in (replace(one, should_stop=cancels), other):
        engine.submit(asked)
    answers = run(engine)
    assert (answers[0].reason, answers[0].error, len(answers[0].generation.tokens)) == ("cancelled", None, 1)
    assert seen(answers[1].generation) == seen(decode(made, [other])[0])


def test_a_pass_that_fails_loses_no_request(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were about to join wait again, in their order."""
    made, rng = decoder(toys, "autoregressive"), random.Random(2)
    engine, asked = Engine(made, max_in_flight=3, max_cache_tokens=None), [request(rng) for _ in range(5)]
    for one in asked:
        engine.submit(one)

    def full(requests: Any) -> State:
        raise MemoryError

    monkeypatch.setattr(made, "start", full)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.undo()
    assert engine.in_flight == 0
    assert [ticket.number for ticket in engine._waiting] == [0, 1, 2, 3, 4]
    answers = run(engine)
    assert [seen(answers[k].generation) for k in range(5)] == [seen(g) for g in decode(made, asked)]


def test_refusals(toys: SimpleNamespace) -> None:
    made = decoder(toys, "autoregressive")
    for rows, tokens in ((0, None), (-1, None), (1, 0)):
        with pytest.raises(UserError, match=f"max_in_flight={rows} and max_cache_tokens={tokens}"):
            Engine(made, max_in_flight=rows, max_cache_tokens=tokens)
