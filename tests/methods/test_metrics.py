"""What methods count and note beside the loss."""

from types import SimpleNamespace

import torch

from dspec.method import Batch
from dspec.methods.ar_base import ARBase
from dspec.methods.dflash import DFlash

SETTINGS = {"num_anchors": 4, "loss_decay": 4.0, "ce_weight": 0.4, "tv_weight": 0.6, "chunk_size": 5}


def test_match_counts_greedy_agreement_slot_by_slot(toys: SimpleNamespace) -> None:
    target = toys.target()
    method = DFlash(target=target, draft=toys.draft(target), **SETTINGS)
    ids = torch.randint(10, (3, 14), generator=torch.Generator().manual_seed(0))
    batch, output = Batch(ids, torch.ones(3, 14, dtype=torch.bool)), target(ids)
    anchors, valid = torch.tensor([[2, 5, 8, 11]] * 3), torch.ones(3, 4, dtype=torch.bool)
    blocks = method.draft_blocks(batch, output, anchors, valid)
    drafted = method.draft.lm_head(blocks.hidden_BNJD).argmax(-1)
    said = target.logits(output.hidden_BLD).argmax(-1)
    expected = [0] * 4
    for b, n, k in blocks.supervised_BNJ.nonzero().tolist():
        expected[k] += int(drafted[b, n, k] == said[b, blocks.at_BNJ[b, n, k]])
    match, _ = method.loss_at(batch, output, anchors, valid).metrics["match"]
    assert match.tolist() == expected
    assert 0 < sum(expected) < int(blocks.supervised_BNJ.sum())


def test_the_drafter_knows_how_many_anchors_trained_it(toys: SimpleNamespace) -> None:
    """DeepSpec's config.json carries it."""
    target = toys.target()
    draft = toys.draft(target)
    assert draft.num_anchors is None
    DFlash(target=target, draft=draft, **SETTINGS)
    assert draft.num_anchors == 4


def test_documents_do_not_see_each_other_whatever_their_positions(toys: SimpleNamespace) -> None:
    """transformers splits rows where positions start anew; the mask must not lean on that."""
    method = ARBase(target=toys.target(), chunk_size=4)
    ids = torch.randint(10, (1, 12), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, :6] = (other[0, :6] + 1) % 10
    document, later = torch.tensor([[0] * 6 + [1] * 6]), torch.tensor([[False] * 7 + [True] * 5])
    losses = []
    for tokens in (ids, other):
        batch = Batch(tokens, later, document_BL=document, positions_BL=torch.arange(12)[None])
        losses.append(method.loss(batch, generator=torch.Generator()).loss_sum)
    torch.testing.assert_close(losses[0], losses[1])
