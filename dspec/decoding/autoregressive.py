"""Plain autoregressive decoding with a KV cache: one token per forward pass, the baseline of speedups
(of infilling: any-subset decoding)."""

from collections.abc import Sequence
from typing import Any

import torch

from dspec.decoding.generation import Pass, Request
from dspec.decoding.loop import check_requests, next_tokens, prefill
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import State
from dspec.models.language_model import LanguageModel
from dspec.spans import span


class Autoregressive:
    """Greedy or sampled decoding of any batch."""

    lossless = True

    def __init__(self, *, target: LanguageModel) -> None:
        self.target = target

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return sampling.to_dict()

    def check(self, requests: Sequence[Request]) -> None:
        check_requests(self.target, requests)

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> State:
        self.check(requests)
        return prefill(self.target, requests)[0]

    @torch.inference_mode()
    def step(self, state: State) -> None:
        ids = torch.tensor([row.text[-1] for row in state.rows], device=self.target.device)[:, None]
        with span("target"):
            hidden = self.target(ids, start_B=state.starts, cache=state.cache).hidden_BLD
        with span("target LM head"):
            logits = self.target.logits(hidden[:, 0])
        with span("sampling"):
            tokens = next_tokens(logits, state)
        for row, token in zip(state.rows, tokens, strict=True):
            if row.done:
                row.generation.idle_positions += 1
            else:
                row.generation.passes.append(Pass("decode", row.commit([token]), positions=1))
