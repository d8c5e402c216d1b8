"""The pages in recipes/sweeps compose, build what they name, and open as recipes must."""

from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from dspec.config.compose import CONF, ROOT, composed, instantiate, instantiate_decoders, register
from eval.reports.curves import CurveReport
from eval.reports.samplers import SamplerReport

PAGES = {path.stem: path for path in sorted((ROOT / "recipes" / "sweeps").glob("*.yaml"))}
DECODERS = ("samplers", "assd_drafts", "assd_tolerance", "assd_length", "assd_left_to_right")
CURVES = {"lopa_branches": "branches", "diffusion_frontier": "threshold", "diffusion_table": None}
TRAINING = {
    "as_arm_order": {"method.order": "sorted,random"},
    "as_arm_rate": {"method.rate.low": "[0.15,0.90],[0.15,0.15]"},
    "as_arm_warmup": {"method.rate.steps": "60,0"},
    "as_arm_initialisation": {"target": "tiny,tiny_fresh"},
}


def test_every_page_is_tested_and_says_what_it_is() -> None:
    assert PAGES.keys() >= {*DECODERS, *TRAINING, *CURVES, "jacobi_config", "lopa", "serving_calibration"}
    for name, path in PAGES.items():
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        said = [line.split(":")[0] for line in head]
        assert {"# Source", "# Command", "# Hardware", "# Expect"} <= set(said), name
        assert f"recipe=sweeps/{name}" in "".join(head)


def page(name: str) -> DictConfig:
    return composed("eval", ["target=tiny", f"recipe=sweeps/{name}"])


@pytest.mark.parametrize("name", DECODERS)
def test_sweeps_over_decoders_build(name: str) -> None:
    cfg = page(name)
    specs = instantiate_decoders(cfg)
    assert {spec.baseline for spec in specs.values()} == {"any_subset"}
    assert next(iter(specs)) == "any_subset"
    assert cfg.evaluation.temperatures == [1.0]
    assert isinstance(instantiate(cfg.report), SamplerReport)


def test_what_the_sweeps_vary() -> None:
    drafts, tolerance = page("assd_drafts").decoder, page("assd_tolerance").decoder
    assert [d.num_drafts for d in list(drafts.values())[1:]] == [2, 3, 4, 5, 6, 8, 10, 15, 20]
    assert [d.tolerance for d in list(tolerance.values())[1:]] == [0, 1e-4, 1e-3, 1e-2, 5e-2, 1e-1]
    assert [d.label for d in list(drafts.values())[1:3]] == ["k=2", "k=3"]
    assert {d.tolerance for d in list(drafts.values())[1:]} == {0}
    assert [b.length for b in page("assd_length").benchmark.values()] == [128, 256, 512, 640, 768, 896, 1024]
    assert [b["count"] for b in page("samplers").benchmark.values()] == [520, 520]
    rows = page("assd_left_to_right").benchmark
    assert {name: (b.length, b.length - round(b.hidden * b.length)) for name, b in rows.items()} == {
        "prefix_128": (512, 128), "prefix_26": (512, 26),
    }  # fmt: skip
    assert all(b.left_to_right for b in rows.values())
    assert "limit=471" in PAGES["assd_left_to_right"].read_text()  # limit=null would be the page's own number


def test_other_benchmarks_replace_those_of_the_page() -> None:
    """With the page's numbers for them: those alone would be no benchmark."""
    cfg = composed("eval", ["target=tiny", "recipe=sweeps/samplers", "benchmark=wikitext_infilling", "limit=640"])
    assert {key: b.limit for key, b in cfg.benchmark.items()} == {"wikitext_95": 640}


LOPA_TABLE_5 = {  # block size, tau_add, tau_act, tau_conf, branches
    "gsm8k": (32, 0.1, 0.95, 0.9, 14), "math": (16, 0.1, 0.95, 0.9, 7), "humaneval": (32, 0.3, 0.95, 0.95, 7),
    "mbpp": (32, 0.3, 0.95, 0.95, 7), "humanevalplus": (32, 0.3, 0.95, 0.95, 6), "mbppplus": (32, 0.3, 0.95, 0.9, 14),
}  # fmt: skip


def test_settings_of_lopas_table_5() -> None:
    """The other values are those of decoder=lopa."""
    cfg = page("lopa")
    keys = ("block_size", "append_ratio", "activate_ratio", "threshold", "branches")
    assert list(cfg.decoder) == ["diffusion", "d2f", *LOPA_TABLE_5]
    assert {name: tuple(cfg.decoder[name][key] for key in keys) for name in LOPA_TABLE_5} == LOPA_TABLE_5
    plain = composed("eval", ["target=tiny", "decoder=lopa"]).decoder.lopa
    for name in LOPA_TABLE_5:
        other = {key: value for key, value in cfg.decoder[name].items() if key not in (*keys, "label")}
        assert other == {key: value for key, value in plain.items() if key not in (*keys, "label")}
    assert {spec.baseline for spec in instantiate_decoders(cfg).values()} == {"diffusion"}


@pytest.mark.parametrize("name", CURVES)
def test_curves_of_diffusion_decoders(name: str) -> None:
    """At equal blocks; each decoder has its baseline; settings are chosen on other prompts than the reported ones."""
    cfg = page(name)
    specs = instantiate_decoders(cfg)
    assert {spec.baseline for spec in specs.values()} <= {"diffusion", "base_diffusion"}
    assert {spec.baseline for spec in specs.values()} <= specs.keys()
    assert len({spec.label for spec in specs.values()}) == len(specs)
    assert {node.block_size for node in cfg.decoder.values()} == {16}
    assert cfg.evaluation.temperatures == [0.0]
    report = instantiate(cfg.report)
    assert isinstance(report, CurveReport)
    assert report.along == CURVES[name]
    splits = {node.split for node in cfg.benchmark.values()}
    prompts = sum(node["count"] for node in cfg.benchmark.values())
    if name == "diffusion_table":
        assert (splits, prompts >= 500) == ({"test"}, True)
    else:
        assert splits == {"calibration"}


def test_what_the_curves_vary() -> None:
    """Nothing but the setting along a curve, nor but the named difference between two curves."""
    branches = page("lopa_branches").decoder
    for prefix, window in (("full", "full"), ("causal", "block_causal")):
        curve = {key: node for key, node in branches.items() if key.startswith(f"{prefix}_")}
        assert [node.branches for node in curve.values()] == [0, 1, 2, 4, 7, 14]
        assert {node.window_attention for node in curve.values()} == {window}
        assert len({str(_without(node, "branches", "label")) for node in curve.values()}) == 1
    frontier = page("diffusion_frontier").decoder
    rules = ("block_size", "append_ratio", "activate_ratio")
    base, d2f, lopa = (80, 90, 95), (70, 80, 90, 95, 98), (80, 90, 95, 98)
    for prefix, points in (("base", base), ("base_causal", base), ("d2f", d2f), ("lopa", lopa)):
        curve = {f: frontier[f"{prefix}_{f}"] for f in points}
        assert {node.threshold for node in curve.values()} == {f / 100 for f in points}
        assert len({str(_without(node, "threshold", "label")) for node in curve.values()}) == 1
        assert {node.weights for node in curve.values()} == {"base" if prefix.startswith("base") else "trained"}
        if "base" not in prefix:
            assert [curve[80][key] for key in rules] == [16, 0.5, 0.95]
    assert (frontier.base_80.attention, frontier.base_causal_80.attention) == ("full", "block_causal")
    assert frontier.lopa_80.window_attention == "full"
    assert len(frontier) == 2 + 15
    table = page("diffusion_table").decoder
    assert (table.lopa.branches, table.lopa_block_causal.window_attention) == (1, "block_causal")
    assert table.base_diffusion.block_size == table.base_fast_dllm.block_size == 16


def _without(node: DictConfig, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}  # type: ignore[misc]


@pytest.mark.parametrize("name", TRAINING)
def test_sweeps_over_training_compose(name: str) -> None:
    """Each job is recipe=as_arm with one key changed, evaluated as the paper's figures are (95 % hidden, temperature 1)
    and by verdicts."""
    plain_args = ["recipe=as_arm", "decoder=[any_subset,assd]", "benchmark=[tiny_text_infilling,tiny_infilling]"]
    plain_args += ["evaluation.temperatures=[1.0]", "report._target_=eval.reports.samplers.SamplerReport"]
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        swept = compose("train", overrides=[f"recipe=sweeps/{name}"], return_hydra_config=True)
        plain: Any = OmegaConf.to_container(compose("train", overrides=plain_args), resolve=False)
    assert swept.hydra.mode.name == "MULTIRUN"
    assert swept.hydra.sweeper.params == TRAINING[name]
    job: Any = {key: value for key, value in OmegaConf.to_container(swept, resolve=False).items() if key != "hydra"}  # type: ignore[union-attr]
    assert job == plain
    assert job["benchmark"]["stories_95"]["hidden"] == 0.95
    for key, values in TRAINING[name].items():
        texts = [str(value).replace(" ", "") for value in yaml.safe_load(f"[{values}]")]
        pages = [f"recipe=sweeps/{name}", "recipe=as_arm"]
        swept, alone = ([OmegaConf.select(composed("train", [p, f"{key}={t}"]), key) for t in texts] for p in pages)
        assert swept == alone
        assert swept[0] != swept[1]
