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
from dspec.models.target import embedded_target

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
    method = instantiate(cfg.method, target=target, draft=instantiate(cfg.draft, target=target))
    assert [p for p in method.parameters() if p.requires_grad]


def test_command_line_beats_recipe() -> None:
    cfg = composed("dspark", "draft.markov_head_type=rnn", "data=gsm8k")
    assert cfg.draft.markov_head_type == "rnn"
    assert cfg.benchmark.gsm8k._target_.endswith("Gsm8k")  # benchmark and trainer follow the data
    assert cfg.trainer.precision == "bf16-mixed"


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
