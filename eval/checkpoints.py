"""What kind of folder `checkpoint=` is, and whether it can be evaluated as requested. Imports nothing heavy."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from dspec.config.old_names import renamed
from dspec.errors import UserError


def draft_folder(checkpoint: Path) -> Path | None:
    """The drafter's folder in a run folder (or the folder itself); None for a run that trained a target."""
    if not checkpoint.is_dir():
        raise UserError(f"no checkpoint at {checkpoint}: pass a run folder, or a drafter's folder with config.json")
    if (checkpoint / "draft").is_dir():
        return checkpoint / "draft"
    if has_target(checkpoint):
        return None
    if not (checkpoint / "model.safetensors").is_file():
        raise UserError(f"{checkpoint} holds neither draft/ nor target/ nor model.safetensors: did its run finish?")
    return checkpoint


def has_target(checkpoint: Path) -> bool:
    """Whether the run trained the target's own weights."""
    return (checkpoint / "target").is_dir()


def run_config(checkpoint: Path | None) -> dict[str, Any]:
    """The composed config of the run that made `checkpoint`; {} for a foreign drafter or none.

    Raises UserError for a file that is not JSON, or whose sections are none.
    """
    for folder in [] if checkpoint is None else [checkpoint, checkpoint.parent]:
        path = folder / "config.json"
        if path.is_file():
            try:
                config = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{path} is not JSON ({error}): restore it, or use another checkpoint") from error
            if isinstance(config, dict) and isinstance(config.get("method"), dict) and "target" in config:
                _check_sections(config, path)
                return dict(renamed(config))
    return {}


def _check_sections(config: dict[str, Any], path: Path) -> None:
    """Raises UserError for text or a list where a run's config has a section that is read here or in eval/load.py."""
    data, method = config.get("data"), config["method"]
    sections = {"data": data, "method.layout": method.get("layout")}
    if isinstance(data, dict):
        sections["data.policy"] = data.get("policy")
    for name, section in sections.items():
        if section is not None and not isinstance(section, dict):
            raise UserError(
                f"{path} has {name}={json.dumps(section)}, no section: restore it, or use another checkpoint"
            )
    policy = sections.get("data.policy")
    if policy and (lacking := [key for key in ("system", "thinking") if key not in policy]):
        raise UserError(f"{path}: data.policy lacks {', '.join(lacking)}: restore it, or use another checkpoint")


def checkpoint_of(cfg: DictConfig) -> Path | None:
    return Path(cfg.checkpoint).expanduser() if cfg.checkpoint is not None else None


def check_model(cfg: DictConfig) -> None:
    """Raises UserError unless `target` and `checkpoint` together determine the model to decode."""
    checkpoint = checkpoint_of(cfg)
    named = "_target_" in (cfg.get("target") or {})
    if checkpoint is None:
        if not named:
            raise UserError("nothing to evaluate: set target=<name>, checkpoint=<run folder>, or both")
        return
    folder, stored = draft_folder(checkpoint), run_config(checkpoint)
    if folder is None and named:
        raise UserError(
            f"{checkpoint} trained the target itself: leave target= out (decoder=[base_autoregressive,...] also runs "
            "its base; for the base alone leave checkpoint= out)"
        )
    if "target" in stored and not isinstance(stored["target"], dict):
        raise UserError(f"{checkpoint}/config.json names no target: restore it, or use another checkpoint")
    if folder is None and not stored:
        raise UserError(
            f"{checkpoint}/config.json is missing, or not a run's: restore it, or evaluate the model alone: "
            f"target=hf target.path={checkpoint}/target"
        )
    if not stored and not named:
        raise UserError(f"{checkpoint} does not name its target: add target=<name>")


def fill_in(cfg: DictConfig) -> None:
    """Fills in what `cfg` leaves to the checkpoint's run, for its decoders to refer to: `label`, `target` (if the run
    trained the target's weights: its base), `data.block_size` and `method.layout.block_size`. Raises UserError as
    `check_model` does."""
    check_model(cfg)
    checkpoint = checkpoint_of(cfg)
    folder, stored = draft_folder(checkpoint) if checkpoint is not None else None, run_config(checkpoint)
    data, layout = stored.get("data") or {}, (stored.get("method") or {}).get("layout") or {}
    with open_dict(cfg):
        cfg.label = cfg.get("label") or stored.get("label") or (folder.name if folder is not None else "draft")
        if "_target_" not in (cfg.get("target") or {}):  # possibly only +target.dtype=...
            cfg.target = OmegaConf.merge(stored["target"], cfg.get("target") or {})
        if "block_size" in data:
            cfg.data = {"block_size": data["block_size"]}
        if "block_size" in layout:
            cfg.method = {"layout": {"block_size": layout["block_size"]}}


def check_arguments(cfg: DictConfig) -> None:
    """Raises UserError for mistakes in conf/eval.yaml's keys that can be found before torch is imported."""
    if "benchmark" not in cfg:
        raise UserError("nothing to evaluate on: set benchmark=<name> or benchmark=[<name>,...]; --help lists them")
    check_model(cfg)
