"""Many requests with random arrivals, cancellations, absurd parameters and stop strings: each is answered once, with
its own tokens, and nothing is left of them."""

import gc
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Request
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import GREEDY, Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.state import Row, State
from dspec.decoding.stopping import StopStrings
from dspec.decoding.verification import ConfidenceThreshold
from dspec.models.cache import _CHUNK
from dspec.serving.engine import Answer, Engine
from dspec.serving.policies import ScheduledVerification
from dspec.serving.schedulers import Synchronous, asynchronous
from dspec.serving.step_table import AdditiveSteps

ROWS, VOCAB = 12, 9
ABSURD = (
    {"ids": []},
    {"ids": [1] * 128},
    {"ids": [VOCAB]},
    {"ids": ["a"]},
    {"max_new_tokens": 0},
    {"max_new_tokens": 10**9},
    {"max_new_tokens": 1.5},
    {"seed": 2**70},
    {"stop_ids": [None]},
    {"sampling": None},
    {"should_stop": 7},
    {"should_stop": lambda tokens, known: 1 / 0},
    {"should_stop": lambda tokens, known: -1},
)


def requests(rng: random.Random, count: int) -> list[Request]:
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, "t0"))
    )
    stops = [StopStrings(words, ["t2", "t5 t5", "never"]), StopStrings(words, ["t6 t1", "t7"]), None]
    samplings = (GREEDY, Sampling(temperature=0.9, top_p=0.9), Sampling(temperature=1.5, top_p=1.0))
    return [
        Request(
            ids=[rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 20))],
            sampling=rng.choice(samplings),
            max_new_tokens=rng.randint(1, 24),
            stop_ids=rng.choice([(), (3,)]),
            seed=rng.randrange(1000),
            should_stop=rng.choice(stops),
        )
        for _ in range(count)
    ]


def counted() -> int:
    """Tensors, rows, states and generations that are alive."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor | Row | State | Generation) for thing in gc.get_objects())


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_soak(toys: SimpleNamespace, count: int) -> None:
    rng = random.Random(count)
    target = toys.target("qwen3", seed=3, vocab=VOCAB, layers=2, scale=0.35)
    draft = toys.draft(target, seed=1, head="vanilla", confidence=True, taps=(0,), layers=1, scale=0.4)
    policy = ConfidenceThreshold(0.5, calibration=None)
    decoder = Speculative(target=target, proposer=DraftProposer(draft), policy=policy)
    known = requests(rng, 40)
    alone = [(g.tokens, g.stopped) for g in (decode(decoder, [one])[0] for one in known)]
    assert 10 < sum(stopped for _, stopped in alone) < 35
    before, engine = counted(), Engine(decoder, max_in_flight=ROWS, max_cache_tokens=ROWS * 40)
    soak(rng, engine, count, known, alone)
    assert counted() <= before + 2  # an idle engine keeps a state without rows, with an empty buffer of uniforms


@pytest.mark.parametrize("name", ["synchronous", "asynchronous"])
def test_soak_of_a_scheduler(toys: SimpleNamespace, name: str) -> None:
    """Greedy requests only: sampled tokens depend on what is verified, which depends on company. Drafting pays for few
    requests and not for many, so that rounds without drafts come between others."""
    rng = random.Random(3)
    target = toys.target("qwen3", seed=3, vocab=VOCAB, layers=2, scale=0.35)
    draft = toys.draft(target, seed=1, head="vanilla", confidence=True, taps=(0,), layers=1, scale=0.4)
    steps = AdditiveSteps(
        bias_seconds=1.0, requests=(1, 12), alpha_seconds=(0.0, 0.9), tokens=(1, 99), theta_seconds=(0.0, 9.8)
    )
    make = {"synchronous": Synchronous, "asynchronous": asynchronous}[name]
    policy = ScheduledVerification(make(steps, min_yield=0.05, horizon=8, probe_every=2), calibration=None)
    decoder = Speculative(target=target, proposer=DraftProposer(draft), policy=policy)
    known = [replace(one, sampling=GREEDY) for one in requests(rng, 25)]
    plain = Autoregressive(target=target)
    alone = [(g.tokens, g.stopped) for g in (decode(plain, [one])[0] for one in known)]
    decode(decoder, known[:1])  # the drafter's rotary tables stay
    before, engine = counted(), Engine(decoder, max_in_flight=ROWS, max_cache_tokens=ROWS * 40)
    rounds: Counter[bool] = Counter()
    step = decoder.step
    decoder.step = lambda state: rounds.update([bool(any(state.parts["pending"]))]) or step(state)  # type: ignore
    soak(rng, engine, 120, known, alone)
    assert min(rounds[True], rounds[False]) > 9
    assert counted() <= before + 2


def soak(rng: random.Random, engine: Engine, count: int, known: list[Request], alone: list[tuple]) -> None:
    """Puts `count` requests to the engine, some of them `known`, which give what they give `alone`."""
    asked: dict[int, int | None] = {}  # answer number -> which of `known`, None: absurd
    cancelled: set[int] = set()
    reasons: dict[str, int] = {}

    def check(answer: Answer) -> None:
        which = asked.pop(answer.number)  # fails for a second answer
        reasons[answer.reason] = reasons.get(answer.reason, 0) + 1
        if which is None:
            assert (answer.reason, bool(answer.error)) == ("error", True)
            return
        tokens, stopped = alone[which]
        if answer.reason == "cancelled":
            assert answer.number in cancelled
            assert answer.generation.tokens == tokens[: len(answer.generation.tokens)]
        else:
            assert (answer.generation.tokens, answer.generation.stopped) == (tokens, stopped)
            assert answer.reason == ("stop" if stopped else "length")

    submitted = 0
    while submitted < count or engine.busy:
        for _ in range(min(count - submitted, rng.choice([0, 0, 1, 3, 30]))):
            which = rng.randrange(len(known)) if rng.random() < 0.85 else None
            absurd = {} if which is not None else rng.choice(ABSURD)
            one = known[rng.randrange(len(known)) if which is None else which]
            asked[engine.submit(Request(**(vars(one) | absurd)))] = which
            submitted += 1
        sane = [number for number, which in asked.items() if which is not None and number not in cancelled]
        if sane and rng.random() < 0.2 and engine.cancel(number := rng.choice(sane)):
            cancelled.add(number)
        engine.step()
        for answer in engine.finished():
            check(answer)
        assert engine.in_flight <= ROWS
        if engine.in_flight and (state := engine._state) is not None:
            layers = (*state.cache.layers, *state.parts["drafter"].layers)
            assert all(rows <= ROWS and slots <= _CHUNK for rows, slots in (layer.shape for layer in layers))
    assert not asked
    assert sum(reasons.values()) == count
    assert reasons.keys() == {"stop", "length", "cancelled", "error"}
    assert engine.finished() == []
