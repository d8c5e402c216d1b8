"""Decoders as configs name them: flat keys reach them, the base is loaded once and late, names stay."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from dspec.config.compose import CONF, VARIANTS, composed, instantiate_decoders
from dspec.config.recipes import store_variants, variants
from dspec.decoding.sampling import GREEDY
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from eval.decoders import build_ar, on_base

FILES = sorted(path.stem for path in (CONF / "decoder").glob("*.yaml"))
BASES = ["base_autoregressive", "base_jacobi_single", "base_jacobi_recycling", "base_jacobi_multiblock", "base_jacobi"]
TRAINED = ["autoregressive", "jacobi_single", "jacobi_recycling", "jacobi_multiblock", "jacobi"]


@pytest.fixture
def loads(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[LanguageModel]:
    """`target=tiny` gives a toy; the models that were loaded."""
    made: list[LanguageModel] = []

    def load(**_: Any) -> LanguageModel:
        made.append(toys.target(seed=len(made), dtype=torch.float32))
        return made[-1]

    monkeypatch.setattr("dspec.models.language_model.embedded_target", load)
    return made


def test_the_base_is_loaded_once_and_not_before_it_is_needed(loads: list[LanguageModel], toys: SimpleNamespace) -> None:
    cfg = composed("train", ["recipe=jacobi_forcing"])
    specs = instantiate_decoders(cfg)
    assert list(specs) == [*BASES, *TRAINED]  # the table's order
    assert loads == []  # nothing beside the target that is trained
    target = toys.target(seed=9)
    built = [{name: spec.build(target=target, draft=None) for name, spec in specs.items()} for _ in range(2)]
    (base,) = loads
    for decoders in built:
        assert all(decoders[name].target is base for name in BASES)
        assert all(decoders[name].target is target for name in TRAINED)
    assert {specs[name].baseline for name in BASES} == {"base_autoregressive"}
    assert {specs[name].baseline for name in TRAINED} == {"autoregressive"}


def test_the_base_decodes_in_the_targets_dtype(toys: SimpleNamespace) -> None:
    """Trained weights may have been cast; a baseline in another precision would be another baseline."""
    target, base = toys.target(), toys.target(seed=1, dtype=torch.float32)
    decoder = on_base(target=target, draft=None, base=lambda: base, build=build_ar)
    assert decoder.target is base  # type: ignore[attr-defined]
    assert base.dtype == target.dtype == torch.float64


def test_flat_keys_reach_the_decoder(toys: SimpleNamespace) -> None:
    said = ["blocks=3", "block_size=5", "activation=0.5", "pool_size=2", "candidates=1"]
    cfg = composed("eval", ["target=tiny", "decoder=jacobi", *(f"decoder.jacobi.{key}" for key in said)])
    decoder = instantiate_decoders(cfg)["jacobi"].build(target=toys.target(), draft=None)
    settings = decoder.settings(GREEDY)
    assert {key: settings[key] for key in ("blocks", "block_size", "activation", "pool_size", "candidates")} == {
        "blocks": 3, "block_size": 5, "activation": 0.5, "pool_size": 2, "candidates": 1,
    }  # fmt: skip


def test_any_subset_decoders_refer_to_the_sequential_one(toys: SimpleNamespace) -> None:
    """Plain AR cannot fill in; and every key reaches the decoder."""
    said = ["num_drafts=3", "bonus=true", "tolerance=0.1"]
    names = "decoder=[any_subset,assd,assd_ngram]"
    specs = instantiate_decoders(composed("eval", ["target=tiny", names, *(f"decoder.assd.{key}" for key in said)]))
    built = {name: spec.build(target=toys.target(), draft=None) for name, spec in specs.items()}
    own = {
        name: {k: v for k, v in d.settings(GREEDY).items() if k not in GREEDY.to_dict()} for name, d in built.items()
    }
    assert own == {
        "any_subset": {"num_drafts": 1, "drafted_by": "model", "bonus": False, "tolerance": 0.0},
        "assd": {"num_drafts": 3, "drafted_by": "model", "bonus": True, "tolerance": 0.1},
        "assd_ngram": {"num_drafts": 5, "drafted_by": "bigrams", "bonus": False, "tolerance": 0.0},
    }
    assert {name: d.lossless for name, d in built.items()} == {"any_subset": True, "assd": False, "assd_ngram": True}
    assert {spec.baseline for spec in specs.values()} == {"any_subset"}
    base = instantiate_decoders(composed("eval", ["target=tiny", "decoder=assd", "decoder.assd.weights=base"]))
    assert base["assd"].baseline == "base_any_subset"
    assert base["assd"].baseline in variants(VARIANTS)
    with pytest.raises(UserError, match="drafted_by=bigram:"):
        instantiate_decoders(composed("eval", ["target=tiny", "decoder=assd", "decoder.assd.drafted_by=bigram"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, *variants(VARIANTS)])
def test_every_name_is_a_choice_with_numbers_of_its_own(name: str, toys: SimpleNamespace) -> None:
    line = variants(VARIANTS).get(name, {"decoder": name})
    beside = [line["decoder"]] if line.get("weights") == "base" else []
    cfg = composed("eval", ["target=tiny", "checkpoint=a", f"decoder=[{','.join([name, *beside])}]", "label=mine"])
    node = cfg.decoder[name]
    if name == "scheduled":
        node.scheduler = "static"  # others need a step table
    assert not any(isinstance(value, dict) for value in node.values())
    assert {key: node[key] for key in line if key not in ("decoder", "label")} == {
        key: value for key, value in line.items() if key not in ("decoder", "label")
    }
    if not beside:
        target = toys.target()
        draft = toys.draft(target, head="vanilla")
        instantiate_decoders(cfg)[name].build(target=target, draft=draft)


def test_a_decoder_of_the_base_has_the_settings_of_the_one_it_names() -> None:
    own = ["decoder=[base_jacobi,base_jacobi_single,jacobi,jacobi_single]", "decoder.jacobi.blocks=3"]
    cfg = composed("eval", ["target=tiny", *own, "decoder.jacobi_single.activation=0.5"])
    for name in ("jacobi", "jacobi_single"):
        same = set(cfg.decoder[name]) - {"label", "weights"}
        assert {key: cfg.decoder[f"base_{name}"][key] for key in same} == {key: cfg.decoder[name][key] for key in same}
    assert cfg.decoder.base_jacobi.label == "base, K=3 + recycling"
    with pytest.raises(UserError, match=r"use decoder=\[...,base_jacobi,jacobi\]"):
        composed("eval", ["target=tiny", "decoder=base_jacobi"])


LABELS = {  # as results and tables had them when each decoder was a file of its own
    "autoregressive": "AR", "speculative": "L", "speculative_head_off": "L, head off",
    "scheduled": "L, synchronous",
    "refined_once": "L, refined once", "refined_twice": "L, refined twice", "prompt_lookup": "prompt lookup",
    "jacobi": "L, K=2 + recycling",
    "jacobi_single": "L, Jacobi", "jacobi_recycling": "L, recycling", "jacobi_multiblock": "L, K=2",
    "base_autoregressive": "AR base", "base_jacobi": "base, K=2 + recycling", "base_jacobi_single": "base, Jacobi",
    "base_jacobi_recycling": "base, recycling", "base_jacobi_multiblock": "base, K=2",
    "diffusion": "diffusion", "base_diffusion": "base, diffusion", "d2f": "D2F", "lopa": "LoPA, k=14",
    "fast_dllm": "confidence > 0.9", "base_fast_dllm": "base, confidence > 0.9",
    "fast_dllm_prefix": "confidence > 0.9, prefix (approximate)",
    "fast_dllm_dual": "confidence > 0.9, dual (approximate)",
    "lopa_block_causal": "LoPA, k=14, block-causal", "lopa_uncached": "LoPA, k=14, uncached",
    "base_any_subset": "base, any-subset", "any_subset": "any-subset", "assd": "ASSD", "assd_ngram": "ASSD, n-gram",
    "sigma_gpt": "sigma-GPT (biased)",
}  # fmt: skip


def test_labels_are_those_of_older_results() -> None:
    cfg = composed("eval", ["target=tiny", "checkpoint=a", "label=L", f"decoder=[{','.join(LABELS)}]"])
    assert {str(name): node.label for name, node in cfg.decoder.items()} == LABELS
    assert LABELS.keys() == {*FILES, *variants(VARIANTS)}


def test_a_variant_cannot_set_what_its_decoder_lacks(tmp_path: Any) -> None:
    table = tmp_path / "decoder_variants.yaml"
    table.write_text(yaml.safe_dump({"wide": {"decoder": "jacobi", "blcks": 4}}))
    with pytest.raises(UserError, match="wide sets blcks"):
        store_variants(table, CONF / "decoder")


def test_weights_are_trained_or_base() -> None:
    cfg = composed("eval", ["target=tiny", "decoder.autoregressive.weights=old"])
    with pytest.raises(UserError, match="weights=old must be trained"):
        instantiate_decoders(cfg)


def test_decoders_of_diffusion_models(toys: SimpleNamespace) -> None:
    """Their baseline is diffusion, one token a pass; every key reaches the decoder."""
    names = ["diffusion", "fast_dllm", "d2f", "lopa"]
    said = [
        "decoder.diffusion.tokens_per_step=2", "decoder.diffusion.block_size=8",
        "decoder.diffusion.attention=block_causal", "decoder.fast_dllm.threshold=0.7",
        "decoder.fast_dllm.block_size=null", "decoder.fast_dllm.cache=dual",
        "decoder.fast_dllm.attention=full", "decoder.d2f.append_ratio=0.3", "decoder.d2f.activate_ratio=0.8",
        "decoder.d2f.threshold=0.6", "decoder.d2f.block_size=5", "decoder.lopa.window_attention=block_causal",
        "decoder.lopa.branches=2", "decoder.lopa.branch_score=lowest_segment", "decoder.lopa.segment=3",
        "decoder.lopa.confidence_measure=entropy", "decoder.lopa.cache=none", "decoder.lopa.block_size=6",
        "decoder.lopa.append_ratio=0.25", "decoder.lopa.activate_ratio=0.5", "decoder.lopa.threshold=0.4",
    ]  # fmt: skip
    cfg = composed("eval", ["target=tiny", f"decoder=[{','.join(names)}]", *said])
    specs = instantiate_decoders(cfg)
    told = {name: spec.build(target=toys.target(), draft=None).settings(GREEDY) for name, spec in specs.items()}
    same = {
        "temperature": 0.0,
        "top_p": 1.0,
        "trained_attention": None,
        "trained_block_size": None,
        "logit_shift": False,
        "not_as_trained": [],
        "processes": 1,
    }
    alone = same | {"branches": 0, "branch_score": "mean", "segment": 1, "confidence_measure": "probability"}
    one_by_one = {"append_ratio": 1.0, "activate_ratio": 1.0}
    exact = {"attention": "block_causal", "cache": "committed"}
    assert told == {
        "diffusion": alone | one_by_one | exact | {"block_size": 8, "threshold": 1.0, "min_fills": 2},
        "fast_dllm": alone
        | one_by_one
        | {"attention": "full", "cache": "dual", "block_size": None, "threshold": 0.7, "min_fills": 1},
        "d2f": alone
        | exact
        | {"block_size": 5, "append_ratio": 0.3, "activate_ratio": 0.8, "threshold": 0.6, "min_fills": 1},
        "lopa": same
        | {
            "block_size": 6,
            "append_ratio": 0.25,
            "activate_ratio": 0.5,
            "threshold": 0.4,
            "min_fills": 1,
            "cache": "none",
        }
        | {"attention": "block_causal", "branches": 2, "branch_score": "lowest_segment", "segment": 3}
        | {"confidence_measure": "entropy"},
    }
    assert {spec.baseline for spec in specs.values()} == {"diffusion"}
    chosen = "diffusion,fast_dllm,base_diffusion,base_fast_dllm"
    base = instantiate_decoders(composed("eval", ["target=tiny", f"decoder=[{chosen}]"]))
    assert [spec.baseline for spec in base.values()] == ["diffusion"] * 2 + ["base_diffusion"] * 2


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("d2f.threshold=1.2", "threshold=1.2"), ("d2f.append_ratio=-1", "append_ratio=-1"),
        ("d2f.activate_ratio=7", "activate_ratio=7"),
        ("d2f.block_size=0", "block_size=0"), ("lopa.branches=-1", "branches=-1"),
        ("lopa.cache=exact", "cache=exact"), ("lopa.branch_score=max", "branch_score=max"),
        ("lopa.window_attention=causal", "attention=causal"), ("diffusion.tokens_per_step=0", "at least 1"),
        ("fast_dllm.cache=prefixes", "cache=prefixes"),
        ("lopa.confidence_measure=best", "confidence_measure=best"),
        ("jacobi.block_size=null", "jacobi.block_size=null must be an integer"),
    ],
)  # fmt: skip
def test_bad_values_of_diffusion_decoders(said: str, words: str, toys: SimpleNamespace) -> None:
    name = said.partition(".")[0]

    def build() -> None:
        cfg = composed("eval", ["target=tiny", f"decoder={name}", f"decoder.{said}"])
        instantiate_decoders(cfg)[name].build(target=toys.target(), draft=None)

    with pytest.raises(UserError, match=words):
        build()
