"""Token-based rejection sampling of sigma-GPT (arXiv 2404.09562): a decoder that is biased, for comparison.

As printed in arXiv 2504.20456, Algorithm 3: draft all missing tokens at once, each given the text alone; test them in
several random orders in one pass; keep the order that accepts most tokens before its first rejection. The token that
is rejected is not drawn again from the residual, and the order that is kept depends on what was drawn, so the output
does not follow the distribution of sequential decoding (Theorem 2 fails), and a round of two passes may give one token
(Theorem 1 fails). The first token of an order is accepted without a test: both distributions are the same there.

Legend: R = tokens that are missing, O = orders, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspec.decoding.any_subset.queries import RowQuery, check_infilling, query_logits
from dspec.decoding.generation import Generation, Pass, Request
from dspec.decoding.sampling import Sampling, Streams, draw
from dspec.decoding.state import PerRow, Row, State
from dspec.errors import UserError
from dspec.models.target_model import TargetModel
from dspec.spans import span

PROGRESS = "progress"  # the part of the state with each row's RowProgress


class Drafted(NamedTuple):
    """A token for each missing position [R], and the distributions [R, V] that they were drawn from."""

    tokens: Tensor
    probs: Tensor


@dataclass
class RowProgress:
    """Where a row stands: `positions` in the order of generation, the missing ones in any order; `drafts` between its
    two passes. Rows draw different numbers of uniforms, so each has a stream to itself."""

    positions: list[int]
    uniforms: Streams
    drafts: Drafted | None = None


class SigmaGPT:
    """A row's passes alternate: one drafts, one tests. The orders of a row are rows of the testing pass, for which the
    cache is copied; its times are not those of a tuned decoder."""

    lossless = False

    def __init__(self, *, target: TargetModel, num_orders: int) -> None:
        """Raises UserError for a model without a mask token, or without an order."""
        if num_orders < 1:
            raise UserError(f"sigma_gpt tests its drafts in num_orders >= 1 orders, not {num_orders}")
        target.required_mask_token()
        self.target, self.num_orders = target, num_orders

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return sampling.to_dict() | {"num_orders": self.num_orders}

    def check(self, requests: Sequence[Request]) -> None:
        check_infilling(self.target, requests)
        if any(r.positions is None or r.stop_ids or r.should_stop is not None for r in requests):
            raise UserError(
                "sigma_gpt fills holes in random order, so no stop can end its answers: use it on infilling benchmarks"
            )

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> State:
        self.check(requests)
        seeds, device = [r.seed for r in requests], self.target.device
        state = State(
            rows=[Row(request, list(request.ids), Generation()) for request in requests],
            cache=self.target.new_cache(),
            streams=Streams(seeds, device),
            parts={PROGRESS: PerRow(RowProgress(list(r.positions or ()), Streams([r.seed], device)) for r in requests)},
        )
        with span("prefill"):
            self._advance(state, [0] * len(requests))
        return state

    @torch.inference_mode()
    def step(self, state: State) -> None:
        self._advance(state, state.starts)

    def _advance(self, state: State, starts: Sequence[int]) -> None:
        """One pass over the text from `starts` on: draft where a row has no drafts, else test them."""
        # 1. each row's queries: one for its drafts, or one per order that is tested
        queries: list[RowQuery] = []
        orders: list[Tensor] = []  # [O, R] of each row, indices of missing tokens
        first: list[int] = []  # index of each row's first query
        for row, progress, start in zip(state.rows, state.parts[PROGRESS], starts, strict=True):
            orders.append(self._orders(row, progress))
            first.append(len(queries))
            queries += [_row_query(row, progress, order, start) for order in orders[-1].tolist()]
        owner = [b for b, row_orders in enumerate(orders) for _ in row_orders]
        if len(owner) > len(state.rows):
            state.cache.select(owner)
        logits = query_logits(self.target, queries, cache=state.cache)

        # 2. draft, or commit what the best order accepts; its keys and values stay
        width = max(query.width for query in queries)
        kept = []
        for row, progress, row_orders, at in zip(state.rows, state.parts[PROGRESS], orders, first, strict=True):
            kept.append(at)
            missing = len(progress.positions) - len(row.text)
            if row.done:
                row.generation.idle_positions += width
                continue
            probs = row.request.sampling.probs(logits[at : at + len(row_orders), :missing])
            if progress.drafts is None:
                progress.drafts = Drafted(draw(probs[0], progress.uniforms.take(missing)[0]), probs[0])
                row.generation.passes.append(Pass("decode" if row.generation.passes else "prefill", positions=width))
            else:
                kept[-1] += _test(row, progress, progress.drafts, row_orders, probs, positions=len(row_orders) * width)
        if len(owner) > len(state.rows):
            state.cache.select(kept)

    def _orders(self, row: Row, progress: RowProgress) -> Tensor:
        """Random orders [O, R] of the drafts that are to be tested; without drafts, one order of the missing tokens."""
        missing = len(progress.positions) - len(row.text)
        if progress.drafts is None:
            return torch.arange(missing)[None]
        return progress.uniforms.take(self.num_orders * missing).view(self.num_orders, missing).argsort(-1).cpu()


def _row_query(row: Row, progress: RowProgress, order: Sequence[int], start: int) -> RowQuery:
    """Queries for all missing tokens in this order: each given the text, and the drafts before it if there are any."""
    known, queried = len(row.text), range(len(row.text), len(progress.positions))
    drafts = [] if progress.drafts is None else progress.drafts.tokens[list(order[:-1])].tolist()
    return RowQuery(
        tokens=[*row.text, *drafts],
        start=start,
        prompt=len(row.request.ids),
        positions=[*progress.positions[:known], *(progress.positions[known + i] for i in order)],
        queried=queried,
        limits=[known] * len(queried) if progress.drafts is None else queried,
    )


def _test(
    row: Row, progress: RowProgress, drafts: Drafted, orders: Tensor, oracle_ORV: Tensor, *, positions: int
) -> int:
    """Commits the longest accepted prefix over all orders; returns the order it is from, the first of several."""
    orders = orders.to(drafts.tokens.device)
    uniform = progress.uniforms.take(orders.shape[1])[0][orders]  # one per missing token, the same in all orders
    tokens = drafts.tokens[orders]
    draft_prob = drafts.probs.gather(-1, drafts.tokens[:, None])[:, 0][orders]
    oracle_prob = oracle_ORV.gather(-1, tokens[..., None])[..., 0]
    accepted = uniform * draft_prob < oracle_prob
    accepted[:, 0] = True
    counts = accepted.long().cumprod(1).sum(1)
    best = int(counts.argmax())
    known, order = len(row.text), orders[best].tolist()
    progress.positions[known:] = [progress.positions[known + i] for i in order]
    row.commit_round(tokens[best].tolist(), int(counts[best]), None, positions=positions, branches=len(orders))
    progress.drafts = None
    if row.done:
        _put_in_order(row, progress)
    return best


def _put_in_order(row: Row, progress: RowProgress) -> None:
    """The answer's tokens in the order of the request, not of generation."""
    at = dict(zip(progress.positions, row.text, strict=True))
    row.generation.tokens[:] = [at[p] for p in (row.request.positions or ())[len(row.request.ids) :]]
