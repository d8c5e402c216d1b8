"""Requests in flight: their text, caches and random streams, which join and leave the batch together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from dspec.decoding.generation import Generation, Kind, Pass, Request
from dspec.decoding.sampling import SamplingBatch, Streams
from dspec.models.cache import PositionCache

T = TypeVar("T")


@dataclass(eq=False)
class Row:
    """A request in flight. `text` is the prompt and the tokens committed since, in order of generation.

    From left to right its last token is the anchor, whose keys and values are not in the cache yet. For any-subset
    decoding order of generation is not order in the text; a diffusion LM commits the filled tokens before the first
    gap."""

    request: Request
    text: list[int]
    generation: Generation

    @property
    def done(self) -> bool:
        return self.generation.stopped or len(self.generation.tokens) >= self.request.max_new_tokens

    def commit(self, tokens: Sequence[int]) -> int:
        """Appends tokens up to and including the first stop, within the length limit; returns how many."""
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
        slots: Mapping[str, tuple[float, ...]] | None = None,
        **cost: int,
    ) -> None:
        """Commits a round's accepted drafts and the bonus token, if any, and records the pass.

        Slots past the first drafted stop (accepted or not: validity must not depend on the outcome) or past the
        length limit do not count. `slots` holds what is recorded of each (Pass.confidence, ...), `cost` the pass's
        `positions` and `branches`.
        """
        known = len(self.generation.tokens)
        answer = [*self.generation.tokens, *drafts[: self.request.max_new_tokens - known]]
        valid = (self.request.end(answer, known) or len(answer)) - known
        bonus = [] if bonus_token is None else [bonus_token]
        committed = self.commit([*drafts[:accepted], *bonus])
        counts = {"drafted": len(drafts), "accepted": min(accepted, valid), "valid": valid}
        numbers: dict[str, Any] = {**counts, **cost, **(slots or {})}
        self.generation.passes.append(Pass(kind, committed, **numbers))


class StatePart(Protocol):
    """What a decoder holds for each row in flight: caches, random streams, drafts."""

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, in that order."""
        ...

    def join(self, other: Any) -> None:
        """Appends the rows of another StatePart of the same type."""
        ...


class PerRow(list[T], Generic[T]):
    """A list with one object per row."""

    def select(self, rows: Sequence[int]) -> None:
        self[:] = [self[i] for i in rows]

    def join(self, other: "PerRow[T]") -> None:
        self += other


class NoMemory:
    """The StatePart of what remembers nothing."""

    def select(self, rows: Sequence[int]) -> None:
        pass

    def join(self, other: "NoMemory") -> None:
        pass


@dataclass
class State:
    """The requests in flight and everything held for them: row b of every part belongs to rows[b]."""

    rows: list[Row]
    cache: PositionCache  # the target's: all of a row's text but its anchor; a diffusion LM's: what it keeps of blocks
    streams: Streams
    parts: dict[str, Any] = field(default_factory=dict)  # the decoder's own StateParts, by name
    lasting: tuple[str, ...] = ()  # names of parts that remember requests which have left, too

    @property
    def samplings(self) -> SamplingBatch:
        return SamplingBatch([row.request.sampling for row in self.rows])

    @property
    def starts(self) -> list[int]:
        """The position where each row's next pass begins: its anchor's."""
        return [len(row.text) - 1 for row in self.rows]

    def _parts(self) -> Iterable[StatePart]:
        return self.cache, self.streams, *self.parts.values()

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, in that order."""
        self.rows = [self.rows[i] for i in rows]
        for part in self._parts():
            part.select(rows)

    def join(self, other: "State") -> None:
        """Takes over another state's requests; the other must not be used afterwards. Raises ValueError for a state
        of another decoder, or itself."""
        if other is self or other.parts.keys() != self.parts.keys():
            raise ValueError("a state can only join another state of the same decoder")
        if not self.rows:
            for name in self.lasting:
                self.parts[name].join(other.parts[name])
            self.cache, self.streams = other.cache, other.streams
            self.parts = other.parts | {name: self.parts[name] for name in self.lasting}
        else:
            for part, more in zip(self._parts(), other._parts(), strict=True):
                part.join(more)
        self.rows = self.rows + other.rows

    def drop(self, leaving: Sequence[Row]) -> None:
        """Drops these rows. The last of those that stay take their places, so that no other row is copied."""
        staying = [i for i, row in enumerate(self.rows) if all(row is not other for other in leaving)]
        if (count := len(staying)) == len(self.rows):
            return
        if not staying:
            self._release()
            return
        kept, last = {i for i in staying if i < count}, [i for i in staying if i >= count]
        self.select([i if i in kept else last.pop() for i in range(count)])

    def _release(self) -> None:
        """Drops all rows with everything that is held for them."""
        self.rows, self.cache, self.streams = [], PositionCache(0), Streams([], torch.device("cpu"))
        for name in self.lasting:
            self.parts[name].select([])
        self.parts = {name: part if name in self.lasting else NoMemory() for name, part in self.parts.items()}

    def drop_finished(self) -> None:
        self.drop([row for row in self.rows if row.done])
