"""Loads what is evaluated: a target, its drafter and the prompt policy of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from data.chat import PromptPolicy
from dspec.config.compose import instantiate
from dspec.models.checkpoint import from_pretrained
from dspec.models.draft import Draft
from dspec.models.language_model import load_language_model, require_causal
from dspec.models.target_model import TargetModel
from eval.checkpoints import draft_folder, has_target, run_config


@dataclass(frozen=True)
class LoadedModel:
    """The models under evaluation; `policy` is how the checkpoint's training rendered prompts (None: nobody said)."""

    target: TargetModel
    draft: Draft | None
    policy: PromptPolicy | None


def load_model(*, target: DictConfig, checkpoint: Path | None, layout: str | None = None) -> LoadedModel:
    """The target that `checkpoint` trained, else `target` (a section with `_target_`) with the checkpoint's drafter, if
    it has one. `layout` is that of a drafter that does not say it. Raises UserError."""
    folder = draft_folder(checkpoint) if checkpoint is not None else None
    model = _target(target, checkpoint)
    draft = from_pretrained(folder, target=require_causal(model), layout=layout) if folder is not None else None
    stored = (run_config(checkpoint).get("data") or {}).get("policy")
    trained = stored or (draft.metadata.prompt_policy if draft is not None else {})
    policy = PromptPolicy(system=trained["system"], thinking=trained["thinking"]) if trained else None
    return LoadedModel(model, draft, policy)


def _target(node: DictConfig, checkpoint: Path | None) -> TargetModel:
    """The target that a run trained, with dtype and device of `node` (its base); without such a run, `node` itself."""
    if checkpoint is None or not has_target(checkpoint) or (checkpoint / "draft").is_dir():
        return instantiate(node)
    path = str(checkpoint / "target")
    return load_language_model(
        path=path, name=path, dtype=node.dtype, device=node.get("device", "cpu"), mask_token=None
    )
