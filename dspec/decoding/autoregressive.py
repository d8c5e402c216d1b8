"""Plain autoregressive decoding with a KV cache: one token a forward pass, the serial decoder that speeds refer to."""

from collections.abc import Sequence
from typing import Any

import torch

from dspec.decoding.base import Ends, Generation, Limits, next_tokens, prefill, rows_to_keep
from dspec.decoding.sampling import Sampling
from dspec.models.language_model import LanguageModel
from dspec.spans import span


class Autoregressive:
    """Greedy or sampled decoding of any batch."""

    lossless = True

    def __init__(self, *, target: LanguageModel, sampling: Sampling) -> None:
        self.target, self.sampling = target, sampling

    def settings(self) -> dict[str, Any]:
        return self.sampling.to_dict()

    @torch.inference_mode()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        seeds: Sequence[int],
        ends: Ends | None = None,
    ) -> list[Generation]:
        target, limits = self.target, Limits(max_new_tokens=max_new_tokens, stop_ids=stop_ids, ends=ends)
        target.tap(())
        state = prefill(target, prompts, sampling=self.sampling, limits=limits, seeds=seeds)
        live = list(state.generations)
        while any(not g.done(limits) for g in live):
            if (keep := rows_to_keep([not g.done(limits) for g in live])) is not None:
                rows = torch.tensor(keep, device=target.device)
                state.cache.select(rows)
                state.streams.select(rows)
                live = [live[i] for i in keep]
                state.lengths_B = [state.lengths_B[i] for i in keep]
                state.anchors_B = [state.anchors_B[i] for i in keep]
            ids = torch.tensor(state.anchors_B, device=target.device)[:, None]
            with span("target"):
                hidden = target(ids, start_B=state.lengths_B, cache=state.cache).hidden_BLD
            with span("target LM head"):
                logits = target.logits(hidden[:, 0])
            with span("sampling"):
                state.anchors_B = next_tokens(logits, self.sampling, state.streams)
            for i, generation in enumerate(live):
                generation.positions_computed += 1
                if not generation.done(limits):
                    generation.emit([state.anchors_B[i]], limits)
                    generation.forwards += 1
                    state.lengths_B[i] += 1
        return state.generations
