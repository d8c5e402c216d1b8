"""Jacobi decoding: all tokens of a block in one causal pass, iterated to a fixed point.

One or several blocks are in flight (jacobi_state.py). Recycled n-grams are verified next to the draft: all
continuations are in one row, after the same cached text, and a mask keeps them from seeing each other. Greedy output
equals greedy autoregressive decoding token for token. So does sampled output with the same seed: the token at output
position t is a function of the model's distribution there and of the stream's t-th uniform, as in the autoregressive
decoder, and Jacobi decoding iterates that function. So the output distribution is exactly the target's.

Source: Jacobi Forcing (arXiv 2512.14681), inference.
Legend: B = rows, Q = queries of a pass (the anchor, the draft, the candidates), N = B Q, T = output positions,
V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dspec.attention import masks
from dspec.decoding.generation import Request
from dspec.decoding.jacobi_state import JacobiConfig, JacobiState
from dspec.decoding.loop import check_requests, prefill
from dspec.decoding.sampling import Sampling, SamplingBatch, draw, row_chunks
from dspec.decoding.state import PerRow, State
from dspec.models.language_model import LanguageModel
from dspec.spans import span

BLOCKS = "blocks"  # the part of the state that holds each row's JacobiState
UNIFORMS = "uniforms"  # the part that holds the uniforms [T] of each row's tokens after the first


class Jacobi:
    """Lossless Jacobi decoding of any batch."""

    lossless = True

    def __init__(self, *, target: LanguageModel, config: JacobiConfig) -> None:
        self.target, self.config = target, config

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return sampling.to_dict() | asdict(self.config)

    def check(self, requests: Sequence[Request]) -> None:
        check_requests(self.target, requests)

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> State:
        self.check(requests)
        state, _ = prefill(self.target, requests)
        uniform_BT = state.streams.take(max(r.max_new_tokens for r in requests))
        state.parts[UNIFORMS] = PerRow(uniform_BT)
        state.parts[BLOCKS] = PerRow(
            JacobiState(r.ids, row.text[-1], config=self.config, limit=r.max_new_tokens, seed=r.seed)
            for r, row in zip(requests, state.rows, strict=True)
        )
        return state

    @torch.inference_mode()
    def step(self, state: State) -> None:
        # 1. draft: what each row verifies after its anchor, one or several continuations of equal length
        blocks: PerRow[JacobiState] = state.parts[BLOCKS]
        with span("lookup"):
            drafts: list[list[list[int]]] = [
                [[]] if row.done else row_blocks.drafts() for row, row_blocks in zip(state.rows, blocks, strict=True)
            ]

        # 2. verify: one pass over all of them
        predicted = self._predict(state, drafts)

        # 3. commit the continuation with most accepted tokens; its keys and values move to their final cache indices
        moved: list[tuple[int, int, int]] = []
        with span("bookkeeping"):
            for i, (row, row_blocks, continuations, tokens) in enumerate(
                zip(state.rows, blocks, drafts, predicted, strict=True)
            ):
                if row.done:
                    row.generation.idle_positions += len(tokens)
                    continue
                start, length = len(row.text) - 1, len(continuations[0])
                after_anchor = [tokens[1 + j * length : 1 + (j + 1) * length] for j in range(len(continuations))]
                predictions = [tokens[:1] + rest for rest in after_anchor]
                winner, accepted = row_blocks.advance(continuations, predictions)
                row.commit_round(
                    continuations[winner],
                    accepted,
                    predictions[winner][accepted],
                    positions=len(tokens),
                    branches=len(continuations),
                )
                if winner:
                    first = start + 1
                    moved += [(i, first + winner * length + k, first + k) for k in range(accepted)]
            if moved:
                state.cache.move(*zip(*moved, strict=True))

    def _predict(self, state: State, drafts: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        """The model's tokens [B][Q] after the anchor and after each token of each continuation, one continuation after
        the other. Rows are padded to the longest; predictions at padding are not read."""
        widths = [1 + sum(map(len, tried)) for tried in drafts]
        Q, device = max(widths), self.target.device
        ids, depth, branch = (torch.zeros(len(drafts), Q, dtype=torch.long) for _ in range(3))
        for b, (row, tried, width) in enumerate(zip(state.rows, drafts, widths, strict=True)):
            ids[b, :width] = torch.tensor([row.text[-1], *(token for draft in tried for token in draft)])
            length = len(tried[0])
            if length:
                depth[b, 1:width] = 1 + torch.arange(width - 1) % length
                branch[b, 1:width] = 1 + torch.arange(width - 1) // length
        starts = state.starts
        side_by_side: dict[str, Any] = {}
        if any(len(tried) > 1 for tried in drafts):
            start = torch.tensor(starts, device=device)
            side_by_side = {
                "positions_BL": start[:, None] + depth.to(device),
                "mask": masks.branches(start, branch.to(device)),
            }
        with span("target"):
            output = self.target(ids.to(device), start_B=starts, cache=state.cache, **side_by_side)
        uniform_N = None if state.samplings.greedy else _uniforms(state, depth).flatten()
        return self._tokens(output.hidden_BLD.flatten(0, 1), state.samplings, uniform_N).view(-1, Q).tolist()

    def _tokens(self, hidden_ND: Tensor, samplings: SamplingBatch, uniform_N: Tensor | None) -> Tensor:
        """The model's tokens [N], computed in chunks: with many candidates the logits and distributions of all queries
        would take gigabytes."""
        tokens, Q = [], len(hidden_ND) // len(samplings)
        for part in row_chunks(len(hidden_ND), self.target.vocab_size):
            with span("target LM head"):
                logits = self.target.logits(hidden_ND[part])
            with span("sampling"):
                if uniform_N is None:
                    tokens.append(logits.argmax(-1))
                else:
                    rows = [n // Q for n in range(len(hidden_ND))[part]]
                    tokens.append(draw(samplings.probs(logits, rows), uniform_N[part]))
        return torch.cat(tokens)


def _uniforms(state: State, depth_BQ: Tensor) -> Tensor:
    """The uniforms [B, Q] for drawing the tokens after these depths: one per output position, the same in every
    continuation. The prefill drew token 0, so a row's uniforms begin with token 1's."""
    rows = []
    for row, uniform_T, depth_Q in zip(state.rows, state.parts[UNIFORMS], depth_BQ, strict=True):
        at = len(row.generation.tokens) - 1 + depth_Q
        rows.append(uniform_T[at.clamp(max=len(uniform_T) - 1).to(uniform_T.device)])
    return torch.stack(rows)
