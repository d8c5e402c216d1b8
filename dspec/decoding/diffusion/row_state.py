"""What diffusion decoding holds of each row, and what processes that share its branches exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dspec.decoding.diffusion.block_state import BlockState, Guess
from dspec.models.cache import PositionCache


@dataclass
class Flight:
    """What is held of one row: the answer so far, and the tokens tried ahead of it, one (slot, token) per branch."""

    anchor: BlockState
    uniforms: torch.Generator
    tried: list[tuple[int, int]] = field(default_factory=list)
    last: Tensor | None = None  # of a model with shifted logits: hidden state [D] at the place before the next window
    frozen_at: int | None = None  # the block whose surroundings are in the cache (prefix and dual)
    filled_in: dict[int, int] = field(default_factory=dict)  # the pass that filled each slot

    @property
    def branches(self) -> int:
        """The anchor's and those of the tokens tried ahead; branch 0 is the anchor."""
        return 1 + len(self.tried)

    def fills(self, branch: int) -> dict[int, int]:
        """What a branch has beyond the anchor."""
        return dict(self.tried[branch - 1 : branch]) if branch else {}

    def asked(self, branch: int) -> list[int]:
        """The slots that a branch guesses, and is scored over."""
        return [slot for slot in self.anchor.open if slot not in self.fills(branch)]


@dataclass(frozen=True)
class Packet:
    """A row's most confident branch, and its guesses for its `asked` slots, in order."""

    score: float
    branch: int
    guesses: Sequence[Guess]

    @property
    def key(self) -> tuple[float, int]:
        """Orders packets, the best first; of equals, the one nearest to the anchor."""
        return -self.score, self.branch


class Placement(Protocol):
    """Which branches are computed in this process, and what is exchanged with others."""

    def mine(self, branches: int) -> Sequence[int]:
        """The branches of a row that are computed here."""
        ...

    def best(self, packets: Sequence[Packet | None], slots: int) -> list[Packet]:
        """The best packet of each row over all processes; None: no branch of it was computed here. At most `slots`
        guesses are in a packet."""
        ...

    def commit(self, winners: Mapping[int, int], flights: Sequence[Flight], cache: PositionCache) -> None:
        """Spreads what rows cache in this pass: `winners` has the winning branch of each row that caches anything. It
        is in the final slots where that branch was computed."""
        ...


class Alone:
    """All branches in one process."""

    def mine(self, branches: int) -> Sequence[int]:
        return range(branches)

    def best(self, packets: Sequence[Packet | None], slots: int) -> list[Packet]:
        return [packet for packet in packets if packet is not None]

    def commit(self, winners: Mapping[int, int], flights: Sequence[Flight], cache: PositionCache) -> None:
        pass
