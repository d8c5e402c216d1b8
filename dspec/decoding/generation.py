"""What goes into a decoder and what comes out: requests, and generations as traces of forward passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dspec.decoding.sampling import Sampling
from dspec.errors import UserError

# (tokens, known) -> length of the shortest prefix of `tokens`, longer than `known`, that ends the answer, or None
ShouldStop = Callable[[Sequence[int], int], int | None]
Kind = Literal["prefill", "decode", "draft", "auxiliary", "verify"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, how its answer is sampled, and where the answer ends: at a stop token, where `should_stop` says so,
    or after `max_new_tokens`. The output depends on the request alone, not on the rest of its batch: exactly in
    float64, up to rounding in other types."""

    ids: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: Sequence[int]
    seed: int
    should_stop: ShouldStop | None = None
    positions: Sequence[int] | None = None  # of each id, then of each token to generate; None: from left to right

    def end(self, tokens: Sequence[int], known: int) -> int | None:
        """Length of the shortest prefix of the answer `tokens`, longer than `known`, that ends it, or None."""
        stop = next((i + 1 for i in range(known, len(tokens)) if tokens[i] in self.stop_ids), None)
        text = None if self.should_stop is None else self.should_stop(tokens if stop is None else tokens[:stop], known)
        return stop if text is None else text


def make_requests(prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], **common: Any) -> list[Request]:
    """One request per prompt with its own seed, all else in `common`. Raises UserError if the number of seeds is not
    that of the prompts."""
    if len(seeds) != len(prompts):
        raise UserError(f"{len(seeds)} seeds for {len(prompts)} prompts: give each prompt its own")
    return [Request(ids=ids, seed=seed, **common) for ids, seed in zip(prompts, seeds, strict=True)]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass from the view of one request."""

    kind: Kind  # "draft": of the drafter; "auxiliary": a look-up, of no model; all others: of the target
    committed: int = 0  # tokens added to the answer
    positions: int = 0  # computed for this request, including its branches and the padding of its batch
    branches: int = 1  # continuations verified in parallel
    drafted: int = 0  # draft tokens sent to verification
    accepted: int = 0  # leading draft tokens accepted, cut at the stop and the length limit
    valid: int = 0  # leading slots that count: not past a drafted stop token or the length limit
    filled: int = 0  # slots of the answer that it filled, in any order (diffusion LMs)
    beyond: int = 0  # slots that it filled after the answer's end
    # of the drafted slots, when recorded:
    confidence: tuple[float, ...] = ()  # confidence logits
    top: tuple[float, ...] = ()  # log-probability of the drafter's likeliest token, under the distribution drafted from
    entropy: tuple[float, ...] = ()  # of that distribution, in nats

    def to_row(self) -> list[Any]:
        """Compact and JSON-ready: all fields but those of single slots, trailing defaults dropped."""
        values = [getattr(self, name) for name in _PASS_FIELDS]
        while len(values) > 1 and values[-1] == _PASS_DEFAULTS[len(values) - 1]:
            values.pop()
        return values


_OF_SLOTS = ("confidence", "top", "entropy")
_PASS_FIELDS = [f.name for f in fields(Pass) if f.name not in _OF_SLOTS]
_PASS_DEFAULTS = [f.default for f in fields(Pass) if f.name not in _OF_SLOTS]


@dataclass
class Generation:
    """The output of one request: its tokens, up to and including the first stop token, and the passes that made them.
    All counts are properties of that trace."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    passes: list[Pass] = field(default_factory=list)
    idle_positions: int = 0  # computed in the request's row of the batch after it had finished

    def _of(self, *kinds: Kind) -> list[Pass]:
        return [p for p in self.passes if p.kind in kinds]

    @property
    def _steps(self) -> list[Pass]:
        """All passes of the target but the prefill."""
        return [p for p in self.passes if p.kind not in ("prefill", "draft", "auxiliary")]

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
        """Forward passes of the target, prefill excluded."""
        return len(self._steps)

    @property
    def draft_forwards(self) -> int:
        """Forward passes of the drafter over a block."""
        return len(self._of("draft"))

    @property
    def auxiliary_forwards(self) -> int:
        """Look-ups of drafts that no model computes, such as those from bigrams."""
        return len(self._of("auxiliary"))

    @property
    def nfe(self) -> int:
        """Forward passes of the target, prefill included."""
        return self.prefill_forwards + self.forwards

    @property
    def slots_filled(self) -> int:
        """Tokens that passes filled in, those after the answer's end included: what papers on diffusion LMs count."""
        return sum(p.filled + p.beyond for p in self.passes) or len(self.tokens)

    @property
    def branch_forwards(self) -> int:
        """Branches over all passes after the prefill: a pass with k + 1 branches counts k + 1 here, 1 in `forwards`."""
        return sum(p.branches for p in self._steps)

    @property
    def positions_computed(self) -> int:
        """Positions that the target computed after the prefill, padding and idle ones included."""
        return self.idle_positions + sum(p.positions for p in self._steps)
