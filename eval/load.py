"""Loads what is evaluated: a target, its drafter and the prompt policy, from `target` and `checkpoint`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from data.chat import PromptPolicy
from dspec.config.compose import instantiate
from dspec.models.any_subset_model import AnySubsetModel
from dspec.models.checkpoint import from_pretrained
from dspec.models.draft import Draft
from dspec.models.language_model import load_language_model, require_causal
from eval.checkpoints import check_model, checkpoint_of, draft_folder, has_target, run_config


@dataclass(frozen=True)
class LoadedModel:
    """The models under evaluation; `label` is the name of the drafter or training method in the table."""

    target: AnySubsetModel
    draft: Draft | None
    label: str
    policy: PromptPolicy


def load_model(cfg: DictConfig) -> LoadedModel:
    """The model given by `target`, `checkpoint`, `layout`, `label` and `policy` of conf/eval.yaml; raises UserError.

    Keys that decoders refer to are filled into `cfg` from the checkpoint's run if the command line does not set them:
    `label`, `target` (if the run trained the target's weights: its base) and `data.block_size`.
    """
    check_model(cfg)
    checkpoint = checkpoint_of(cfg)
    folder = draft_folder(checkpoint) if checkpoint is not None else None
    stored = run_config(checkpoint)
    _fill_in(cfg, stored, folder)
    target = _target(cfg.target, checkpoint)
    draft = from_pretrained(folder, target=require_causal(target), layout=cfg.layout) if folder is not None else None
    trained = (stored.get("data") or {}).get("policy") or (draft.metadata.prompt_policy if draft is not None else {})
    policy = (
        PromptPolicy(system=trained["system"], thinking=trained["thinking"]) if trained else instantiate(cfg.policy)
    )
    return LoadedModel(target, draft, cfg.label, policy)


def _fill_in(cfg: DictConfig, stored: dict[str, Any], folder: Path | None) -> None:
    data = stored.get("data") or {}
    with open_dict(cfg):
        cfg.label = cfg.label or stored.get("label") or (folder.name if folder is not None else "draft")
        if "_target_" not in (cfg.get("target") or {}):  # possibly only +target.dtype=...
            cfg.target = OmegaConf.merge(stored["target"], cfg.get("target") or {})
        if "block_size" in data:
            cfg.data = {"block_size": data["block_size"]}


def _target(node: DictConfig, checkpoint: Path | None) -> AnySubsetModel:
    """The target that a run trained, with dtype and device of `node` (its base); without such a run, `node` itself."""
    if checkpoint is None or not has_target(checkpoint) or (checkpoint / "draft").is_dir():
        return instantiate(node)
    path = str(checkpoint / "target")
    return load_language_model(
        path=path, name=path, dtype=node.dtype, device=node.get("device", "cpu"), mask_token_id=None
    )
