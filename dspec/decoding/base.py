"""What all decoders share: requests in, a trace of passes out, the state in between, and the one loop.

A decoder is a stepper: `start` runs the prompts' forward pass, each `step` one forward pass of the big model for all
requests in flight. Between steps requests may join and leave; `decode` is the only loop.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from dspec.decoding.sampling import Sampling, SamplingBatch, Streams, draw
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.language_model import LanguageModel
from dspec.spans import span

# stop strings: the length of the shortest beginning of these tokens, longer than so many, that ends the answer
ShouldStop = Callable[[Sequence[int], int], int | None]
Kind = Literal["prefill", "decode", "draft", "verify"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, how its answer is drawn, and where it ends: at a stop token, where `should_stop` says so, or after
    `max_new_tokens`. What comes out depends on the request alone, whatever is decoded beside it: exactly in float64, up
    to rounding in other types."""

    ids: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: Sequence[int]
    seed: int
    should_stop: ShouldStop | None = None

    def end(self, tokens: Sequence[int], known: int) -> int | None:
        """Length of the shortest beginning of the answer `tokens`, longer than `known`, that ends it."""
        stop = next((i + 1 for i in range(known, len(tokens)) if tokens[i] in self.stop_ids), None)
        text = None if self.should_stop is None else self.should_stop(tokens if stop is None else tokens[:stop], known)
        return stop if text is None else text


def requests(prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], **common: Any) -> list[Request]:
    """A request for each prompt, with a seed of its own and all else in `common`. Raises UserError for another number
    of seeds than of prompts."""
    if len(seeds) != len(prompts):
        raise UserError(f"{len(seeds)} seeds for {len(prompts)} prompts: give each prompt its own")
    return [Request(ids=ids, seed=seed, **common) for ids, seed in zip(prompts, seeds, strict=True)]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, as one request saw it."""

    kind: Kind  # draft: of the drafter; all others are passes of the big model
    committed: int = 0  # tokens that it added to the answer
    positions: int = 0  # computed for this request: with its branches, and with the padding that its batch brought
    branches: int = 1  # continuations that it looked at side by side
    drafted: int = 0  # draft tokens sent to verification
    accepted: int = 0  # leading draft tokens accepted, cut at the stop and the length limit
    valid: int = 0  # leading slots that count: not behind a drafted stop token or the length limit
    confidence: tuple[float, ...] = ()  # confidence logits of the drafted slots, when recorded

    def to_row(self) -> list[Any]:
        """JSON-ready and short: the fields' values but confidence, without those at the end that are the default."""
        values = [getattr(self, name) for name in _PASS_FIELDS]
        while len(values) > 1 and values[-1] == _PASS_DEFAULTS[len(values) - 1]:
            values.pop()
        return values


_PASS_FIELDS = [f.name for f in fields(Pass) if f.name != "confidence"]
_PASS_DEFAULTS = [f.default for f in fields(Pass) if f.name != "confidence"]


@dataclass
class Generation:
    """What one request gave: its tokens, up to and including the first stop token, and the passes that made them.
    All counts are properties of that trace; their meaning is design.md's."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    passes: list[Pass] = field(default_factory=list)
    idle_positions: int = 0  # computed in its row of the batch after its end

    def _of(self, *kinds: Kind) -> list[Pass]:
        return [p for p in self.passes if p.kind in kinds]

    @property
    def _steps(self) -> list[Pass]:
        """Passes of the big model that are not prefill, of whatever kind."""
        return [p for p in self.passes if p.kind not in ("prefill", "draft")]

    @property
    def rounds(self) -> list[Pass]:
        """Draft-verify rounds."""
        return self._of("verify")

    @property
    def prefill_tokens(self) -> int:
        """Tokens that the prefill emitted."""
        return sum(p.committed for p in self._of("prefill"))

    @property
    def prefill_forwards(self) -> int:
        return len(self._of("prefill"))

    @property
    def forwards(self) -> int:
        """Forward passes of the big model that are not prefill."""
        return len(self._steps)

    @property
    def draft_forwards(self) -> int:
        """Forward passes of the drafter over a block."""
        return len(self._of("draft"))

    @property
    def nfe(self) -> int:
        """Forward passes of the big model, prefill counted."""
        return self.prefill_forwards + self.forwards

    @property
    def branch_forwards(self) -> int:
        """Branches of the passes after the prefill: a pass over k + 1 branches is one forward and k + 1 of these."""
        return sum(p.branches for p in self._steps)

    @property
    def positions_computed(self) -> int:
        """Positions of the big model's passes after the prefill, padding and idle ones included."""
        return self.idle_positions + sum(p.positions for p in self._steps)


@dataclass(eq=False)
class Row:
    """A request in flight. `text` is the prompt and the tokens committed since; its last one is the anchor, whose keys
    and values are not in the cache yet."""

    request: Request
    text: list[int]
    generation: Generation

    @property
    def done(self) -> bool:
        return self.generation.stopped or len(self.generation.tokens) >= self.request.max_new_tokens

    def commit(self, tokens: Sequence[int]) -> int:
        """Appends tokens up to and including the first stop, within the length limit; how many they were."""
        answer, known = self.generation.tokens, len(self.generation.tokens)
        answer += tokens[: self.request.max_new_tokens - known]
        if (end := self.request.end(answer, known)) is not None:
            del answer[end:]
            self.generation.stopped = True
        self.text += answer[known:]
        return len(answer) - known

    def commit_round(
        self, drafts: Sequence[int], accepted: int, bonus_token: int, *, confidence: tuple[float, ...] = (), **cost: int
    ) -> None:
        """Commits a round's accepted drafts and the token behind them, and records what its slots showed.

        Slots behind the first drafted stop (accepted or not: validity must not hang on the outcome) or behind the
        length limit do not count. `cost` are the pass's `positions` and `branches`.
        """
        known = len(self.generation.tokens)
        answer = [*self.generation.tokens, *drafts[: self.request.max_new_tokens - known]]
        valid = (self.request.end(answer, known) or len(answer)) - known
        committed = self.commit([*drafts[:accepted], bonus_token])
        counts = {"drafted": len(drafts), "accepted": min(accepted, valid), "valid": valid}
        self.generation.passes.append(Pass("verify", committed, confidence=confidence, **counts, **cost))


class RowState(Protocol):
    """What a decoder keeps for each row in flight: caches, random streams, drafts."""

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, in that order."""
        ...

    def join(self, other: Any) -> None:
        """Takes the rows of another one of its kind behind its own."""
        ...


class PerRow(list[T], Generic[T]):
    """One object a row."""

    def select(self, rows: Sequence[int]) -> None:
        self[:] = [self[i] for i in rows]

    def join(self, other: "PerRow[T]") -> None:
        self += other


@dataclass
class State:
    """The requests in flight, and what belongs to each: row b of every part is rows[b]'s."""

    rows: list[Row]
    cache: PositionCache  # the big model's; holds all of a row's text but its anchor
    streams: Streams
    parts: dict[str, Any] = field(default_factory=dict)  # RowStates of the decoder's own

    @property
    def samplings(self) -> SamplingBatch:
        return SamplingBatch([row.request.sampling for row in self.rows])

    @property
    def starts(self) -> list[int]:
        """Where each row's next pass begins: at its anchor."""
        return [len(row.text) - 1 for row in self.rows]

    def _parts(self) -> Iterable[RowState]:
        return self.cache, self.streams, *self.parts.values()

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, in that order."""
        self.rows = [self.rows[i] for i in rows]
        for part in self._parts():
            part.select(rows)

    def join(self, other: "State") -> None:
        """Takes another state's requests in flight, which then decodes no more. Raises ValueError for a state of
        another decoder, or itself."""
        if other is self or other.parts.keys() != self.parts.keys():
            raise ValueError("a state is joined by another one of the same decoder")
        for part, more in zip(self._parts(), other._parts(), strict=True):
            part.join(more)
        self.rows = self.rows + other.rows

    def drop_finished(self, *, at_once: bool = False) -> None:
        """Lets finished rows go once they are at least half of all (or `at_once`, where others wait for their place),
        since that copies the caches; till then they ride along and their positions are counted as idle."""
        left = [i for i, row in enumerate(self.rows) if not row.done]
        if not left:
            self.rows = []
        elif len(left) <= len(self.rows) // 2 or (at_once and len(left) < len(self.rows)):
            self.select(left)


class Decoder(Protocol):
    """Decodes any batch of requests, each as if it were alone."""

    lossless: bool  # its output follows the distribution of plain AR of the same model (greedy: its tokens)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises UserError for a request that cannot be decoded, by its number."""
        ...

    def start(self, requests: Sequence[Request]) -> Any:
        """The State after the prompts' forward pass, which commits each request's first token; checks them first."""
        ...

    def step(self, state: Any) -> None:
        """One forward pass of the big model for all rows; rows that are done ride along."""
        ...

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """What stands in the results beside the decoder's name, for requests with this sampling."""
        ...


@torch.inference_mode()
def decode(
    decoder: Decoder,
    requests: Sequence[Request],
    *,
    in_flight: int | None = None,
    observe: Callable[[State], None] | None = None,
) -> list[Generation]:
    """The generations of `requests`, in their order. At most `in_flight` are decoded at a time (None: all), others
    join as rows become free. `observe` sees the state before each step.

    Raises UserError for no requests, one that the decoder cannot take (before any is decoded), or in_flight < 1.
    """
    if not requests:
        raise UserError("no prompts to decode: give at least one")
    room = len(requests) if in_flight is None else in_flight
    if room < 1:
        raise UserError(f"in_flight={in_flight}: at least one request must be decoded at a time")
    if room < len(requests):
        decoder.check(requests)  # those that wait, too, before any is decoded
    state: State = decoder.start(requests[:room])
    generations, waiting = [row.generation for row in state.rows], list(requests[room:])
    while True:
        state.drop_finished(at_once=bool(waiting))
        if waiting and (free := room - len(state.rows)) > 0:
            joined: State = decoder.start(waiting[:free])
            del waiting[:free]
            generations += [row.generation for row in joined.rows]
            if state.rows:
                state.join(joined)
            else:
                state = joined
            continue
        if not state.rows:
            return generations
        if observe is not None:
            observe(state)
        decoder.step(state)


def check_requests(model: LanguageModel, requests: Sequence[Request]) -> None:
    """Raises UserError for an empty prompt, one that does not fit the context, or max_new_tokens < 1."""
    for i, request in enumerate(requests):
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={request.max_new_tokens}: at least one token must be asked for")
        if not request.ids:
            raise UserError(f"prompt {i} is empty: every prompt needs at least one token")
        model.check_length(len(request.ids), request.max_new_tokens)


def prefill(
    model: LanguageModel, requests: Sequence[Request], *, taps: Sequence[int] = ()
) -> tuple[State, torch.Tensor]:
    """One pass over right-padded prompts that commits each row's first token; the state, and the features [B, L, F]."""
    lengths = torch.tensor([len(r.ids) for r in requests])
    ids = torch.zeros(len(requests), int(lengths.max()), dtype=torch.long)
    for row, request in zip(ids, requests, strict=True):
        row[: len(request.ids)] = torch.tensor(request.ids)
    state = State(
        rows=[Row(request, list(request.ids), Generation()) for request in requests],
        cache=model.new_cache(),
        streams=Streams([r.seed for r in requests], model.device),
    )
    with span("prefill"):
        output = model(ids.to(model.device), cache=state.cache, taps=taps)
        last = output.hidden_BLD[torch.arange(len(requests)), lengths - 1]
        first = next_tokens(model.logits(last), state)
    for row, token in zip(state.rows, first, strict=True):
        row.generation.passes.append(Pass("prefill", row.commit([token]), positions=ids.shape[1]))
    return state, output.features_BLF


def next_tokens(logits_BV: torch.Tensor, state: State) -> list[int]:
    """Each row's next token, drawn as its request says."""
    samplings = state.samplings
    if samplings.greedy:
        return logits_BV.argmax(-1).tolist()
    return draw(samplings.probs(logits_BV), state.streams.take(1)[:, 0]).tolist()
