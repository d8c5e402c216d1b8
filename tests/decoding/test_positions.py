"""positions_computed says what decoding cost: its sum over a batch is what the model computed after the prefill."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer


@pytest.mark.parametrize("kind", ["autoregressive", "speculative", "jacobi"])
def test_rows_that_ride_along_when_done_are_counted(toys: SimpleNamespace, kind: str) -> None:
    target, draft = toys.markov_pair(noise=0.02)
    decoder: Any = {
        "autoregressive": lambda: toys.autoregressive(target=target, sampling=toys.GREEDY),
        "speculative": lambda: toys.speculative(target=target, proposer=DraftProposer(draft), sampling=toys.GREEDY),
        "jacobi": lambda: toys.jacobi(
            target=target, sampling=toys.GREEDY,
            config=JacobiConfig(block_size=4, blocks=2, activation=0.5, pool_size=4, candidates=2),
        ),
    }[kind]()  # fmt: skip
    texts = toys.prompts(random.Random(2), 7, vocab=24)
    shapes: list[int] = []
    # a drafter shares the embeddings, but its passes are not the target's
    target.model.get_decoder().layers[0].register_forward_hook(
        lambda _, args, out: shapes.append(args[0][..., 0].numel())
    )
    lengths = set()
    for stop in range(0, 24, 5):
        shapes.clear()
        done = decoder.decode(texts, max_new_tokens=12, stop_ids=[stop], seeds=[0] * 7)
        _, *passes = shapes
        assert sum(g.positions_computed for g in done) == sum(passes)
        lengths |= {len(g.tokens) for g in done}
    assert len(lengths) > 2  # rows did end at different times


def test_ragged_drafts_are_not_padded(toys: SimpleNamespace) -> None:
    """The cycle target says x + 1: the first row's text repeats itself (three drafts), the second one's does not. The
    linear layers see the four positions of one and the single one of the other, and of prompts no padding either."""
    target = toys.cycle_target()
    proposer = PromptLookupProposer(num_drafts=3, max_ngram=2, device=torch.device("cpu"))
    decoder = toys.speculative(target=target, proposer=proposer, sampling=toys.GREEDY)
    options = {"max_new_tokens": 2, "stop_ids": ()}
    shapes: list[int] = []
    target.model.get_decoder().layers[0].mlp.register_forward_hook(
        lambda _, args, out: shapes.append(args[0][..., 0].numel())
    )
    both = decoder.decode([[1, 2, 3, 1], [5]], seeds=[0, 0], **options)
    assert [[r.drafted for r in g.rounds] for g in both] == [[3], [0]]
    assert [g.passes[0].positions for g in both] == [4, 1]
    assert [g.positions_computed for g in both] == [4, 1]
    assert shapes == [5, 5]
    (alone,) = decoder.decode([[5]], seeds=[0], **options)
    assert alone.positions_computed == 1
