"""Any-subset decoding: generates the tokens at chosen positions of a text, given the tokens at all others (AS-ARM).

One token per forward pass (sequential decoding), or several (Any-Subset Speculative Decoding, ASSD).

An oracle query's limit is its own place; draft queries have the first unknown place as their common limit. For the
first of them both are the same, so its token is drawn from the oracle's distribution and needs no verification
(Lemma 1). The others are verified in the next pass by rejection sampling. Every pass commits at least one token
(Theorem 1), and the output has exactly the distribution of sequential decoding (Theorem 2), which is ASSD with one
draft. Drafts from bigrams need no pass of the model and are all verified (Algorithm 2).

Source: arXiv 2504.20456. Words (place, query, limit, slot): dspec/decoding/any_subset/__init__.py.
Legend: B = rows, Q = position queries, J = draft slots, U = uniforms that a row takes per pass, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dspec.decoding.any_subset.bigrams import Bigrams
from dspec.decoding.any_subset.queries import RowQuery, check_infilling, positions_by_place, query_logits
from dspec.decoding.generation import Generation, Kind, Pass, Request
from dspec.decoding.sampling import Sampling, Streams, draw
from dspec.decoding.state import PerRow, Row, State
from dspec.decoding.verification import verify_greedy, verify_sampled
from dspec.errors import UserError
from dspec.models.target_model import TargetModel
from dspec.spans import span

DRAFTS = "drafts"  # the part of the state that holds each row's unverified Drafts
_BIGRAMS = "bigrams"  # the part that holds each row's Bigrams


@dataclass(frozen=True, kw_only=True)
class AnySubsetConfig:
    """`num_drafts` k tokens are drafted at a time (1: sequential decoding), `drafted_by` the model itself ("model") or
    the text's bigrams ("bigrams"). `bonus`: a pass that verifies drafts also queries the token after them. `tolerance`
    epsilon accepts a sampled draft if u < p/q + epsilon: lossy above 0."""

    num_drafts: int
    drafted_by: str
    bonus: bool
    tolerance: float

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise UserError(f"any-subset decoding needs num_drafts >= 1, not {self.num_drafts}: 1 is sequential")
        if self.drafted_by not in ("model", "bigrams"):
            raise UserError(f"drafted_by={self.drafted_by}: any-subset drafts come from the model or from bigrams")
        if not self.tolerance >= 0:
            raise UserError(f"tolerance={self.tolerance} must be at least 0 (0: lossless)")


@dataclass(frozen=True)
class Drafts:
    """Draft tokens for a row's next places, and the distributions they were drawn from (None: point masses)."""

    tokens: Sequence[int] = ()
    probs_JV: Tensor | None = None


class AnySubset:
    """Sequential and speculative any-subset decoding of any batch. In one pass some rows may draft while the drafts of
    others are verified."""

    def __init__(self, *, target: TargetModel, config: AnySubsetConfig) -> None:
        """Raises UserError for a model without a mask token."""
        target.required_mask_token()
        self.target, self.config = target, config
        self.lossless = config.tolerance == 0

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return sampling.to_dict() | asdict(self.config)

    def check(self, requests: Sequence[Request]) -> None:
        check_infilling(self.target, requests)

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> State:
        self.check(requests)
        state = State(
            rows=[Row(request, list(request.ids), Generation()) for request in requests],
            cache=self.target.new_cache(),
            streams=Streams([r.seed for r in requests], self.target.device),
            parts={DRAFTS: PerRow(Drafts() for _ in requests)},
        )
        if self.config.drafted_by == "bigrams":
            state.parts[_BIGRAMS] = PerRow(Bigrams() for _ in requests)
        with span("prefill"):
            self._advance(state, [0] * len(requests))
        return state

    @torch.inference_mode()
    def step(self, state: State) -> None:
        self._advance(state, state.starts)

    def _advance(self, state: State, starts: Sequence[int]) -> None:
        """One pass over each row's tokens from place `starts` on, and its queries.

        Each pass takes 2k + 1 uniforms per row, used or not, so that a row's random numbers do not depend on the other
        rows: k to draw or verify drafts, one to draw the token after them, k to draw drafts from bigrams.
        """
        k, samplings = self.config.num_drafts, state.samplings
        uniform_BU = None if samplings.greedy else state.streams.take(2 * k + 1)
        # 1. the drafts to verify: of the last pass, or of the bigrams
        if self.config.drafted_by == "bigrams":
            with span("lookup"):
                state.parts[DRAFTS][:] = self._lookup(
                    state, None if uniform_BU is None else uniform_BU[:, k + 1 :].cpu()
                )
        drafts = [Drafts() if row.done else d for row, d in zip(state.rows, state.parts[DRAFTS], strict=True)]

        # 2. one pass: verify a row's drafts, or draft where it has none
        queries = [
            self._row_query(row, row_drafts, start)
            for row, row_drafts, start in zip(state.rows, drafts, starts, strict=True)
        ]
        logits = query_logits(self.target, queries, cache=state.cache)
        with span("sampling"):
            probs = None if uniform_BU is None else samplings.probs(logits)
            accepted, next_tokens = self._verify(state.rows, drafts, logits, probs, uniform_BU)
            new_drafts = self._new_drafts(queries, drafts, logits, probs, uniform_BU)

        # 3. commit the accepted drafts and the token after them; new drafts are verified in the next pass
        width = max(query.width for query in queries)
        with span("bookkeeping"):
            for b, row in enumerate(state.rows):
                if row.done:
                    row.generation.idle_positions += width
                    continue
                if self.config.drafted_by == "bigrams":
                    row.generation.passes.append(Pass("auxiliary"))
                tokens = drafts[b].tokens
                token = next_tokens[b] if accepted[b] < len(queries[b].queried) else None
                kind: Kind = "verify" if tokens else "decode" if row.generation.tokens else "prefill"
                row.commit_round(tokens, accepted[b], token, kind=kind, positions=width)
        state.parts[DRAFTS][:] = new_drafts

    def _lookup(self, state: State, uniform_BJ: Tensor | None) -> list[Drafts]:
        """Each row's drafts from the bigrams of its text."""
        drafts = []
        dtype = torch.promote_types(self.target.dtype, torch.float32)
        for b, (row, bigrams) in enumerate(zip(state.rows, state.parts[_BIGRAMS], strict=True)):
            if row.done:
                drafts.append(Drafts())
                continue
            positions, n = positions_by_place(row.request), len(row.text)
            bigrams.update(row.text, positions)
            greedy = uniform_BJ is None or row.request.sampling.greedy
            tokens, probs = bigrams.draft(
                positions[n : n + self.config.num_drafts],
                None if greedy or uniform_BJ is None else uniform_BJ[b],
                vocab=self.target.vocab_size,
                dtype=dtype,
            )
            drafts.append(Drafts(tokens, None if greedy else probs))
        return drafts

    def _row_query(self, row: Row, drafts: Drafts, start: int) -> RowQuery:
        """Oracle queries for the drafts (and the bonus token), or draft queries for the next k tokens."""
        known, positions = len(row.text), positions_by_place(row.request)
        count = len(drafts.tokens) + self.config.bonus if drafts.tokens else self.config.num_drafts
        queried = range(known, known if row.done else min(known + count, len(positions)))
        return RowQuery(
            tokens=[*row.text, *drafts.tokens[: max(0, len(queried) - 1)]],  # without those that no query depends on
            start=start,
            prompt=len(row.request.ids),
            positions=positions,
            queried=queried,
            limits=queried if drafts.tokens else [known] * len(queried),
        )

    def _verify(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Drafts],
        logits_BQV: Tensor,
        probs_BQV: Tensor | None,
        uniform_BU: Tensor | None,
    ) -> tuple[list[int], list[int]]:
        """The number of each row's accepted drafts, and the token after them. That token is undefined if all drafts
        are accepted and the place after them was not queried. A row without drafts draws its next token here."""
        device, Q = logits_BQV.device, logits_BQV.shape[1]
        counts = [len(d.tokens) for d in drafts]
        J = max(counts)
        draft_BJ = torch.zeros(len(drafts), J, dtype=torch.long)
        for b, d in enumerate(drafts):
            draft_BJ[b, : counts[b]] = torch.tensor(d.tokens, dtype=torch.long)
        draft_BJ, count_B = draft_BJ.to(device), torch.tensor(counts, device=device)
        slots = torch.arange(J + 1, device=device).clamp(max=Q - 1)  # of the drafts and the token after them
        if probs_BQV is None or uniform_BU is None:
            accepted, next_token = verify_greedy(draft_BJ, count_B, logits_BQV[:, slots])
        else:
            # u < p / q + epsilon is u - epsilon < p / q
            tolerance = [0.0 if row.request.sampling.greedy else self.config.tolerance for row in rows]
            uniform_BJ = uniform_BU[:, :J] - torch.tensor(tolerance, dtype=uniform_BU.dtype, device=device)[:, None]
            draft_probs = _stack_probs(drafts, J, like=probs_BQV)
            uniform_B = uniform_BU[:, self.config.num_drafts]
            accepted, next_token = verify_sampled(
                draft_BJ, count_B, draft_probs, probs_BQV[:, slots], uniform_BJ, uniform_B
            )
        return accepted.tolist(), next_token.tolist()

    def _new_drafts(
        self,
        queries: Sequence[RowQuery],
        drafts: Sequence[Drafts],
        logits_BQV: Tensor,
        probs_BQV: Tensor | None,
        uniform_BU: Tensor | None,
    ) -> list[Drafts]:
        """The drafts, after the next token, of rows that had none to verify; no drafts for the others."""
        counts = [0 if d.tokens else max(0, len(row.queried) - 1) for d, row in zip(drafts, queries, strict=True)]
        J = max(counts)
        if not J or self.config.drafted_by == "bigrams":
            return [Drafts()] * len(counts)
        if probs_BQV is None or uniform_BU is None:
            greedy = logits_BQV[:, 1 : 1 + J].argmax(-1).tolist()
            return [Drafts(tokens[:n]) for tokens, n in zip(greedy, counts, strict=True)]
        draft_probs = probs_BQV[:, 1 : 1 + J]
        drawn = draw(draft_probs, uniform_BU[:, :J]).tolist()
        return [Drafts(tokens[:n], probs[:n]) for tokens, probs, n in zip(drawn, draft_probs, counts, strict=True)]


def _stack_probs(drafts: Sequence[Drafts], slots: int, *, like: Tensor) -> Tensor | None:
    """The distributions [B, J, V] of all rows' drafts, zero after a row's last one; None without drafts."""
    if not slots:
        return None
    probs_BJV = like.new_zeros(len(drafts), slots, like.shape[-1])
    for b, d in enumerate(drafts):
        J = len(d.tokens)
        if d.probs_JV is not None:
            probs_BJV[b, :J] = d.probs_JV
        else:
            probs_BJV[b, torch.arange(J), torch.tensor(d.tokens, dtype=torch.long)] = 1
    return probs_BJV
