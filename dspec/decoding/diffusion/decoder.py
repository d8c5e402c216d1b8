"""Decoding of diffusion LMs: one stepper for all of its ways, which differ in a handful of settings.

Every pass guesses a token for each open slot of the answer; block_state.py says which guesses are kept and which slots
come next. `diffusion` keeps a fixed number of the most confident ones a pass; with one it is the baseline of the
others, which are lossy relative to it. `confidence_threshold` keeps all that are probable enough (Fast-dLLM), `d2f`
does so in several blocks at a time (D2F), `lopa` tries further guesses in branches (LoPA, lookahead.py).

Under block-causal attention the keys and values of filled blocks are final and cached exactly. Under full attention
all that is cached is approximate, since cached slots would have seen what has been filled after them:
`committed` caches filled blocks as they are when filled (D2F and LoPA with full window attention), `prefix` all before
the block being decoded and `dual` all but that block, as they are when the block is begun (Fast-dLLM).

Sources: D2F (arXiv 2508.09192), Fast-dLLM (arXiv 2505.22618), LoPA.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from dspec.decoding.diffusion.block_state import Block, BlockRules, BlockState, Phase
from dspec.decoding.diffusion.forward import (
    ATTENTIONS,
    BLOCK_CAUSAL,
    CERTAIN,
    FULL,
    Layout,
    Trained,
    compute,
    guess,
    mask_token,
)
from dspec.decoding.diffusion.lookahead import Lookahead
from dspec.decoding.diffusion.row_state import Flight, Packet, Placement
from dspec.decoding.generation import Generation, Pass, Request
from dspec.decoding.loop import check_requests
from dspec.decoding.sampling import Sampling, Streams
from dspec.decoding.state import PerRow, Row, State
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.language_model import LanguageModel
from dspec.spans import span

NONE: Final = "none"
COMMITTED: Final = "committed"
OF_A_BLOCK: Final = ("prefix", "dual")
FLIGHTS: Final = "flights"  # the part of the state that holds each row's Flight


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """`attention` full | block_causal, `cache` none | committed | prefix | dual (see above), `ranking` of guesses and
    branches by probability | entropy."""

    rules: BlockRules
    attention: str
    cache: str
    lookahead: Lookahead
    ranking: str

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UserError(f"attention={self.attention} is unknown; use one of {', '.join(ATTENTIONS)}")
        if self.cache not in (NONE, COMMITTED, *OF_A_BLOCK):
            raise UserError(f"cache={self.cache} is unknown; use one of none, committed, prefix, dual")
        if self.ranking not in CERTAIN:
            raise UserError(f"ranking={self.ranking} is unknown; use one of {', '.join(CERTAIN)}")
        if self.cache in OF_A_BLOCK and (self.attention != FULL or self.rules.append != 1 or self.lookahead.branches):
            raise UserError(
                f"cache={self.cache} is for full attention and one block after the other: use none or committed"
            )

    @property
    def one_by_one(self) -> bool:
        """Whether this is the baseline: one token a pass, nothing cached that is not exact."""
        exact = self.cache == NONE or self.attention == BLOCK_CAUSAL
        rules = self.rules
        return exact and not self.lookahead.branches and (rules.append, rules.threshold, rules.at_least) == (1, 1, 1)

    @property
    def sees_all(self) -> bool:
        """Whether a pass sees all slots of the answer, as diffusion LMs are trained to, or those of appended blocks."""
        return self.attention == FULL and self.cache != COMMITTED

    def settings(self) -> dict[str, Any]:
        own = {key: value for key, value in asdict(self).items() if key not in ("rules", "lookahead")}
        return asdict(self.rules) | asdict(self.lookahead) | own


class BlockDiffusion:
    """Decoding of any batch; its rows may be in any phase."""

    def __init__(self, *, target: LanguageModel, config: DiffusionConfig, placement: Placement) -> None:
        """Raises UserError for a model without a mask token."""
        mask_token(target)
        self.target, self.config, self.placement = target, config, placement
        self.trained = Trained.of(target)
        self.lossless = config.one_by_one

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        trained = {"trained_attention": self.trained.attention, "trained_block_size": self.trained.block_size}
        return sampling.to_dict() | self.config.settings() | trained

    def check(self, requests: Sequence[Request]) -> None:
        check_requests(self.target, requests)
        for i, request in enumerate(requests):
            self.config.rules.check(request.max_new_tokens)
            if self.target.mask_token_id in request.ids:
                raise UserError(f"prompt {i} contains the mask token: only the answer's empty slots may hold it")

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> State:
        self.check(requests)
        state = State(
            rows=[Row(request, list(request.ids), Generation()) for request in requests],
            cache=PositionCache(0) if self.config.cache == NONE else self.target.new_cache(),
            streams=Streams([r.seed for r in requests], self.target.device),
            parts={FLIGHTS: PerRow(self._flight(request) for request in requests)},
        )
        self.step(state)
        return state

    def _flight(self, request: Request) -> Flight:
        anchor = BlockState.begin(
            rules=self.config.rules,
            prompt=len(request.ids),
            limit=request.max_new_tokens,
            stop_ids=request.stop_ids,
        )
        return Flight(anchor, torch.Generator().manual_seed(request.seed))

    @torch.inference_mode()
    def step(self, state: State) -> None:
        flights: PerRow[Flight] = state.parts[FLIGHTS]
        running = [b for b, row in enumerate(state.rows) if not row.done]
        # 1. one pass over the branches of all rows that are computed here
        layouts = [
            Layout() if row.done else self._layout(row, flight) for row, flight in zip(state.rows, flights, strict=True)
        ]
        cache = state.cache if self.config.cache != NONE else None
        hidden = compute(self.target, layouts, cache=cache)

        # 2. each row's most confident branch
        slots = max((len(flights[b].anchor.open) for b in running), default=0)
        packets = self._packets(state, running, layouts, hidden)
        best = dict(zip(running, self.placement.best(packets, slots), strict=True))

        # 3. its keys and values stay, its guesses are filled in
        with span("bookkeeping"):
            self._commit(state, best, layouts, hidden)
            for b, row in enumerate(state.rows):
                if b in best:
                    self._fill(row, flights[b], best[b], layouts[b], width=hidden.shape[1])
                else:
                    row.generation.idle_positions += hidden.shape[1]

    def _layout(self, row: Row, flight: Flight) -> Layout:
        """What a row computes in the next pass."""
        state, prompt, config = flight.anchor, len(row.request.ids), self.config
        end = prompt + (state.limit if config.sees_all else state.blocks[-1].end)
        shared: Sequence[int] = ()
        window: Sequence[int]
        if config.cache in OF_A_BLOCK:
            block = _begun(state)
            first, last = prompt + block.first, end if config.cache == "prefix" else prompt + block.end
            window, around = range(first, last), [*range(first), *range(last, end)]
            start = len(around)
            if flight.frozen_at != block.first:
                start, window = 0, [*around, *window]
        else:
            start = state.cached if config.cache == COMMITTED else 0
            inner = state.settled if config.attention == BLOCK_CAUSAL else start
            shared, window = range(start, inner), range(inner, end)
        branches = self.placement.mine(flight.branches)
        return Layout(
            start=start,
            shared=shared,
            window=window,
            branches=branches,
            texts=[self._text(row, flight, branch) for branch in (0, *branches)],
            prompt=prompt,
            block_size=(config.rules.block_size or state.limit) if config.attention == BLOCK_CAUSAL else None,
        )

    def _text(self, row: Row, flight: Flight, branch: int) -> list[int]:
        """The prompt and all slots of a branch's answer, empty ones as the mask token."""
        fills, empty = flight.fills(branch), mask_token(self.target)
        slots = (fills.get(slot, token) for slot, token in enumerate(flight.anchor.tokens))
        return [*row.request.ids, *(empty if token is None else token for token in slots)]

    def _packets(
        self, state: State, running: Iterable[int], layouts: Sequence[Layout], hidden_BLD: Tensor
    ) -> list[Packet | None]:
        """The best branch computed here of each running row."""
        flights: PerRow[Flight] = state.parts[FLIGHTS]
        asked = [(b, j, slot) for b in running for j in layouts[b].branches for slot in flights[b].asked(j)]
        uniforms = {b: self._uniforms(state.rows[b], flights[b]) for b in running}
        made = iter(
            guess(
                self.target,
                [self._read(flights[b], layouts[b], hidden_BLD[b], j, slot) for b, j, slot in asked],
                state.samplings,
                [b for b, _, _ in asked],
                [uniforms[b][slot] for b, _, slot in asked],
                ranking=self.config.ranking,
            )
        )
        packets: list[Packet | None] = []
        for b in running:
            of_row = []
            for branch in layouts[b].branches:
                guesses = [next(made) for _ in flights[b].asked(branch)]
                score = self.config.lookahead.score([g.rank for g in guesses], certain=CERTAIN[self.config.ranking])
                of_row.append(Packet(score, branch, guesses))
            packets.append(min(of_row, key=lambda packet: packet.key, default=None))
        return packets

    def _read(self, flight: Flight, layout: Layout, hidden_LD: Tensor, branch: int, slot: int) -> Tensor:
        """The hidden state [D] that guesses a slot."""
        index = layout.index(flight.anchor.prompt + slot - self.trained.shift, branch)
        if index is not None:
            return hidden_LD[index]
        if flight.last is None:
            raise ValueError("the place before the window was not computed in an earlier pass")
        return flight.last

    def _uniforms(self, row: Row, flight: Flight) -> list[float]:
        """One for each slot in every pass, the same in all branches, whatever is open."""
        if row.request.sampling.greedy:
            return [0.0] * flight.anchor.limit
        return torch.rand(flight.anchor.limit, generator=flight.uniforms, dtype=torch.float64).tolist()

    def _commit(self, state: State, best: Mapping[int, Packet], layouts: Sequence[Layout], hidden_BLD: Tensor) -> None:
        """Keys and values of the winning branches, and the hidden state behind which the next window begins."""
        if self.config.cache == NONE:
            return
        flights: PerRow[Flight] = state.parts[FLIGHTS]
        moved: list[tuple[int, int, int]] = []
        for b, packet in best.items():
            layout, flight = layouts[b], flights[b]
            committed = self.config.cache == COMMITTED
            if not committed:
                flight.frozen_at = _begun(flight.anchor).first
            before = (flight.anchor.settled if committed else flight.anchor.prompt + _begun(flight.anchor).first) - 1
            if self.trained.shift and (index := layout.index(before, packet.branch)) is not None:
                flight.last = hidden_BLD[b, index].clone()
            if committed and packet.branch in layout.branches:
                for place in range(layout.window[0], flight.anchor.settled):
                    source = layout.index(place, packet.branch)
                    if source is not None and (slot := layout.start + source) != place:
                        moved.append((b, slot, place))
        if moved:
            state.cache.move(*zip(*moved, strict=True))
        if self.config.cache == COMMITTED and self.config.attention == FULL:
            winners = {b: p.branch for b, p in best.items() if flights[b].anchor.settled > flights[b].anchor.cached}
            self.placement.commit(winners, flights, state.cache)

    def _fill(self, row: Row, flight: Flight, packet: Packet, layout: Layout, *, width: int) -> None:
        """Fills a row's slots with its best branch's guesses, and commits what its answer now begins with."""
        anchor, ahead = flight.anchor, flight.fills(packet.branch)
        guesses = dict(zip(flight.asked(packet.branch), packet.guesses, strict=True))
        winner = anchor.filled(ahead)
        chosen = winner.choose(guesses)
        flight.filled_in |= dict.fromkeys(ahead | chosen, len(row.generation.passes))
        branches = flight.branches
        flight.anchor = after = winner.advance(chosen, cached=anchor.settled)
        flight.tried = self.config.lookahead.candidates(after, guesses)
        fresh = after.answer[len(row.generation.tokens) :]
        committed = row.commit(fresh) if fresh else 0
        row.generation.passes.append(
            Pass("decode", committed, positions=width, branches=branches, filled=len(ahead | chosen))
        )
        if row.done:
            row.generation.passes = _useful(row.generation, flight.filled_in)


def _begun(state: BlockState) -> Block:
    """The first block that is not filled."""
    return next(block for block in state.blocks if state.phase(block) is Phase.ACTIVE)


def _useful(generation: Generation, filled_in: Mapping[int, int]) -> list[Pass]:
    """The passes of a complete answer, with the slots that each filled up to its end, and behind it."""
    passes = []
    for number, one in enumerate(generation.passes):
        useful = sum(filled_in.get(slot) == number for slot in range(len(generation.tokens)))
        passes.append(replace(one, filled=useful, beyond=one.filled - useful))
    return passes
