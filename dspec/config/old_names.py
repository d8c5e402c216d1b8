"""Former config names: a one-line error with the new name, and the translation of configs stored by old runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspec.errors import UserError

_PAGE = "its numbers are on the recipe's page (recipes/<name>.yaml)"

# Removed choices, as patterns of an argument; \g<1> is the first group.
_CHOICES = {
    r"method=([\w,]+)": r"use recipe=\g<1>: a method's numbers are on its recipe's page",
    r"method/teacher=same_pass": "use method/teacher=stop_gradient",
    r"method/teacher=moving": "use method/teacher=ema",
    r"draft=none": "use draft=null",
    r"draft=(?!null$)([\w,]+)": rf"use recipe=\g<1>, or draft.<key>=...: {_PAGE}",
    r"optimizer=(\w+)": rf"use optimizer.<key>=..., or data=\g<1> for everything that goes with that data: {_PAGE}",
    r"trainer=(\w+)": rf"use trainer.<key>=..., hardware=cpu|gpu, or data=\g<1>: {_PAGE}",
    r"trajectories=(\w+)": rf"use data=\g<1>: {_PAGE}",
    r"decoder=(\[?(?:[\w,]+,)?(?:base_)?)confidence_threshold(.*)": r"use decoder=\g<1>fast_dllm\g<2>",
    r"data=tiny_corpus": "use recipe=ar_base, which sets that corpus on its page",
    r"calibration=none": "use calibration=null",
    r"calibration=sts": "STS is part of recipe=dspark: leave calibration= out there",
    r"evaluation=default": "leave it out: evaluation has no choices, only keys",
    r"callbacks=default": "leave it out: callbacks has no choices, only keys",
    r"callbacks/progress=none": "use callbacks.progress=null",
    r"callbacks/progress=rich": "leave it out: it is the default",
}

# Keys, as patterns of a whole dotted path.
_KEYS = {
    r"decoder\.(\w+)\.build\.(?:build\.)?(?:plan\.)?(\w+)": r"decoder.\g<1>.\g<2>",
    r"decoder\.(\w+)\.method": r"decoder.\g<1>.label",
    r"decoder\.(\w+)\.serial": r"decoder.\g<1>.weights=base for decoders of the base",
    r"decoder\.(base_)?confidence_threshold(\w*)\.(\w+)": r"decoder.\g<1>fast_dllm\g<2>.\g<3>",
    r"decoder\.(\w*assd\w*)\.draft": r"decoder.\g<1>.drafted_by: model (was self) or bigrams (was ngram)",
    r"method\.tuning\.share": "method.tuning.interpolation",
    r"method\.lookahead": "method.draft_depth",
    r"target\.mask_token_id": "target.mask_token",
}

# `_target_`: moved modules, and the classes renamed in them.
_TARGETS = {
    "dspec.models.target.load_target": "dspec.models.language_model.load_language_model",
    "dspec.models.target.": "dspec.models.language_model.",
    "dspec.noise.Random": "dspec.jacobi_forcing.noise.RandomSchedule",
    "dspec.noise.": "dspec.jacobi_forcing.noise.",
    "dspec.teachers.SamePass": "dspec.jacobi_forcing.teachers.StopGradientTeacher",
    "dspec.teachers.Moving": "dspec.jacobi_forcing.teachers.EMATeacher",
    "dspec.teachers.Frozen": "dspec.jacobi_forcing.teachers.FrozenTeacher",
    "dspec.jacobi_forcing.teachers.Frozen": "dspec.jacobi_forcing.teachers.FrozenTeacher",
    "dspec.teachers.": "dspec.jacobi_forcing.teachers.",
    "dspec.packing.": "dspec.jacobi_forcing.packing.",
    "dspec.methods.jacobi_forcing.Full": "dspec.tuning.FullFineTuning",
    "dspec.methods.jacobi_forcing.FullFineTuning": "dspec.tuning.FullFineTuning",
    "dspec.methods.jacobi_forcing.LoRA": "dspec.tuning.LoRA",
    "dspec.calibrate.": "dspec.calibration.stage.",
    "dspec.calibration.": "dspec.calibration.sts.",
    "dspec.training.StepProgress": "dspec.training.progress_callback.StepProgress",
    "dspec.training.progress.": "dspec.training.progress_callback.",
    "data.module.Conversations": "data.conversations.Conversations",
    "data.module.PackedCorpus": "data.packed_corpus.PackedCorpus",
    "dspec.decoding.blocks.Plan": "dspec.decoding.jacobi_state.JacobiConfig",
    "eval.judge.": "eval.sandbox.judge.",
    "eval.sandbox.Sandbox": "eval.sandbox.sandbox.Sandbox",
    "eval.report.": "eval.reports.report.",
    "eval.speed.SpeedReport": "eval.speed.settings.SpeedSettings",
    "eval.search.Search": "eval.search.settings.SearchSettings",
    "eval.decoders.confidence_threshold": "eval.decoders.fast_dllm",
    "eval.evaluate.DecoderSpec": "eval.decoders.DecoderSpec",
}


def check_arguments(args: Sequence[str]) -> None:
    """Raises UserError for an argument in an old spelling, with the new one. Choices that the user's own config folders
    have are theirs."""
    folders = _config_folders(args)
    for arg in args:
        bare = arg.lstrip("+~")
        for pattern, fix in _CHOICES.items():
            if (match := re.fullmatch(pattern, bare)) and not _user_has_choice(bare, folders):
                raise UserError(f"{arg} is gone: {match.expand(fix)}")
        if match := re.fullmatch(r"(logger|target|data|benchmark|decoder|scale)=null|(benchmark|decoder)=\[\]", bare):
            group = match[1] or match[2]
            raise UserError(f"{arg}: {group} needs one of its choices; leave it out for the default (--help lists all)")
        key = bare.partition("=")[0]
        if key in ("page", "page_scale"):
            raise UserError(f"{arg}: pages come with their recipe, use recipe=<name>")
        if key == "real":
            raise UserError(f"{arg} is gone: use scale=pretrained, or scale=embedded")
        _check_key(key)
        if key.startswith("benchmark.problems_unseen") and not any("tiny_unseen" in a for a in args):
            raise UserError(f"{key}: problems_unseen is now a separate benchmark, use benchmark=[tiny,tiny_unseen]")


def _config_folders(args: Sequence[str]) -> list[Path]:
    """Folders of --config-dir and hydra.searchpath."""
    found: list[str] = []
    for before, arg in zip(["", *args], args, strict=False):
        if before in ("--config-dir", "-cd"):
            found.append(arg)
        elif arg.startswith("--config-dir="):
            found.append(arg.partition("=")[2])
        elif arg.startswith("hydra.searchpath="):
            found += re.findall(r"(?:file://)?([^\[\],'\"]+)", arg.partition("=")[2])
    return [Path(folder) for folder in found]


def _user_has_choice(arg: str, folders: Sequence[Path]) -> bool:
    """Whether one of the folders has each of the choices that <group>=<choice>[,<choice>] names."""
    group, _, names = arg.partition("=")
    return all(any((folder / group / f"{name}.yaml").is_file() for folder in folders) for name in names.split(","))


def gone_group(name: str) -> str | None:
    """The error for a custom recipe that overrides a removed group; None for other names."""
    if name == "real":
        return "real is no longer a config group: use `override /scale: pretrained`"
    if name not in (
        "method",
        "draft",
        "optimizer",
        "trainer",
        "trajectories",
        "calibration",
        "evaluation",
        "callbacks",
    ):
        return None
    return f"{name} is no longer a config group: start the recipe with `defaults: [dspark, _self_]`, or another page"


def check_config(leaves: Mapping[str, Any]) -> None:
    """Raises UserError for an old key or `_target_` in a config given by dotted paths (custom YAML may have them)."""
    for path, value in leaves.items():
        if value == "eval.evaluate.Contender":
            raise UserError(
                f"{path}={value} is gone: name a function of eval/decoders.py, such as eval.decoders.jacobi, and its "
                "arguments, as the files in conf/decoder do"
            )
        _check_key(path)
        if path.endswith("_target_") and isinstance(value, str) and (new := _renamed(value)) != value:
            raise UserError(f"{path}={value} is now {new}")


def _check_key(path: str) -> None:
    for pattern, new in _KEYS.items():
        if match := re.fullmatch(pattern, path):
            raise UserError(f"{path} is now {match.expand(new)}")


def _renamed(target: str) -> str:
    """The current name of a `_target_`."""
    for old, new in _TARGETS.items():
        if target == old:
            return new
        if old.endswith(".") and target.startswith(old) and target.count(".") == old.count("."):
            return new + target.removeprefix(old)
    return target


_LABELS = {"dspark": "DSpark", "dflash": "DFlash", "JF": "Jacobi Forcing", "ar_base": "AR base"}


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's stored config with current `_target_`s and keys; its decoders are left as they are, since an evaluation
    configures its own."""
    found: dict[str, Any] = _with_current_targets(config)
    method, target = found.get("method") or {}, found.get("target")
    moved = (
        (method.get("tuning"), "share", "interpolation"),
        (method, "lookahead", "draft_depth"),
        (target, "mask_token_id", "mask_token"),
    )
    for node, old, new in moved:
        if isinstance(node, dict) and old in node:
            node[new] = node.pop(old)
    if "label" in found:
        found["label"] = _LABELS.get(found["label"], found["label"])
    return found


def _with_current_targets(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {
            key: _renamed(value) if key == "_target_" and isinstance(value, str) else _with_current_targets(value)
            for key, value in node.items()
        }
    return [_with_current_targets(value) for value in node] if isinstance(node, list) else node
