"""What a pass costs is its width: a row without a draft of its own computes as many positions as its neighbours."""

from types import SimpleNamespace

import torch

from dspec.decoding.proposers import PromptLookupProposer


def test_padding_of_ragged_drafts_is_counted(toys: SimpleNamespace) -> None:
    """The cycle target says x + 1: the first row's text repeats itself (three drafts), the second one's does not."""
    target = toys.cycle_target()
    proposer = PromptLookupProposer(num_drafts=3, max_ngram=2, device=torch.device("cpu"))
    decoder = toys.speculative(target=target, proposer=proposer, sampling=toys.GREEDY)
    options = {"max_new_tokens": 2, "stop_ids": ()}
    both = decoder.decode([[1, 2, 3, 1], [5]], seeds=[0, 0], **options)
    assert [[r.drafted for r in g.rounds] for g in both] == [[3], [0]]
    assert [g.positions_computed for g in both] == [4, 4]
    (alone,) = decoder.decode([[5]], seeds=[0], **options)
    assert alone.positions_computed == 1
