"""What goes into a decoder and what comes out: requests, and generations as traces of forward passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dspec.decoding.sampling import Sampling
from dspec.errors import UserError

# stop strings: the length of the shortest beginning of these tokens, longer than so many, that ends the answer
ShouldStop = Callable[[Sequence[int], int], int | None]
Kind = Literal["prefill", "decode", "draft", "verify"]


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
    positions: Sequence[int] | None = None  # of `ids`, then of the tokens to generate; None: 0, 1, ...

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
