"""Jacobi decoding: all tokens of a block in one causal pass, iterated until they are what the model itself says.

One block, several blocks in flight, and recycled n-grams verified along the batch dimension: see jacobi_state.py.
Greedy output equals greedy autoregressive decoding token for token. So does sampled output, with the same seed: the
token at output position t is a function of the model's law there and of the stream's t-th uniform, the one that the
autoregressive decoder draws it with, and Jacobi iterates that function. So its law is the target's exactly.

Legend: B = prompts, R = rows of a pass (each prompt's draft, then its candidates), L = positions of a pass,
T = output positions, V = vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dspec.decoding.base import Ends, Generation, Limits, Prefill, prefill, record, rows_to_keep
from dspec.decoding.jacobi_state import JacobiConfig, JacobiState
from dspec.decoding.sampling import Sampling, draw, row_chunks
from dspec.models.language_model import LanguageModel
from dspec.spans import span

Observer = Callable[[int, JacobiState], None]  # a prompt's index and its flight, before each of its passes


class Jacobi:
    """Lossless Jacobi decoding of any batch."""

    lossless = True

    def __init__(self, *, target: LanguageModel, sampling: Sampling, plan: JacobiConfig) -> None:
        self.target, self.sampling, self.plan = target, sampling, plan

    def settings(self) -> dict[str, Any]:
        return self.sampling.to_dict() | asdict(self.plan)

    @torch.inference_mode()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        seeds: Sequence[int],
        ends: Ends | None = None,
        observe: Observer | None = None,
    ) -> list[Generation]:
        """`observe` sees every state of the blocks: trajectories are made of it."""
        limits = Limits(max_new_tokens=max_new_tokens, stop_ids=stop_ids, ends=ends)
        self.target.tap(())
        state = prefill(self.target, prompts, sampling=self.sampling, limits=limits, seeds=seeds)
        flights = [
            JacobiState(prompt, first, plan=self.plan, limit=max_new_tokens, seed=seed)
            for prompt, first, seed in zip(prompts, state.anchors_B, seeds, strict=True)
        ]
        uniform_BT = None if self.sampling.greedy else state.streams.take(max_new_tokens)
        rows = list(range(len(prompts)))  # the prompts that the cache's rows belong to
        while any(not state.generations[i].done(limits) for i in rows):
            if (keep := rows_to_keep([not state.generations[i].done(limits) for i in rows])) is not None:
                state.cache.select(torch.tensor(keep, device=self.target.device))
                rows = [rows[i] for i in keep]
            if observe is not None:
                for i in rows:
                    if not state.generations[i].done(limits):
                        observe(i, flights[i])
            self._pass(state, flights, rows, uniform_BT, limits)
        return state.generations

    def _pass(
        self,
        state: Prefill,
        flights: Sequence[JacobiState],
        rows: Sequence[int],
        uniform_BT: Tensor | None,
        limits: Limits,
    ) -> None:
        """One forward pass over the drafts and candidates of all rows; finished prompts ride along, undrafted."""
        done = [state.generations[i].done(limits) for i in rows]
        with span("lookup"):
            drafts: list[list[list[int]]] = [
                [[]] if off else flights[i].drafts() for i, off in zip(rows, done, strict=True)
            ]
        owner = [b for b, own in enumerate(drafts) for _ in own]
        branched = len(owner) > len(rows)
        if branched:
            with span("cache rows"):
                state.cache.select(torch.tensor(owner, device=self.target.device))
        of = [flights[rows[b]] for b in owner]
        predicted = self._predict(
            state, of, [row for own in drafts for row in own], [rows[b] for b in owner], uniform_BT
        )
        width, winners, at = len(predicted[0]), [], 0
        with span("bookkeeping"):
            for i, off, own in zip(rows, done, drafts, strict=True):
                winner = 0
                flight, generation = flights[i], state.generations[i]
                generation.positions_computed += width * len(own)
                if not off:
                    predictions = [p[: len(d) + 1] for d, p in zip(own, predicted[at : at + len(own)], strict=True)]
                    winner, accepted = flight.advance(own, predictions)
                    record(generation, own[winner], accepted, predictions[winner][accepted], (), limits)
                    generation.branches += len(own) - 1
                winners.append(at + winner)
                at += len(own)
        if branched:
            with span("cache rows"):
                state.cache.select(torch.tensor(winners, device=self.target.device))

    def _predict(
        self,
        state: Prefill,
        flights: Sequence[JacobiState],
        drafts: Sequence[list[int]],
        prompts: Sequence[int],
        uniform_BT: Tensor | None,
    ) -> list[list[int]]:
        """The model's token after the anchor and after each draft token, rows padded to the longest draft."""
        L, device = 1 + max(map(len, drafts)), self.target.device
        padded = [[f.text[-1], *d, *[0] * (L - 1 - len(d))] for f, d in zip(flights, drafts, strict=True)]
        starts = [len(f.text) - 1 for f in flights]
        with span("target"):
            output = self.target(torch.tensor(padded, device=device), start_B=starts, cache=state.cache)
        uniform_N = None
        if uniform_BT is not None:
            # stream position of the first prediction: the prefill drew output token 0, `uniform_BT` starts at token 1
            first_R = torch.tensor([len(f.text) - f.start - 1 for f in flights], device=device)
            at_RL = (first_R[:, None] + torch.arange(L, device=device)).clamp(max=uniform_BT.shape[1] - 1)
            uniform_N = uniform_BT[torch.tensor(prompts, device=device)].gather(1, at_RL).flatten()
        return self._tokens(output.hidden_BLD.flatten(0, 1), uniform_N).view(-1, L).tolist()

    def _tokens(self, hidden_ND: Tensor, uniform_N: Tensor | None) -> Tensor:
        """The model's tokens [N] after N = R L positions, some at a time: with many candidates all logits, let alone
        laws, would take gigabytes."""
        tokens = []
        for part in row_chunks(len(hidden_ND), self.target.vocab_size):
            with span("target LM head"):
                logits = self.target.logits(hidden_ND[part])
            with span("sampling"):
                if uniform_N is None:
                    tokens.append(logits.argmax(-1))
                else:
                    tokens.append(draw(self.sampling.probs(logits), uniform_N[part]))
        return torch.cat(tokens)
