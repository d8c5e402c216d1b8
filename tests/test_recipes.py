"""Every recipe composes, builds, opens as recipes must, shows its numbers, and is what was last reviewed.

After a wanted change of a config: python tests/test_recipes.py  (rewrites recipes/composed/), then read the diff.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dspec.config.compose import CONF, ROOT, VARIANTS, instantiate, register
from dspec.config.recipes import variants
from dspec.config.types import check_types
from dspec.models.language_model import embedded_target
from dspec.models.training_record import TrainingRecord

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
COMPOSED = ROOT / "recipes" / "composed"


def composed(recipe: str | None, *overrides: str) -> DictConfig:
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[*([] if recipe is None else [f"recipe={recipe}"]), *overrides])


def files(*overrides: str) -> set[Path]:
    """The files that a run is composed from, by Hydra's own defaults list."""
    register()
    loader = ConfigLoaderImpl(create_config_search_path(str(CONF)))
    names = [str(d.config_path) for d in loader.compute_defaults_list("train", list(overrides), RunMode.RUN).defaults]
    found = {path for name in names if (path := CONF / f"{name}.yaml").is_file()}
    found |= {ROOT / "recipes" / f"{name.removeprefix('recipe/')}.yaml" for name in names if name.startswith("recipe/")}
    table = {f"decoder/{name}" for name in variants(VARIANTS)}
    return found | ({VARIANTS} if table & set(names) else set())


def plain(recipe: str) -> dict[str, Any]:
    return OmegaConf.to_container(composed(recipe), resolve=False)  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", RECIPES)
def test_composed_config_is_the_reviewed_one(recipe: str) -> None:
    assert plain(recipe) == yaml.safe_load((COMPOSED / f"{recipe}.yaml").read_text())
    assert f"# Composed: recipes/composed/{recipe}.yaml" in (ROOT / "recipes" / f"{recipe}.yaml").read_text()
    assert len(list(COMPOSED.iterdir())) == len(RECIPES)


@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        ("dspark", 8),
        ("dflash", 8),
        ("jacobi_forcing", 10),
        ("cllm", 10),
        ("ar_base", 8),
        ("as_arm", 9),
        ("as_arm_text", 9),
        ("dllm_base", 9),
        ("d2f", 11),
    ],
)
def test_a_recipe_is_composed_from_few_files(recipe: str, most: int) -> None:
    found = files(f"recipe={recipe}")
    assert {CONF / "train.yaml", ROOT / "recipes" / f"{recipe}.yaml"} < found
    assert len(found) <= most, sorted(found)


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for key, inner in node.items() for k, v in leaves(inner, f"{path}.{key}".lstrip(".")).items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_alone_shows_every_number_of_its_run(recipe: str) -> None:
    """But for those of what users swap (target, schedule, a benchmark that follows the data) and of the instruments."""
    page, whole = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text()), plain(recipe)
    cfg = leaves({key: whole[key] for key in ("method", "draft", "data", "optimizer", "calibration")})
    sizes = "accelerator precision max_steps accumulate_grad_batches gradient_clip_val val_check_interval".split()
    cfg |= leaves({"trainer": {key: whole["trainer"][key] for key in sizes}})
    cfg |= leaves({"evaluation": {key: whole["evaluation"][key] for key in ("temperatures", "top_p", "batch_size")}})
    cfg |= leaves({"decoder": whole["decoder"]})
    if any("override /benchmark" in entry for entry in page["defaults"]):
        cfg |= {k: v for k, v in leaves({"benchmark": whole["benchmark"]}).items() if ".judge." not in k}
    shown = leaves(page)
    numbers = {k: v for k, v in cfg.items() if not k.startswith("method.schedule") and not str(v).startswith("${")}
    numbers = {k: v for k, v in numbers.items() if isinstance(v, int | float | list) and not isinstance(v, bool)}
    assert len(numbers) > 15
    assert {key: shown.get(key) for key in numbers} == numbers


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_number_lives_once(recipe: str) -> None:
    """What a page sets stands in no other file that its run is composed from (but as ???, or as another label). Files
    of decoders and benchmarks, which eval.run uses without a page, have the same values as the pages."""
    page = leaves(yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text()))
    for path in files(f"recipe={recipe}") - {ROOT / "recipes" / f"{recipe}.yaml", VARIANTS}:
        group = path.parent.relative_to(CONF).as_posix().replace("/", ".")
        where = {"conf": "", "decoder": f"decoder.{path.stem}"}.get(path.parent.name, group)
        other = {k: v for k, v in leaves(yaml.safe_load(path.read_text()), where).items() if v != "???"}
        twice = {key for key in page.keys() & other.keys() if key != "defaults" and not key.endswith("label")}
        assert {key for key in twice if not key.startswith(("decoder.", "benchmark."))} == set(), path
        assert {key: page[key] for key in twice} == {key: other[key] for key in twice}, path


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_page_sets_arrives(recipe: str) -> None:
    """Numbers for a decoder that the page does not choose would be dropped."""
    page = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    body = {key: value for key, value in leaves(page).items() if not key.startswith(("defaults", "pretrained."))}
    found = leaves(plain(recipe))
    assert {key: found.get(key) for key in body} == body


def test_pages_numbers_go_with_their_own_decoders_and_benchmarks() -> None:
    """Other choices bring no remains of them: as in benchmark=gsm8k on the page of AS-ARM."""
    few = composed("jacobi_forcing", "decoder=[autoregressive,jacobi]")
    assert set(few.decoder) == {"autoregressive", "jacobi"}
    assert few.decoder.autoregressive.label == f"{few.label}, AR"  # the weights' name, however it is chosen
    assert few.decoder.jacobi.blocks == 2
    few = composed("as_arm", "decoder=any_subset", "benchmark=gsm8k")
    assert (set(few.decoder), set(few.benchmark)) == ({"any_subset"}, {"gsm8k"})
    more = composed("as_arm", "decoder.assd.num_drafts=8", "benchmark.filled_problems.hidden=0.6")
    assert (more.decoder.assd.num_drafts, more.benchmark.filled_problems.hidden) == (8, 0.6)
    assert more.decoder.assd_ngram.num_drafts == 5


def test_no_recipe_is_dspark() -> None:
    assert OmegaConf.to_container(composed(None), resolve=False) == plain("dspark")


PRETRAINED = {  # what scale=pretrained sets
    "data.source.train": 6000, "data.source.calibration": 600, "data.regeneration.max_new_tokens": 512,
    "data.regeneration.top_p": 0.8, "data.regeneration.batch_size": 16, "data.max_length": 1024,
    "data.sort_window": 256, "data.validation": 16, "trainer.max_steps": 2000, "trainer.val_check_interval": 200,
    "trainer.accelerator": "auto",
}  # fmt: skip
DRAFTER = {"data.regeneration.temperature": 0.7, "data.batch_size": 8, "optimizer.optimizer.lr": 6e-4}
FORCING = {
    "data.regeneration.temperature": 0.0, "data.batch_size": 2, "optimizer.optimizer.lr": 1e-5, "data.block_size": 64,
    "data.row_length": 2048,
}  # fmt: skip


OWN = {
    "dspark": DRAFTER, "dflash": DRAFTER, "jacobi_forcing": FORCING, "cllm": FORCING,
    "as_arm": {"data.batch_size": 4, "optimizer.optimizer.lr": 1e-5},
    "dllm_base": {"data.batch_size": 4, "optimizer.optimizer.lr": 1e-5},
    "d2f": {"data.batch_size": 4, "optimizer.optimizer.lr": 1e-5},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("data", ["gsm8k", "jsonl"])
@pytest.mark.parametrize(("recipe", "own"), OWN.items())
def test_a_pretrained_target_has_numbers_of_its_own(recipe: str, own: dict[str, Any], data: str) -> None:
    cfg = composed(recipe, "target=qwen3_4b", f"data={data}", "benchmark=gsm8k")
    wanted = {k: v for k, v in PRETRAINED.items() if not k.startswith("data.regeneration") or cfg.data.regeneration}
    wanted |= own | {"trainer.precision": "bf16-mixed"}
    assert {key: OmegaConf.select(cfg, key) for key in wanted} == wanted
    changed = composed(recipe, f"data={data}", "data.batch_size=3", "optimizer.optimizer.lr=1e-2")
    assert (changed.data.batch_size, changed.optimizer.optimizer.lr) == (3, 1e-2)


@pytest.mark.parametrize(
    ("recipe", "args", "found"),
    [
        ("as_arm", ["data=gsm8k"], (4, 1e-5, "32-true")),  # the embedded target is in float32
        ("dspark", ["data=gsm8k", "target=smollm2_135m"], (8, 6e-4, "bf16-mixed")),
        ("dspark", ["data=gsm8k", "scale=embedded"], (16, 8e-3, "32-true")),
        ("dspark", ["data=mine"], (16, 8e-3, "32-true")),
        ("dspark", ["data=mine", "scale=pretrained", "target=qwen3_4b"], (8, 6e-4, "bf16-mixed")),
        ("dspark", ["data=my_pretraining"], (5, 6e-4, "32-true")),
    ],
)
def test_any_data_may_go_with_the_numbers_for_pretrained_targets(
    tmp_path: Path, recipe: str, args: list[str], found: tuple[int, float, str]
) -> None:
    """Chosen on the command line, or by the data's own file, whose numbers then come after them."""
    (tmp_path / "data").mkdir()
    text = (CONF / "data" / "gsm8k.yaml").read_text()
    (tmp_path / "data" / "my_pretraining.yaml").write_text(f"{text}batch_size: 5\n")
    lines = [line for line in text.splitlines() if "defaults" not in line and "override" not in line]
    (tmp_path / "data" / "mine.yaml").write_text("\n".join(lines))
    cfg = composed(recipe, *args, "benchmark=tiny", f"hydra.searchpath=[file://{tmp_path}]")
    assert (cfg.data.batch_size, cfg.optimizer.optimizer.lr, cfg.trainer.precision) == found
    assert cfg.data.source._target_.endswith("Gsm8kPrompts")


def test_a_recipe_of_ones_own_has_the_last_word(tmp_path: Path) -> None:
    """Over the page it begins with, and over the numbers for pretrained targets."""
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ndefaults: [jacobi_forcing, override /data: gsm8k, override /method/schedule: reverse, "
    text += "_self_]\ndata: {batch_size: 5}\nmethod: {schedule: {window: 7}}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    cfg = composed("mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert (cfg.data.batch_size, cfg.data.block_size, cfg.optimizer.optimizer.lr) == (5, 64, 1e-5)
    assert (cfg.method.schedule._target_.rpartition(".")[2], cfg.method.schedule.window) == ("Reverse", 7)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_hardware_goes_before_page_and_data(hardware: str) -> None:
    wanted = {"cpu": ("cpu", "32-true"), "gpu": ("cuda", "bf16-mixed")}[hardware]
    for more in ([], ["data=gsm8k"], ["data=jsonl", "benchmark=tiny"]):
        trainer = composed("dspark", f"hardware={hardware}", *more).trainer
        assert (trainer.accelerator, trainer.precision) == wanted


@pytest.mark.parametrize("recipe", ["dspark", "ar_base"])
def test_hardware_gpu_is_the_targets_too_unless_the_command_line_says_otherwise(recipe: str) -> None:
    cfg = composed(recipe, "hardware=gpu")
    assert (cfg.trainer.accelerator, cfg.target.device) == ("cuda", "cuda")
    check_types(cfg.target)  # each target takes a device
    assert composed(recipe, "hardware=gpu", "target.device=cpu").target.device == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("group", ["schedule", "teacher", "tuning"])
def test_parts_of_jacobi_forcing_are_swapped_whole(group: str) -> None:
    """None leaves a setting behind that its successor does not take; what the page says of tuning stays."""
    for path in sorted((CONF / "method" / group).glob("*.yaml")):
        for recipe in ("jacobi_forcing", "cllm"):
            node = composed(recipe, f"method/{group}={path.stem}").method[group]
            assert node._target_ == yaml.safe_load(path.read_text())["_target_"]
            assert instantiate(node) is not None
            if group == "tuning":
                assert node.interpolation == {"jacobi_forcing": 0.75, "cllm": 1.0}[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_opens_with_command_and_expectations(recipe: str) -> None:
    head = (ROOT / "recipes" / f"{recipe}.yaml").read_text().split("defaults:")[0]
    for word in ("# Source:", "# Command:", "# Hardware:", "# Expect:", "# Composed:"):
        assert word in head
    assert "not measured" not in head  # what a run gives, or why nobody can say


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "ar_base"])
def test_recipe_builds_its_method(recipe: str) -> None:
    cfg = composed(recipe)
    target = embedded_target(dtype="float32", device="cpu")
    TrainingRecord("full", 16, shift=True).write(target)  # what D2F begins with
    draft = {} if cfg.draft is None else {"draft": instantiate(cfg.draft, target=target)}
    method = instantiate(cfg.method, target=target, **draft)
    assert [p for p in method.parameters() if p.requires_grad]


def test_command_line_beats_recipe() -> None:
    cfg = composed("dspark", "draft.markov_head_type=rnn", "data=gsm8k", "target.dtype=bfloat16")
    assert cfg.draft.markov_head_type == "rnn"
    assert cfg.benchmark.gsm8k._target_.endswith("Gsm8k")  # benchmark and trainer follow the data
    assert cfg.trainer.precision == "bf16-mixed"


def test_jacobi_forcing_composes_with_other_targets_and_data() -> None:
    cfg = composed("jacobi_forcing", "target=smollm2_135m", "data=gsm8k")
    assert cfg.data._target_.endswith("Trajectories")
    assert cfg.data.source._target_.endswith("Gsm8kPrompts")
    assert cfg.data.regeneration.temperature == 0
    assert cfg.decoder.base_jacobi.block_size == cfg.decoder.jacobi.block_size == cfg.data.block_size
    few = composed("jacobi_forcing", "decoder=[autoregressive,jacobi]")
    assert set(few.decoder) == {"autoregressive", "jacobi"}


def test_jacobi_decoders_have_the_papers_settings_and_their_own() -> None:
    names = ["jacobi", "jacobi_single", "jacobi_recycling", "jacobi_multiblock"]
    cfg = composed("dspark", f"decoder=[autoregressive,{','.join(names)}]")
    configs = {name: cfg.decoder[name] for name in names}
    assert configs["jacobi"].block_size == 64
    assert (configs["jacobi"].blocks, configs["jacobi"].candidates, configs["jacobi"].activation) == (2, 4, 0.85)
    assert {name: (p.blocks, p.candidates) for name, p in configs.items()} == {
        "jacobi": (2, 4), "jacobi_single": (1, 0), "jacobi_recycling": (1, 4), "jacobi_multiblock": (2, 0),
    }  # fmt: skip
    labels = OmegaConf.to_container(cfg.decoder, resolve=False)
    assert len({labels[name]["label"] for name in names}) == 4  # type: ignore[call-overload,index]


@pytest.mark.parametrize("recipe", ["as_arm", "as_arm_text"])
@pytest.mark.parametrize(
    ("target", "model"),
    [("tiny", "LanguageModel"), ("tiny_fresh", "LanguageModel"), ("xlnet_tiny", "XLNet"), ("xlnet", None)],
)
def test_as_arm_begins_with_any_backbone(recipe: str, target: str, model: str | None) -> None:
    """The ablation of initialisation: the AR base, its shape from scratch, a fresh XLNet, the pretrained one."""
    cfg = composed(recipe, f"target={target}")
    if model is None:
        assert cfg.target.path == "xlnet/xlnet-base-cased"
        return
    made = instantiate(cfg.target)
    assert type(made).__name__ == model
    assert made.mask_token_id == made.tokenizer.mask_token_id
    assert made.tokenizer.get_vocab() == embedded_target(dtype="float32", device="cpu").tokenizer.get_vocab()
    assert [p for p in instantiate(cfg.method, target=made).parameters() if p.requires_grad]


def test_dspark_and_dflash_differ_only_in_what_makes_dspark() -> None:
    dspark, dflash = plain("dspark"), plain("dflash")
    for group in ("data", "trainer", "target", "benchmark", "evaluation", "seed"):
        assert dspark[group] == dflash[group]
    odd = {k for k in dspark["draft"] if dspark["draft"][k] != dflash["draft"][k]}
    assert odd == {"markov_head_type", "markov_rank", "confidence_head", "confidence_head_with_markov"}
    odd = {k for k in dflash["method"] if dspark["method"][k] != dflash["method"][k]}
    assert odd == {"_target_", "ce_weight", "tv_weight"}


if __name__ == "__main__":
    for name in RECIPES:
        (COMPOSED / f"{name}.yaml").write_text(OmegaConf.to_yaml(composed(name), resolve=False))
