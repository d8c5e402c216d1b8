"""One engine under a closed loop: as many requests in flight as it has seats, always.

A lane is paused and resumed, so that many of them take turns; its clock only runs while it does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self

import torch

from dspec.decoding.generation import Generation, Request
from dspec.decoding.loop import Decoder
from dspec.errors import UserError
from dspec.serving.engine import Engine
from eval.serving.prompts import ServedPrompt

WALL, CPU = "wall", "cpu"
Clock = Callable[[], float]


def clock(kind: str, device: torch.device) -> Clock:
    """Seconds; `wall` waits for the device, `cpu` is the time that the CPU spent on this process: on a machine that
    others use it says more, but it is no time that a user waits."""
    if kind == CPU:
        return time.process_time
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


@dataclass(frozen=True)
class Counts:
    """Sums over a part of a lane's life."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0  # of answers, up to their stops
    request_steps: int = 0  # rounds of requests
    verified: int = 0  # drafts
    accepted: int = 0
    finished: int = 0  # answers

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds

    @staticmethod
    def of(generation: Generation) -> "Counts":
        """Of one answer; an answer in flight has its tokens so far."""
        rounds = [p for p in generation.passes if p.kind in ("verify", "decode")]
        return Counts(
            tokens=len(generation.tokens),
            request_steps=len(rounds),
            verified=sum(p.drafted for p in rounds),
            accepted=sum(p.accepted for p in rounds),
        )


@dataclass
class Lane:
    """`seats` requests of `prompts`, round and round with new seeds, through a decoder."""

    decoder: Decoder
    prompts: Sequence[ServedPrompt]
    seats: int
    now: Clock
    answers: dict[int, list[int]] = field(default_factory=dict)  # tokens by number of the request
    rates: list[tuple[int, float]] = field(default_factory=list)  # of finished ones: number, tokens per second

    def __post_init__(self) -> None:
        self.engine = Engine(self.decoder, max_in_flight=self.seats, max_cache_tokens=None)
        self._requests = requests(self.prompts)
        self._admitted: dict[int, float] = {}
        self._done = Counts()  # of finished answers; seconds and steps of all
        for _ in range(self.seats):
            self._submit()

    def _submit(self) -> None:
        self._admitted[self.engine.submit(next(self._requests))] = self._done.seconds

    @property
    def counts(self) -> Counts:
        """Since the start."""
        return sum((Counts.of(generation) for generation in self.engine.running), self._done)

    def step(self) -> float:
        """One step of the engine, and new requests for those that it finished; its seconds. Raises UserError for a
        prompt that cannot be decoded."""
        start = self.now()
        self.engine.step()
        seconds = self.now() - start
        self._done += Counts(seconds=seconds, steps=1)
        for answer in self.engine.finished():
            if answer.error is not None:
                raise UserError(f"request {answer.number} cannot be served: {answer.error}")
            self.answers[answer.number] = answer.generation.tokens
            spent = self._done.seconds - self._admitted.pop(answer.number)
            self.rates.append((answer.number, len(answer.generation.tokens) / spent))
            self._done += replace(Counts.of(answer.generation), finished=1)
            self._submit()
        return seconds

    def warm_up(self, finished: int) -> Self:
        """Until so many answers are finished: by then requests in flight are at all stages of their answers."""
        while self._done.finished < finished:
            self.step()
        return self

    def advance(self, tokens: int) -> Counts:
        """Until so many more tokens are emitted; what was counted meanwhile."""
        before = self.counts
        least = before.tokens + tokens
        while self.counts.tokens < least:
            self.step()
        return self.counts - before


def requests(prompts: Sequence[ServedPrompt]) -> Iterator[Request]:
    """The prompts again and again, each time with other seeds, without end."""
    for turn in count():
        for prompt in prompts:
            seed = (prompt.request.seed + turn) % 2**63
            yield replace(prompt.request, seed=seed)
