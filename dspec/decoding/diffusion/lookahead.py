"""LoPA's lookahead branches as pure functions: which tokens are tried ahead of time, and how a branch is scored.

Branch 0 is the answer after the last round. Each of `branches` lookahead branches is that answer with one more of the
round's guesses filled in, one that was not confident enough: those of highest confidence, one each. The next pass
computes all branches; the one that is most confident about what it has left wins, and its guesses are the round's.

A lookahead token is not verified: it is kept if its branch wins.

Departures: a branch's score is over the open slots of branch 0, not counting the slot of the token tried ahead. A stop
token tried ahead closes no slots until its branch wins; otherwise short answers would score too high. Of equal branches
the one with the lowest number wins (in the authors' code the first lookahead branch). One confidence orders guesses and
scores branches, while `threshold` always tests the probability, as in the authors' code. Both segment scores are our
reading of one sentence of the paper.

Source: "LoPA: Scaling dLLM Inference via Lookahead Parallel Decoding" (github.com/zhijie-group/LoPA), algorithm 1 and
equation 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dspec.decoding.diffusion.block_state import AnswerState, Guess, by_confidence
from dspec.errors import UserError

BRANCH_SCORES = ("mean", "sliding_window", "lowest_segment")


@dataclass(frozen=True, kw_only=True)
class Lookahead:
    """`branches` k next to branch 0 (0: none). `branch_score` of a branch: the mean confidence of its open slots; or,
    of the means over every `segment` successive open slots, their mean (sliding_window) or the lowest
    (lowest_segment)."""

    branches: int
    branch_score: str
    segment: int

    def __post_init__(self) -> None:
        if self.branches < 0:
            raise UserError(f"branches={self.branches} must be at least 0 (0: D2F)")
        if self.branch_score not in BRANCH_SCORES:
            raise UserError(f"branch_score={self.branch_score} is unknown; use one of {', '.join(BRANCH_SCORES)}")
        if self.segment < 1:
            raise UserError(f"segment={self.segment} must be at least 1 slot")

    def candidates(self, answer: AnswerState, guesses: Mapping[int, Guess]) -> list[tuple[int, int]]:
        """(slot, token) of each branch, the most confident first; `guesses` are those of the round that led here."""
        slots = [slot for slot in answer.open if slot in guesses]
        return [(slot, guesses[slot].token) for slot in by_confidence(slots, guesses)[: self.branches]]

    def score(self, confidences: Sequence[float], *, max_confidence: float) -> float:
        """The score of a branch with these `confidences` in its open slots; `max_confidence` if it has none."""
        if not confidences:
            return max_confidence
        size = len(confidences) if self.branch_score == "mean" else min(self.segment, len(confidences))
        sums = list(accumulate(confidences, initial=0.0))
        means = [(sums[at + size] - sums[at]) / size for at in range(len(confidences) - size + 1)]
        return min(means) if self.branch_score == "lowest_segment" else sum(means) / len(means)
