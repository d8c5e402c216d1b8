"""Requests in flight: their text, caches and random streams, which join and leave together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from dspec.decoding.generation import Generation, Kind, Pass, Request
from dspec.decoding.sampling import SamplingBatch, Streams
from dspec.models.cache import PositionCache

T = TypeVar("T")


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
        self,
        drafts: Sequence[int],
        accepted: int,
        bonus_token: int | None,
        *,
        kind: Kind = "verify",
        confidence: tuple[float, ...] = (),
        **cost: int,
    ) -> None:
        """Commits a round's accepted drafts and the token behind them, if any, and records what its slots showed.

        Slots behind the first drafted stop (accepted or not: validity must not hang on the outcome) or behind the
        length limit do not count. `cost` are the pass's `positions` and `branches`.
        """
        known = len(self.generation.tokens)
        answer = [*self.generation.tokens, *drafts[: self.request.max_new_tokens - known]]
        valid = (self.request.end(answer, known) or len(answer)) - known
        behind = [] if bonus_token is None else [bonus_token]
        committed = self.commit([*drafts[:accepted], *behind])
        counts = {"drafted": len(drafts), "accepted": min(accepted, valid), "valid": valid}
        self.generation.passes.append(Pass(kind, committed, confidence=confidence, **counts, **cost))


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
