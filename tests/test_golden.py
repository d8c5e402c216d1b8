"""Parity with the authors' own modules on tiny random checkpoints (numbers computed with DeepSpec and z-lab/dflash)."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import Sampling
from dspec.method import Batch
from dspec.methods.dspark import DSpark
from dspec.models.checkpoint import from_pretrained
from dspec.models.language_model import LanguageModel, ModelOutput

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def _folders(marker: str) -> list[Path]:
    roots = [Path(__file__).parent / "golden"]
    if os.environ.get("DSPEC_GOLDEN_DIR"):
        roots.append(Path(os.environ["DSPEC_GOLDEN_DIR"]))
    found = {folder.name: folder for root in roots for folder in sorted(root.iterdir()) if (folder / marker).is_file()}
    return list(found.values())


def _target(folder: Path) -> LanguageModel:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    return LanguageModel(model, None, name=folder.name)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), **TOLERANCE)


@pytest.mark.parametrize("folder", _folders("train.safetensors"), ids=lambda f: f.name)
def test_dspark_training_step(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    golden = load_file(folder / "train.safetensors")
    target = _target(folder)
    draft = from_pretrained(folder / "draft", target=target)
    method = DSpark(
        target=target,
        draft=draft,
        num_anchors=meta["args"]["num_anchors"],
        loss_decay=meta["decay_gamma"],
        ce_weight=meta["ce_alpha"],
        tv_weight=meta["l1_alpha"],
        confidence_weight=meta["conf_alpha"],
        chunk_mb=1e-3,
        feature_cache_mb=0,
    )
    batch = Batch(golden["input_ids"], golden["loss_mask"].bool())
    own = target(batch.ids_BL, taps=draft.config.target_layer_ids)
    _close(own.features_BLF, golden["target_features"])
    _close(own.hidden_BLD, golden["target_last_hidden"])
    output = ModelOutput(golden["target_last_hidden"], golden["target_features"])
    anchors, keep = golden["anchor_positions"], golden["block_keep_mask"]

    blocks = method.draft_blocks(batch, output, anchors, keep)
    chosen = golden["eval_mask"]
    assert torch.equal(blocks.supervised_BNJ, chosen)
    assert torch.equal(blocks.label_BNJ[chosen], golden["target_ids"][chosen])
    assert draft.markov_head is not None
    code, w2 = draft.markov_head.transition(blocks.previous_BNJ, blocks.hidden_BNJD), draft.markov_head.markov_w2.weight
    logits = draft.lm_head(blocks.hidden_BNJD) + code @ w2.T
    _close(logits[chosen], golden["draft_logits"][chosen])
    confidence = draft.confidence(blocks.previous_BNJ, blocks.hidden_BNJD)
    assert confidence is not None
    _close(confidence[chosen], golden["confidence_logits"][chosen])

    result = method.loss_at(batch, output, anchors, keep)
    for name, term, scale in (
        ("ce", "ce_loss", 1),
        ("tv", "l1_loss", 2),
        ("confidence", "confidence_loss", 1),
    ):
        value, weight = result.metrics[name]
        _close(value * scale, golden[f"term.{term}_num"][0])
        _close(weight, golden[f"term.{term}_den"][0])
    loss = result.loss_sum / result.weight
    _close(loss, golden["loss"][0])
    loss.backward()
    parameters = draft.trainable()
    names = [name.removeprefix("grad.") for name in golden if name.startswith("grad.")]
    assert names
    for name in names:
        _close(parameters[name].grad, golden[f"grad.{name}"])


@pytest.mark.parametrize("folder", _folders("decode.safetensors"), ids=lambda f: f.name)
def test_dflash_forward_and_generation(toys: SimpleNamespace, folder: Path) -> None:
    golden = load_file(folder / "decode.safetensors")
    target = _target(folder)
    draft = from_pretrained(folder / "draft", target=target, layout="fill_in")
    anchor = golden["fwd.input_ids"].shape[1]
    with torch.no_grad():
        features = target(golden["fwd.input_ids"], taps=draft.config.target_layer_ids).features_BLF
        ids = golden["fwd.block_ids"]
        positions = anchor + torch.arange(ids.shape[1])[None]
        hidden = draft(ids, positions, mask=None, features_BSF=features)
    _close(hidden, golden["fwd.hidden"])
    _close(draft.lm_head(hidden), golden["fwd.logits"])

    decoder = toys.speculative(
        target=target, proposer=DraftProposer(draft), sampling=Sampling(temperature=0.0, top_p=1.0)
    )
    cases = sorted(name.removeprefix("prompt") for name in golden if name.startswith("prompt"))
    assert cases
    for case in cases:
        prompt, output = golden[f"prompt{case}"][0].tolist(), golden[f"output{case}"][0].tolist()
        lengths = golden[f"acceptance_lengths{case}"].tolist()
        new = len(output) - len(prompt)
        (result,) = decoder.decode([prompt], max_new_tokens=new, stop_ids=(), seeds=[0])
        assert prompt + result.tokens == output
        got = [r.accepted + 1 for r in result.rounds]
        assert got[: len(lengths) - 1] == lengths[: len(got)][: len(lengths) - 1]
