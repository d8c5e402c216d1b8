"""Continuous batching: requests are submitted and cancelled at any time and share the passes of one decoder.

    engine = Engine(decoder, max_in_flight=8, max_cache_tokens=None)
    number = engine.submit(request)
    while engine.busy:
        engine.step()
        for answer in engine.finished(): ...

Each request has its own sampling, seed, limits and stops. Its tokens do not depend on its company, except where a
verification policy looks at the whole batch: then greedy tokens are still the same, and sampled ones still have the
target's distribution. This module knows no model and no clock. It is for one thread.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

import torch

from dspec.decoding.generation import Generation, Request, ShouldStop
from dspec.decoding.loop import Decoder
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import Row, State
from dspec.errors import UserError

Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Answer:
    """What became of a request; of one that was cancelled or failed, what had been decoded until then."""

    number: int
    generation: Generation
    reason: Reason  # why it ended
    error: str | None = None  # one line


class _GuardedStop:
    """A request's `should_stop`, of which a failure ends this request alone."""

    def __init__(self, should_stop: ShouldStop) -> None:
        self._should_stop = should_stop
        self.error: str | None = None

    def __call__(self, tokens: Sequence[int], known: int) -> int | None:
        if self.error is not None:
            return known + 1
        try:
            end = self._should_stop(tokens, known)
        except Exception as error:
            self.error = f"should_stop failed: {type(error).__name__}: {error}".splitlines()[0]
            return known + 1
        if end is None or (_is_whole(end) and known < end <= len(tokens)):
            return end
        self.error = f"should_stop gave {end!r} for {len(tokens)} tokens of which {known} were known"
        return known + 1


@dataclass(eq=False)
class _Ticket:
    """A request on its way through the engine."""

    number: int
    request: Request
    guard: _GuardedStop | None
    row: Row | None = None  # once it is in flight
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        """That it may hold in the cache."""
        return len(self.request.ids) + self.request.max_new_tokens

    @property
    def done(self) -> bool:
        return self.cancelled or (self.row is not None and self.row.done)

    def answer(self) -> Answer:
        generation = Generation() if self.row is None else self.row.generation
        error = None if self.guard is None else self.guard.error
        if error is not None:
            return Answer(self.number, generation, "error", error)
        if self.cancelled:
            return Answer(self.number, generation, "cancelled")
        return Answer(self.number, generation, "stop" if generation.stopped else "length")


class Engine:
    """Decodes submitted requests first come, first served."""

    def __init__(self, decoder: Decoder, *, max_in_flight: int, max_cache_tokens: int | None) -> None:
        """At most `max_in_flight` requests share a pass. All rows of a cache have as many slots as the longest needs:
        requests wait until rows x (longest prompt + its max_new_tokens) is at most `max_cache_tokens` (None: any)."""
        if max_in_flight < 1 or (max_cache_tokens is not None and max_cache_tokens < 1):
            raise UserError(f"max_in_flight={max_in_flight} and max_cache_tokens={max_cache_tokens} must be at least 1")
        self.decoder, self.max_in_flight, self.max_cache_tokens = decoder, max_in_flight, max_cache_tokens
        self._submitted = 0
        self._waiting: deque[_Ticket] = deque()
        self._running: list[_Ticket] = []
        self._state: State | None = None
        self._answers: list[Answer] = []

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or in flight."""
        return bool(self._waiting or self._running)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> list[Generation]:
        """The answers in flight, as far as they are."""
        return [ticket.row.generation for ticket in self._running if ticket.row is not None]

    def submit(self, request: Request) -> int:
        """Puts a request in the queue; returns the number of its answer. The answer to a request that cannot be
        decoded is an error; no other request notices."""
        number, self._submitted = self._submitted, self._submitted + 1
        try:
            self._check(request)
        except UserError as error:
            self._answers.append(Answer(number, Generation(), "error", str(error)))
            return number
        guard = None if request.should_stop is None else _GuardedStop(request.should_stop)
        self._waiting.append(_Ticket(number, replace(request, should_stop=guard), guard))
        return number

    def cancel(self, number: int) -> bool:
        """Ends a request wherever it is; False if it has ended already. Its row leaves before the next pass."""
        ticket = next((t for t in (*self._running, *self._waiting) if t.number == number and not t.done), None)
        if ticket is None:
            return False
        ticket.cancelled = True
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._answers.append(ticket.answer())
        return True

    def finished(self) -> list[Answer]:
        """The answers since the last call, each exactly once."""
        self._collect()
        answers, self._answers = self._answers, []
        return answers

    @torch.inference_mode()
    def step(self) -> None:
        """Lets waiting requests join as far as there is room, and advances all in flight by one pass."""
        self._collect()
        self._admit()
        if self._state is not None and self._running:
            self.decoder.step(self._state)
            self._collect()

    def _check(self, request: Request) -> None:
        _check_types(request)
        self.decoder.check([request])
        tokens, most = len(request.ids) + request.max_new_tokens, self.max_cache_tokens
        if most is not None and tokens > most:
            raise UserError(
                f"a prompt of {len(request.ids)} tokens and max_new_tokens={request.max_new_tokens} exceed "
                f"max_cache_tokens={most}: shorten the prompt or lower max_new_tokens"
            )

    def _admit(self) -> None:
        joining: list[_Ticket] = []
        while self._waiting and self._fit([*self._running, *joining, self._waiting[0]]):
            joining.append(self._waiting.popleft())
        if not joining:
            return
        self._running += joining
        try:
            joined = self.decoder.start([ticket.request for ticket in joining])
        except BaseException:  # such as too little memory: they wait again
            self._running = self._running[: -len(joining)]
            self._waiting.extendleft(reversed(joining))
            raise
        for ticket, row in zip(joining, joined.rows, strict=True):
            ticket.row = row
        if self._state is None:
            self._state = joined
        else:
            self._state.join(joined)
        self._collect()  # a first token may be the last

    def _fit(self, tickets: Sequence[_Ticket]) -> bool:
        slots = len(tickets) * max(ticket.tokens for ticket in tickets)
        return len(tickets) <= self.max_in_flight and (self.max_cache_tokens is None or slots <= self.max_cache_tokens)

    def _collect(self) -> None:
        """Answers what is done, and gives back its place."""
        done = [ticket for ticket in self._running if ticket.done]
        if not done or self._state is None:
            return
        self._answers += [ticket.answer() for ticket in done]
        self._running = [ticket for ticket in self._running if not ticket.done]
        self._state.drop([ticket.row for ticket in done if ticket.row is not None])  # an idle engine holds no cache


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def _check_types(request: Request) -> None:
    """Raises UserError for values that a decoder would stumble over in the middle of a pass."""
    numbers = {"max_new_tokens": [request.max_new_tokens], "seed": [request.seed]}
    lists = {"ids": request.ids, "stop_ids": request.stop_ids, "positions": request.positions or ()}
    for name, values in (numbers | lists).items():
        if not isinstance(values, Sequence) or not all(_is_whole(value) for value in values):
            raise UserError(f"{name} must be whole numbers, not {values!r:.80}")
    if not isinstance(request.sampling, Sampling):
        raise UserError(f"sampling must be a Sampling, not {request.sampling!r:.80}")
    if request.should_stop is not None and not callable(request.should_stop):
        raise UserError(f"should_stop must be a function, such as StopStrings, not {request.should_stop!r:.80}")
