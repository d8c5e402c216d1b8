"""Every uniform of a row's stream decides one thing only: a draw of the drafter, an acceptance, or a residual.

Reuse would bias the output, which else only the slow statistics of test_output_distribution.py see.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.decoding import speculative
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import State


@pytest.mark.parametrize("lookup", [False, True])
def test_no_uniform_is_used_twice(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lookup: bool) -> None:
    rows, target = 3, toys.target(vocab=8, scale=0.4)
    used: list[list[Tensor]] = [[] for _ in range(rows)]  # by row: all end in the same round

    def note(*uniforms: Tensor) -> None:
        for row in range(rows):
            used[row] += [u[row].flatten() for u in uniforms]

    verify = speculative.verify_sampled

    def verified(draft: Tensor, count: Tensor, q: Tensor | None, p: Tensor, accept: Tensor, following: Tensor) -> Any:
        assert accept.shape == draft.shape
        note(accept, following)
        return verify(draft, count, q, p, accept, following)

    class Noting(DraftProposer):
        def propose(self, *args: Any, uniform_BJ: Tensor, **options: Any) -> Any:
            note(uniform_BJ)
            return super().propose(*args, uniform_BJ=uniform_BJ, **options)

    monkeypatch.setattr(speculative, "verify_sampled", verified)
    monkeypatch.setattr(
        State, "drop_finished", lambda state: state.select([] if all(r.done for r in state.rows) else range(rows))
    )
    proposer = Noting(toys.draft(target, head="vanilla"))
    if lookup:
        proposer = PromptLookupProposer(num_drafts=4, max_ngram=1, device=torch.device("cpu"))
    decoder = toys.speculative(target=target, proposer=proposer, sampling=Sampling(temperature=1.0, top_p=1.0))
    decoder.decode(toys.prompts(random.Random(0), rows, vocab=8), max_new_tokens=20, stop_ids=(), seeds=[1, 2, 3])
    everything = []
    for seed, parts in enumerate(used, start=1):
        own = torch.cat(parts).tolist()
        first = torch.rand(512, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[0].item()
        everything += [first, *own]  # the prefill's token took the stream's first one
        assert len(own) > 4 * 5
    assert len(set(everything)) == len(everything)
