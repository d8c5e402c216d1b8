"""What methods count and note beside the loss."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dspec.jacobi_forcing.noise import AnyState, divergent_suffix
from dspec.jacobi_forcing.packing import Trajectory, trajectory_batch
from dspec.jacobi_forcing.teachers import StopGradientTeacher
from dspec.method import Batch
from dspec.methods.ar_base import ARBase
from dspec.methods.dflash import DFlash
from dspec.methods.jacobi_forcing import JacobiForcing, per_token
from dspec.tuning import FullFineTuning

SETTINGS = {
    "num_anchors": 4, "loss_decay": 4.0, "ce_weight": 0.4, "tv_weight": 0.6, "chunk_mb": 5e-4, "feature_cache_mb": 0,
}  # fmt: skip


def test_match_counts_greedy_agreement_slot_by_slot(toys: SimpleNamespace) -> None:
    target, agreed, counted = toys.target(scale=0.3), 0, 0
    ids = torch.randint(10, (3, 14), generator=torch.Generator().manual_seed(0))
    anchors, valid = torch.tensor([[2, 5, 8, 11]] * 3), torch.ones(3, 4, dtype=torch.bool)
    for seed in range(6):
        method = DFlash(target=target, draft=toys.draft(target, seed=seed), **SETTINGS)
        batch, output = Batch(ids, torch.ones(3, 14, dtype=torch.bool)), target(ids, taps=(0, 2))
        blocks = method.draft_blocks(batch, output, anchors, valid)
        drafted = method.draft.lm_head(blocks.hidden_BNJD).argmax(-1)
        said = target.logits(output.hidden_BLD).argmax(-1)
        expected = [0] * 4
        for b, n, k in blocks.supervised_BNJ.nonzero().tolist():
            expected[k] += int(drafted[b, n, k] == said[b, blocks.target_index_BNJ[b, n, k]])
        match, count = method.loss_at(batch, output, anchors, valid).metrics["match"]
        assert match.tolist() == expected
        agreed, counted = agreed + sum(expected), counted + int(count.sum())
    assert 0 < agreed < counted


def test_expected_tau_multiplies_the_slots(toys: SimpleNamespace) -> None:
    target = toys.target()
    method = DFlash(target=target, draft=toys.draft(target), **SETTINGS)
    tau = method.derived({"accept": torch.tensor([0.5, 0.8, 0.25]), "ce": torch.tensor(1.0)})["expected_tau"]
    assert float(tau) == pytest.approx(1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.25)


def test_the_drafter_knows_how_many_anchors_trained_it(toys: SimpleNamespace) -> None:
    """DeepSpec's config.json carries it."""
    target = toys.target()
    draft = toys.draft(target)
    assert draft.metadata.num_anchors is None
    DFlash(target=target, draft=draft, **SETTINGS)
    assert draft.metadata.num_anchors == 4


def test_documents_do_not_see_each_other_whatever_their_positions(toys: SimpleNamespace) -> None:
    """transformers splits rows where positions start anew; the mask must not lean on that."""
    method = ARBase(target=toys.target(), chunk_mb=1e-4)
    ids = torch.randint(10, (1, 12), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, :6] = (other[0, :6] + 1) % 10
    document, later = torch.tensor([[0] * 6 + [1] * 6]), torch.tensor([[False] * 7 + [True] * 5])
    losses = []
    for tokens in (ids, other):
        batch = Batch(tokens, later, document_BL=document, positions_BL=torch.arange(12)[None])
        losses.append(method.loss(batch, generators=[]).loss_sum)
    torch.testing.assert_close(losses[0], losses[1])


def _forcing(toys: SimpleNamespace, *, interpolation: float = 1.0) -> JacobiForcing:
    return JacobiForcing(
        target=toys.target(), schedule=AnyState(), distance=divergent_suffix, window=None,
        teacher=StopGradientTeacher(),
        tuning=FullFineTuning(interpolation=interpolation), normalisation=per_token,
        consistency_weight=1.0, ar_weight=1.0, ar_on_prompt=False,
        temperature=1.0, decay=None, chunk_mb=7e-4,
    )  # fmt: skip


def test_consistency_matches_where_nothing_is_noisy(toys: SimpleNamespace) -> None:
    """At the fixed point both copies say the same; a first draft of wrong tokens agrees at some places only."""
    blocks = [[[9, 9, 9], [1, 2, 3]], [[8, 0, 7], [4, 5, 6]], [[9, 9], [1, 7]]]
    own = [Trajectory.from_lists([7, first], [1, 2, 3, 4, 5, 6, 1, 7], blocks, block_size=3) for first in range(6)]
    method, batch = _forcing(toys), trajectory_batch([own])
    results = [method.loss_at(batch, states).metrics for states in (batch.count_N - 1, torch.zeros_like(batch.count_N))]
    (clean, count), (noisy, _) = (metrics["match"] for metrics in results)
    assert clean == count == 6 * 7  # all noisy places but a response's last one
    assert 0 < noisy < count
    assert noisy == noisy.round()


def test_what_is_exported_is_the_merged_target(toys: SimpleNamespace, tmp_path: Path) -> None:
    """A share of the change, in the file and in the target that is evaluated next."""
    method = _forcing(toys, interpolation=0.25)
    target = method.target
    target.tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    before = target.lm_head.weight.detach().clone()
    with torch.no_grad():
        target.lm_head.weight.add_(1.0)
    method.finish()
    folder = method.export(tmp_path, card="a card")
    written = load_file(folder / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(written, before + 0.25, rtol=0, atol=1e-10)
    torch.testing.assert_close(target.lm_head.weight.detach(), before + 0.25, rtol=0, atol=1e-10)
    assert (folder / "README.md").read_text() == "a card"
