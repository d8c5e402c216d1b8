"""Every recipe composes, builds on a tiny target, opens as recipes must, and is what was last reviewed.

After a wanted change of a config: python tests/test_recipes.py  (rewrites tests/composed/), then read the diff.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from dspec.config import CONF, ROOT, instantiate, register
from dspec.models.language_model import embedded_target

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
COMPOSED = Path(__file__).parent / "composed"


def composed(recipe: str, *overrides: str) -> DictConfig:
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[f"recipe={recipe}", *overrides])


def plain(recipe: str) -> dict[str, Any]:
    return OmegaConf.to_container(composed(recipe), resolve=False)  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", RECIPES)
def test_composed_config_is_the_reviewed_one(recipe: str) -> None:
    assert plain(recipe) == yaml.safe_load((COMPOSED / f"{recipe}.yaml").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_opens_with_command_and_expectations(recipe: str) -> None:
    head = (ROOT / "recipes" / f"{recipe}.yaml").read_text().split("defaults:")[0]
    for word in ("# Source:", "# Command:", "# Hardware:", "# Expect:"):
        assert word in head


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "ar_base"])
def test_recipe_builds_its_method(recipe: str) -> None:
    cfg = composed(recipe)
    target = embedded_target(dtype="float32", device="cpu")
    draft = {} if cfg.draft is None else {"draft": instantiate(cfg.draft, target=target)}
    method = instantiate(cfg.method, target=target, **draft)
    assert [p for p in method.parameters() if p.requires_grad]


def test_command_line_beats_recipe() -> None:
    cfg = composed("dspark", "draft.markov_head_type=rnn", "data=gsm8k")
    assert cfg.draft.markov_head_type == "rnn"
    assert cfg.benchmark.gsm8k._target_.endswith("Gsm8k")  # benchmark and trainer follow the data
    assert cfg.trainer.precision == "bf16-mixed"


def test_jacobi_forcing_composes_with_other_targets_and_data() -> None:
    cfg = composed("jacobi_forcing", "target=smollm2_135m", "data=gsm8k")
    assert cfg.data._target_.endswith("Trajectories")
    assert cfg.data.source._target_.endswith("Gsm8kPrompts")
    assert cfg.data.regeneration.temperature == 0
    assert cfg.decoder.jacobi.build.plan.block_size == cfg.data.block_size
    assert cfg.decoder.base_jacobi.build.base._target_ == cfg.target._target_
    assert cfg.decoder.base_jacobi.build.build == cfg.decoder.jacobi.build
    few = composed("jacobi_forcing", "decoder=[autoregressive,jacobi]")
    assert set(few.decoder) == {"autoregressive", "jacobi"}


def test_jacobi_decoders_have_the_papers_settings_and_their_own() -> None:
    names = ["jacobi", "jacobi_single", "jacobi_recycling", "jacobi_multiblock"]
    cfg = composed("dspark", f"decoder=[autoregressive,{','.join(names)}]")
    plans = {name: cfg.decoder[name].build.plan for name in names}
    assert plans["jacobi"].block_size == 64
    assert (plans["jacobi"].blocks, plans["jacobi"].candidates, plans["jacobi"].activation) == (2, 4, 0.85)
    assert {name: (p.blocks, p.candidates) for name, p in plans.items()} == {
        "jacobi": (2, 4), "jacobi_single": (1, 0), "jacobi_recycling": (1, 4), "jacobi_multiblock": (2, 0),
    }  # fmt: skip
    labels = OmegaConf.to_container(cfg.decoder, resolve=False)
    assert len({labels[name]["method"] for name in names}) == 4  # type: ignore[call-overload,index]


def test_dspark_and_dflash_differ_only_in_what_makes_dspark() -> None:
    dspark, dflash = plain("dspark"), plain("dflash")
    for group in ("data", "trainer", "target", "benchmark", "evaluation", "seed"):
        assert dspark[group] == dflash[group]
    odd = {k for k in dspark["draft"] if dspark["draft"][k] != dflash["draft"][k]}
    assert odd == {"markov_head_type", "markov_rank", "confidence_head", "confidence_head_with_markov"}
    odd = {k for k in dflash["method"] if dspark["method"][k] != dflash["method"][k]}
    assert odd == {"_target_", "ce_weight", "tv_weight"}


if __name__ == "__main__":
    COMPOSED.mkdir(exist_ok=True)
    for name in RECIPES:
        (COMPOSED / f"{name}.yaml").write_text(OmegaConf.to_yaml(composed(name), resolve=False))
