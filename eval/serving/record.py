"""Records traces: answers decoded with all drafts verified, and what the drafter thought of each draft."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.state import State
from dspec.decoding.verification import VerifyAll
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.provenance import provenance
from dspec.serving.recording import RecordedOn, Recording
from dspec.serving.traces import record
from eval.serving.prompts import ServedPrompt


class EveryPosition:
    """A decoder whose rounds draft and verify as another's, but keep only their first token: so there is a round after
    each token of an answer. The answers have the target's distribution all the same."""

    lossless = True

    def __init__(self, decoder: Speculative) -> None:
        self._decoder = decoder

    def check(self, requests: Sequence[Request]) -> None:
        self._decoder.check(requests)

    def start(self, requests: Sequence[Request]) -> State:
        return self._decoder.start(requests)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return self._decoder.settings(sampling)

    @torch.inference_mode()
    def step(self, state: State) -> None:
        active = [(row, len(row.generation.tokens)) for row in state.rows if not row.done]
        self._decoder.step(state)
        for row, known in active:
            # caches are by position: what was written past the text is overwritten in the next round
            answer, extra = row.generation, len(row.generation.tokens) - known - 1
            del answer.tokens[known + 1 :], row.text[len(row.text) - extra :]
            answer.stopped = row.request.end(answer.tokens, known) is not None
            answer.passes[-1] = replace(answer.passes[-1], committed=1)


def record_answers(
    target: LanguageModel,
    draft: Draft,
    prompts: Sequence[ServedPrompt],
    *,
    drafter: str,
    concurrency: int,
    every_position: bool,
    seed: int,
) -> Recording:
    """Decodes the prompts, `concurrency` at a time; all have the same sampling. Raises UserError without a confidence
    head, or without prompts."""
    if draft.confidence_head is None:
        raise UserError("traces are of confidences: use a drafter with a confidence head (draft.confidence_head=true)")
    if not prompts:
        raise UserError("no prompts to record: choose a benchmark")
    decoder = Speculative(
        target=target,
        proposer=DraftProposer(draft),
        policy=VerifyAll(),
        record_confidence=True,
        record_distributions=True,
    )
    generations = decode(
        EveryPosition(decoder) if every_position else decoder, [p.request for p in prompts], in_flight=concurrency
    )
    traces = [
        replace(trace, id=prompt.id, domain=prompt.domain, prompt_tokens=len(prompt.request.ids))
        for trace, prompt in zip(record(generations), prompts, strict=True)
    ]
    sampling = prompts[0].request.sampling
    made = provenance(seed=seed, dtype=str(target.dtype).removeprefix("torch."), config={}, prompt_policy={})
    about = RecordedOn(
        target=target.name,
        drafter=drafter,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        concurrency=concurrency,
        slots=draft.config.num_drafts,
        every_position=every_position,
        **{name: made[name] for name in ("seed", "dtype", "threads", "hardware", "git", "versions")},
    )
    return Recording(about, tuple(traces))
