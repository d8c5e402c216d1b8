"""Stored configs under old names (tests/eval/old_runs: composed at commit 9238894) mean what they meant."""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from dspec.config.compose import composed
from dspec.config.leaves import flat
from dspec.config.old_names import _KEYS, _TARGETS, check_arguments, check_config, renamed
from dspec.errors import UserError
from eval.reports.comparison import _differing
from eval.results import load

OLD = Path(__file__).parents[1] / "eval" / "old_runs"
RUNS = sorted(path.stem for path in OLD.glob("*.json"))


def stored(name: str) -> dict[str, Any]:
    return dict(json.loads((OLD / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", RUNS)
def test_what_an_old_config_names_is_there(name: str) -> None:
    """But for its decoders: an evaluation brings its own."""
    config = stored(name)
    del config["decoder"]
    paths = [path for path in flat(config) if path.endswith("_target_")]
    gone = [path for path in paths if not _there(flat(config)[path])]
    assert len(gone) >= 5
    assert all(_there(flat(renamed(config))[path]) for path in paths)
    assert renamed(renamed(config)) == renamed(config)
    moved = {"method.tuning.share": "method.tuning.interpolation"}
    rest = {moved.get(path, path): value for path, value in flat(config).items() if path not in paths}
    rest["label"] = {"dspark": "DSpark", "JF": "Jacobi Forcing"}[rest["label"]]
    assert {path: flat(renamed(config))[path] for path in rest} == rest


def _there(target: str) -> bool:
    try:
        return callable(get_object(target))
    except (ImportError, AttributeError, ValueError):
        return False


def test_names_of_today_are_never_old() -> None:
    """A table that renamed what it gives would refuse every config."""
    for new in _TARGETS.values():
        name = new if not new.endswith(".") else f"{new}Name"
        assert renamed({"_target_": name}) == {"_target_": name}
    check_config({"method.tuning.interpolation": 1, "decoder.jacobi.blocks": 2, "decoder.jacobi.label": "x"})
    assert all("\\" in pattern for pattern in _KEYS)


def test_a_stored_key_of_as_arm_is_renamed() -> None:
    assert renamed({"method": {"lookahead": 4, "order": "sorted"}}) == {"method": {"draft_depth": 4, "order": "sorted"}}


@pytest.mark.parametrize(
    ("old", "new"), [("Full", "FullFineTuning"), ("FullFineTuning", "FullFineTuning"), ("LoRA", "LoRA")]
)
def test_tuning_was_part_of_jacobi_forcing(old: str, new: str) -> None:
    """Runs stored before dspec/tuning.py evaluate; a custom recipe is told the new name."""
    old, new = f"dspec.methods.jacobi_forcing.{old}", f"dspec.tuning.{new}"
    assert renamed({"method": {"tuning": {"_target_": old}}}) == {"method": {"tuning": {"_target_": new}}}
    assert _there(new)
    with pytest.raises(UserError, match=f"is now {new}"):
        check_config({"method.tuning._target_": old})


def test_the_mask_token_was_an_id() -> None:
    for argument in ("target.mask_token_id=5", "+target.mask_token_id=5"):
        with pytest.raises(UserError, match=r"target\.mask_token_id is now target\.mask_token$"):
            check_arguments([argument])
    check_config({"target.mask_token": "add"})
    assert renamed({"target": {"mask_token_id": 5, "path": "x"}}) == {"target": {"mask_token": 5, "path": "x"}}


@pytest.mark.parametrize("module", ["dspec.teachers", "dspec.jacobi_forcing.teachers"])
def test_the_frozen_teacher_was_called_frozen(module: str) -> None:
    new = "dspec.jacobi_forcing.teachers.FrozenTeacher"
    assert renamed({"teacher": {"_target_": f"{module}.Frozen"}}) == {"teacher": {"_target_": new}}
    assert _there(new)


def test_an_old_run_compares_with_a_new_one(tmp_path: Path) -> None:
    """Settings that only moved or were renamed do not tell two runs apart; what the pages changed since then does."""
    changed = {
        "dspark": {"method.feature_cache_mb", "data.regeneration.batch_size", "data.source.calibration.problems",
                   "data.source.calibration.functions"},
        "jacobi_forcing": set(),
    }  # fmt: skip
    for recipe, expected in changed.items():
        counts = {"n": 1, "tokens": 5, "nfe": 5, "nfe_prefill": 1, "tau": None}
        row = {"method": recipe, "benchmark": "problems", "decoder": {"name": "x", "temperature": 0.0}, **counts}
        results = {"run": {"seed": 0, "config": stored(recipe)}, "rows": [row]}
        (tmp_path / "results.json").write_text(json.dumps(results))
        old = load(tmp_path)["run"]["config"]
        new = OmegaConf.to_container(composed("train", [f"recipe={recipe}", "hydra.run.dir=OUT"]), resolve=False)
        apart = _differing([(old, row["decoder"]), (new, row["decoder"])])
        assert {path for path in apart if "${" not in "".join(apart[path])} == expected
