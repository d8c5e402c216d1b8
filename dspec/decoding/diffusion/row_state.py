"""What diffusion decoding keeps of each row between passes, and where the branches of a row are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dspec.decoding.diffusion.block_state import AnswerState, Guess
from dspec.models.cache import PositionCache


@dataclass
class RowState:
    """What is held of one row: the answer so far, and the tokens tried ahead of it, one (slot, token) per branch."""

    answer: AnswerState
    generator: torch.Generator
    lookahead_tokens: list[tuple[int, int]] = field(default_factory=list)
    # of a model with shifted logits: hidden state [D] at the position before the next window
    hidden_before_window: Tensor | None = None
    cached_for_block: int | None = None  # the block whose surroundings are in the cache (prefix and dual)
    pass_of_slot: dict[int, int] = field(default_factory=dict)  # the pass that filled each slot

    @property
    def branches(self) -> int:
        """Branch 0, the answer so far, and one for each token tried ahead."""
        return 1 + len(self.lookahead_tokens)

    def fills(self, branch: int) -> dict[int, int]:
        """The tokens that a branch adds to branch 0."""
        return dict(self.lookahead_tokens[branch - 1 : branch]) if branch else {}

    def slots_to_guess(self, branch: int) -> list[int]:
        """The slots that a branch guesses, and is scored over."""
        return [slot for slot in self.answer.open if slot not in self.fills(branch)]


@dataclass(frozen=True)
class BranchResult:
    """A row's most confident branch, and its guesses for its `slots_to_guess`, in order."""

    score: float
    branch: int
    guesses: Sequence[Guess]

    @property
    def key(self) -> tuple[float, int]:
        """Orders results, the best first; of equals, the one with the lowest number."""
        return -self.score, self.branch


class BranchExecutor(Protocol):
    """Which branches are computed in this process, and what is exchanged with others."""

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def local_branches(self, branches: int) -> Sequence[int]:
        """The branches of a row that are computed here."""
        ...

    def select_best(self, results: Sequence[BranchResult | None], slots: int) -> list[BranchResult]:
        """The best result of each row over all processes; None: no branch of it was computed here. At most `slots`
        guesses are in a result."""
        ...

    def sync_winners(self, winners: Mapping[int, int], row_states: Sequence[RowState], cache: PositionCache) -> None:
        """Spreads what rows cache in this pass: `winners` has the winning branch of each row that caches anything. It
        is in the final slots where that branch was computed."""
        ...


class SingleProcess:
    """All branches in one process."""

    size = 1

    def local_branches(self, branches: int) -> Sequence[int]:
        return range(branches)

    def select_best(self, results: Sequence[BranchResult | None], slots: int) -> list[BranchResult]:
        return [result for result in results if result is not None]

    def sync_winners(self, winners: Mapping[int, int], row_states: Sequence[RowState], cache: PositionCache) -> None:
        pass
