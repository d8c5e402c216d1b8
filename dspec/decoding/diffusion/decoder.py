"""Decoding of diffusion LMs: one decoder; the published methods are settings of it.

Every pass guesses a token for each open slot of the answer; block_state.py says which guesses are kept and which slots
come next. `diffusion` keeps a fixed number of the most confident ones per pass; with one it is the baseline of the
others, which are lossy relative to it. `fast_dllm` keeps all that are probable enough (Fast-dLLM), `d2f` does so in
several blocks at a time (D2F), `lopa` tries further guesses in branches (LoPA, lookahead.py).

Under block-causal attention the keys and values of filled blocks are final and cached exactly. Under full attention
every cached key and value is approximate: it was computed before later slots were filled.
`committed` caches filled blocks as they are when filled (D2F and LoPA with full window attention), `prefix` all before
the block being decoded and `dual` all but that block, as they are when the block is begun (Fast-dLLM).

Departures: at a temperature a slot's token is drawn with one uniform per slot and pass, the same in all branches, and
its confidence is the probability under temperature and top_p of the token drawn (LoPA's code samples once for the
score and again for the token). Without a `committed` cache, full attention sees all slots of the answer, also those of
blocks not appended yet, as diffusion LMs are trained. More in block_state.py and lookahead.py.

Sources: D2F (arXiv 2508.09192), Fast-dLLM (arXiv 2505.22618), LoPA (github.com/zhijie-group/LoPA).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dspec.decoding.diffusion.block_state import AnswerState, Block, BlockRules, Phase
from dspec.decoding.diffusion.forward import ATTENTIONS, MAX_CONFIDENCE, RowInputs, compute, guess
from dspec.decoding.diffusion.lookahead import Lookahead
from dspec.decoding.diffusion.row_state import BranchExecutor, BranchResult, RowState
from dspec.decoding.generation import Generation, Pass, Request
from dspec.decoding.loop import check_requests
from dspec.decoding.sampling import Sampling, Streams
from dspec.decoding.state import PerRow, Row, State
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.language_model import LanguageModel
from dspec.models.training_record import BLOCK_CAUSAL, FULL, TrainingRecord
from dspec.spans import span

NONE: Final = "none"
COMMITTED: Final = "committed"
PREFIX: Final = "prefix"
DUAL: Final = "dual"
BLOCK_CACHES: Final = (PREFIX, DUAL)
ROW_STATES: Final = "row_states"  # the part of the state that holds each row's RowState


class PassPositions(NamedTuple):
    """Which positions of its text a row computes in a pass."""

    start: int  # the first cache slot
    shared: Sequence[int]
    window: Sequence[int]  # of each branch


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """`attention` full | block_causal, `cache` none | committed | prefix | dual (see above), `confidence_measure` of
    guesses: probability | entropy (negative)."""

    rules: BlockRules
    attention: str
    cache: str
    lookahead: Lookahead
    confidence_measure: str

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UserError(f"attention={self.attention} is unknown; use one of {', '.join(ATTENTIONS)}")
        if self.cache not in (NONE, COMMITTED, *BLOCK_CACHES):
            raise UserError(f"cache={self.cache} is unknown; use one of none, committed, prefix, dual")
        if self.confidence_measure not in MAX_CONFIDENCE:
            raise UserError(
                f"confidence_measure={self.confidence_measure} is unknown; use one of {', '.join(MAX_CONFIDENCE)}"
            )
        if self.cache in BLOCK_CACHES and (
            self.attention != FULL or self.rules.append_ratio != 1 or self.lookahead.branches
        ):
            raise UserError(
                f"cache={self.cache} is for full attention and one block after the other: use none or committed"
            )

    @property
    def one_token_per_pass(self) -> bool:
        """Whether this is the baseline: one token per pass, and only exact caching."""
        exact = self.cache == NONE or self.attention == BLOCK_CAUSAL
        rules = self.rules
        return (
            exact
            and not self.lookahead.branches
            and (rules.append_ratio, rules.threshold, rules.min_fills) == (1, 1, 1)
        )

    @property
    def sees_whole_answer(self) -> bool:
        """Whether a pass sees all slots of the answer, as diffusion LMs are trained to, or those of appended blocks."""
        return self.attention == FULL and self.cache != COMMITTED

    def settings(self) -> dict[str, Any]:
        names = ("attention", "cache", "confidence_measure")
        return asdict(self.rules) | asdict(self.lookahead) | {name: getattr(self, name) for name in names}


def not_as_trained(config: DiffusionConfig, trained: TrainingRecord) -> list[str]:
    """What differs between the mask that a model was trained under, as far as it is recorded, and that of a decoder."""
    differences = []
    if trained.attention not in (None, config.attention):
        differences.append(f"{config.attention} attention, trained under {trained.attention}")
    blocks = config.rules.block_size
    if config.attention == BLOCK_CAUSAL and trained.block_size not in (None, blocks):
        named = "one block" if blocks is None else f"blocks of {blocks}"
        differences.append(f"{named}, trained with blocks of {trained.block_size}")
    return differences


class BlockDiffusion:
    """Decoding of any batch; its rows may be in any phase."""

    def __init__(self, *, target: LanguageModel, config: DiffusionConfig, executor: BranchExecutor) -> None:
        """Raises UserError for a model without a mask token."""
        target.required_mask_token()
        self.target, self.config, self.executor = target, config, executor
        self.trained = TrainingRecord.read(target)
        self.lossless = config.one_token_per_pass

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        trained = {
            "trained_attention": self.trained.attention,
            "trained_block_size": self.trained.block_size,
            "logit_shift": self.trained.shift,
            "not_as_trained": not_as_trained(self.config, self.trained),
        }
        return sampling.to_dict() | self.config.settings() | trained | {"processes": self.executor.size}

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
            streams=Streams([r.seed for r in requests], self.target.device),  # unused, see RowState.generator
            parts={ROW_STATES: PerRow(self._row_state(request) for request in requests)},
        )
        self.step(state)
        return state

    def _row_state(self, request: Request) -> RowState:
        answer = AnswerState.begin(
            rules=self.config.rules,
            prompt=len(request.ids),
            limit=request.max_new_tokens,
            stop_ids=request.stop_ids,
        )
        return RowState(answer, torch.Generator().manual_seed(request.seed))

    @torch.inference_mode()
    def step(self, state: State) -> None:
        row_states: PerRow[RowState] = state.parts[ROW_STATES]
        running = [b for b, row in enumerate(state.rows) if not row.done]
        # 1. one pass over the branches of all rows that are computed here
        inputs = [
            RowInputs() if row.done else self._row_inputs(row, row_state)
            for row, row_state in zip(state.rows, row_states, strict=True)
        ]
        cache = state.cache if self.config.cache != NONE else None
        hidden = compute(self.target, inputs, cache=cache)

        # 2. each row's most confident branch
        slots = max((len(row_states[b].answer.open) for b in running), default=0)
        results = self._local_results(state, running, inputs, hidden)
        best = dict(zip(running, self.executor.select_best(results, slots), strict=True))

        # 3. its keys and values stay, its guesses are filled in
        with span("bookkeeping"):
            self._commit(state, best, inputs, hidden)
            for b, row in enumerate(state.rows):
                if b in best:
                    self._fill(row, row_states[b], best[b], inputs[b], width=hidden.shape[1])
                else:
                    row.generation.idle_positions += hidden.shape[1]

    def _row_inputs(self, row: Row, row_state: RowState) -> RowInputs:
        """What a row computes in the next pass."""
        state, prompt, config = row_state.answer, len(row.request.ids), self.config
        end = prompt + (state.limit if config.sees_whole_answer else state.blocks[-1].end)
        if config.cache in BLOCK_CACHES:
            start, shared, window = _positions_around_block(row_state, end, cache=config.cache)
        else:
            start, shared, window = _positions_after_cache(state, end, config)
        branches = self.executor.local_branches(row_state.branches)
        return RowInputs(
            start=start,
            shared=shared,
            window=window,
            branches=branches,
            texts=[self._text(row, row_state, branch) for branch in (0, *branches)],
            prompt=prompt,
            block_size=(config.rules.block_size or state.limit) if config.attention == BLOCK_CAUSAL else None,
        )

    def _text(self, row: Row, row_state: RowState, branch: int) -> list[int]:
        """The prompt and all slots of a branch's answer, empty ones as the mask token."""
        fills, empty = row_state.fills(branch), self.target.required_mask_token()
        slots = (fills.get(slot, token) for slot, token in enumerate(row_state.answer.tokens))
        return [*row.request.ids, *(empty if token is None else token for token in slots)]

    def _local_results(
        self, state: State, running: Iterable[int], inputs: Sequence[RowInputs], hidden_BLD: Tensor
    ) -> list[BranchResult | None]:
        """The best branch computed here of each running row."""
        row_states: PerRow[RowState] = state.parts[ROW_STATES]
        wanted = [(b, j, slot) for b in running for j in inputs[b].branches for slot in row_states[b].slots_to_guess(j)]
        uniforms = {b: self._uniforms(state.rows[b], row_states[b]) for b in running}
        made = iter(
            guess(
                self.target,
                [self._read(row_states[b], inputs[b], hidden_BLD[b], j, slot) for b, j, slot in wanted],
                state.samplings,
                [b for b, _, _ in wanted],
                [uniforms[b][slot] for b, _, slot in wanted],
                confidence_measure=self.config.confidence_measure,
            )
        )
        results: list[BranchResult | None] = []
        for b in running:
            candidates = []
            for branch in inputs[b].branches:
                guesses = [next(made) for _ in row_states[b].slots_to_guess(branch)]
                score = self.config.lookahead.score(
                    [g.confidence for g in guesses], max_confidence=MAX_CONFIDENCE[self.config.confidence_measure]
                )
                candidates.append(BranchResult(score, branch, guesses))
            results.append(min(candidates, key=lambda result: result.key, default=None))
        return results

    def _read(self, row_state: RowState, row_inputs: RowInputs, hidden_LD: Tensor, branch: int, slot: int) -> Tensor:
        """The hidden state [D] that guesses a slot."""
        index = row_inputs.index(row_state.answer.prompt + slot - self.trained.shift, branch)
        if index is not None:
            return hidden_LD[index]
        if row_state.hidden_before_window is None:
            raise ValueError("the position before the window was not computed in an earlier pass")
        return row_state.hidden_before_window

    def _uniforms(self, row: Row, row_state: RowState) -> list[float]:
        """One for each slot in every pass, the same in all branches, whatever is open."""
        if row.request.sampling.greedy:
            return [0.0] * row_state.answer.limit
        return torch.rand(row_state.answer.limit, generator=row_state.generator, dtype=torch.float64).tolist()

    def _commit(
        self, state: State, best: Mapping[int, BranchResult], inputs: Sequence[RowInputs], hidden_BLD: Tensor
    ) -> None:
        """Keys and values of the winning branches, and the hidden state right before the next window."""
        if self.config.cache == NONE:
            return
        row_states: PerRow[RowState] = state.parts[ROW_STATES]
        moved: list[tuple[int, int, int]] = []
        for b, result in best.items():
            row_inputs, row_state, answer = inputs[b], row_states[b], row_states[b].answer
            committed = self.config.cache == COMMITTED
            window_start = answer.settled if committed else answer.prompt + _first_active_block(answer).first
            if not committed:
                row_state.cached_for_block = _first_active_block(answer).first
            if self.trained.shift and (index := row_inputs.index(window_start - 1, result.branch)) is not None:
                row_state.hidden_before_window = hidden_BLD[b, index].clone()
            if committed and result.branch in row_inputs.branches:
                for position in range(row_inputs.window[0], answer.settled):
                    source = row_inputs.index(position, result.branch)
                    if source is not None and (slot := row_inputs.start + source) != position:
                        moved.append((b, slot, position))
        if moved:
            state.cache.move(*zip(*moved, strict=True))
        if self.config.cache == COMMITTED and self.config.attention == FULL:
            winners = {
                b: won.branch for b, won in best.items() if row_states[b].answer.settled > row_states[b].answer.cached
            }
            self.executor.sync_winners(winners, row_states, state.cache)

    def _fill(self, row: Row, row_state: RowState, result: BranchResult, row_inputs: RowInputs, *, width: int) -> None:
        """Fills a row's slots with its best branch's guesses, and commits what its answer now begins with."""
        answer, ahead = row_state.answer, row_state.fills(result.branch)
        guesses = dict(zip(row_state.slots_to_guess(result.branch), result.guesses, strict=True))
        winner = answer.filled(ahead)
        chosen = winner.choose(guesses)
        row_state.pass_of_slot |= dict.fromkeys(ahead | chosen, len(row.generation.passes))
        branches = row_state.branches
        row_state.answer = after = winner.advance(chosen, cached=answer.settled)
        row_state.lookahead_tokens = self.config.lookahead.candidates(after, guesses)
        fresh = after.filled_prefix[len(row.generation.tokens) :]
        committed = row.commit(fresh) if fresh else 0
        row.generation.passes.append(
            Pass("decode", committed, positions=width, branches=branches, filled=len(ahead | chosen))
        )
        if row.done:
            row.generation.passes = _split_filled_and_beyond(row.generation, row_state.pass_of_slot)


def _positions_after_cache(state: AnswerState, end: int, config: DiffusionConfig) -> PassPositions:
    """`none`: all positions, from 0 on. `committed`: those after the cached ones. Under block-causal attention the
    settled ones see no slot that differs between branches: they are shared. Under full attention none is."""
    start = state.cached if config.cache == COMMITTED else 0
    window_start = state.settled if config.attention == BLOCK_CAUSAL else start
    return PassPositions(start, range(start, window_start), range(window_start, end))


def _positions_around_block(row_state: RowState, end: int, *, cache: str) -> PassPositions:
    """`prefix`: the block and all after it; `dual`: the block alone. Its first pass also computes and caches what is
    around it, which stands first so that later passes begin after it."""
    block, prompt = _first_active_block(row_state.answer), row_state.answer.prompt
    first, last = prompt + block.first, end if cache == PREFIX else prompt + block.end
    window, around = range(first, last), [*range(first), *range(last, end)]
    if row_state.cached_for_block != block.first:
        return PassPositions(0, (), [*around, *window])
    return PassPositions(len(around), (), window)


def _first_active_block(state: AnswerState) -> Block:
    """The first block that is not filled."""
    return next(block for block in state.blocks if state.phase(block) is Phase.ACTIVE)


def _split_filled_and_beyond(generation: Generation, pass_of_slot: Mapping[int, int]) -> list[Pass]:
    """The passes of a complete answer, with the slots that each filled up to its end, and after it."""
    passes = []
    for number, one in enumerate(generation.passes):
        useful = sum(pass_of_slot.get(slot) == number for slot in range(len(generation.tokens)))
        passes.append(replace(one, filled=useful, beyond=one.filled - useful))
    return passes
