"""Plain autoregressive decoding with a KV cache: one token per forward pass, the baseline of speedups
(of infilling: any-subset decoding)."""

from collections.abc import Sequence
from typing import Any

import torch

from dspec.decoding.generation import Pass, Request
from dspec.decoding.loop import check_requests, next_pass, prefill
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import State
from dspec.models.language_model import LanguageModel


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
        tokens, _ = next_pass(self.target, state)
        for row, token in zip(state.rows, tokens, strict=True):
            if row.done:
                row.generation.idle_positions += 1
            else:
                row.generation.passes.append(Pass("decode", row.commit([token]), positions=1))
