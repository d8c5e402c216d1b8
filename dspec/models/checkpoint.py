"""Drafter folders in DeepSpec's and z-lab's formats: config.json, model.safetensors, README.md.

anchor_first is written as DeepSpec writes it (flat keys, `Qwen3DSparkModel`, copies of the target's embeddings and
head included), fill_in as z-lab writes it (`DFlashDraftModel`, `dflash_config`, no copies). What is specific to dspec
is under the one extra key "dspec": layout, STS temperatures, prompt policy. Both can be read with or without it. Fitted
temperatures also stand in sts.json, as SGLang reads and writes them; where both are, that file counts.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config

from dspec.atomic import atomic_folder, restore
from dspec.errors import UserError
from dspec.models.draft import Draft, DraftConfig, DraftMetadata
from dspec.models.language_model import LanguageModel
from dspec.models.temperatures import STS_FILE, Calibration, read_sts

DEEPSPEC, ZLAB = "Qwen3DSparkModel", "DFlashDraftModel"
_SHARED = ("embed_tokens.weight", "lm_head.weight")
_DRAFT_KEYS = [
    "architectures",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "dflash_config",
    "num_anchors",
    "dspec",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "transformers_version",
]


def save_pretrained(draft: Draft, folder: Path, *, card: str) -> None:
    """Writes the folder atomically; `card` becomes its README.md."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in draft.trainable().items()}
    if draft.config.layout == "anchor_first":
        for name, module in (("embed_tokens", draft.embed_tokens), ("lm_head", draft.lm_head)):
            tensors[f"{name}.weight"] = module.weight.detach().cpu().clone()
    with atomic_folder(folder) as scratch:
        (scratch / "config.json").write_text(json.dumps(config_dict(draft), indent=2) + "\n", encoding="utf-8")
        try:
            save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors wraps the OSError of a full disk
            raise OSError(str(error)) from error
        (scratch / "README.md").write_text(card, encoding="utf-8")
        if (calibration := draft.metadata.calibration) is not None:
            (scratch / STS_FILE).write_text(json.dumps(calibration.to_sts(), indent=2) + "\n", encoding="utf-8")


def config_dict(draft: Draft) -> dict[str, Any]:
    """The drafter's config.json."""
    config, metadata = draft.config, draft.metadata
    dspec_only: dict[str, Any] = {
        "layout": config.layout,
        "calibration": metadata.calibration.to_dict() if metadata.calibration is not None else None,
        "prompt_policy": metadata.prompt_policy,
    }
    base = config.transformer.to_dict() | {
        "dtype": str(next(draft.fc.parameters()).dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dspec": dspec_only,
    }
    ids = list(config.target_layer_ids)
    if config.layout == "fill_in":
        nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": ids}
        return base | {"architectures": [ZLAB], "dflash_config": nested}
    anchors = {} if metadata.num_anchors is None else {"num_anchors": metadata.num_anchors}
    return (
        base
        | anchors
        | {
            "architectures": [DEEPSPEC],
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": ids,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type or "vanilla",
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_head_with_markov,
        }
    )


def from_pretrained(folder: str | Path, *, target: LanguageModel, layout: str | None = None) -> Draft:
    """The drafter in `folder`, bound to `target`, with its dtype and device.

    `layout` is needed for z-lab style folders not written by dspec: nothing in them distinguishes fill_in from
    anchor_first. Raises UserError for a missing, incomplete or foreign folder, for a vocabulary or width other than
    the target's, and for layer ids out of range.
    """
    folder = Path(folder)
    restore(folder)
    raw = _read_config(folder)
    config = parse_config(raw, folder=folder, layout=layout)
    tensors = _read_tensors(folder)
    _check_fits(config, tensors, target, folder)
    target.check_taps(config.target_layer_ids)
    draft = Draft(
        config,
        embed_tokens=_shared(tensors.pop(_SHARED[0], None), target.embed_tokens),
        lm_head=_shared(tensors.pop(_SHARED[1], None), target.lm_head),
    ).to(device=target.device, dtype=target.dtype)
    expected = draft.trainable()
    if expected.keys() != tensors.keys():
        odd = sorted(expected.keys() ^ tensors.keys())
        raise UserError(f"{folder}/model.safetensors does not match its config.json (missing or foreign: {odd[:4]})")
    with torch.no_grad():
        for name, parameter in expected.items():
            if parameter.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)} instead of {tuple(parameter.shape)}"
                raise UserError(f"{folder}/model.safetensors: tensor {name} has shape {shapes}")
            parameter.copy_(tensors[name])
    draft.metadata = _metadata(raw, config, folder)
    return draft.eval()


def _metadata(raw: dict[str, Any], config: DraftConfig, folder: Path) -> DraftMetadata:
    dspec_only = raw.get("dspec") or {}
    return DraftMetadata(
        calibration=_calibration(dspec_only.get("calibration"), config, folder),
        prompt_policy=dspec_only.get("prompt_policy") or {},
        num_anchors=raw.get("num_anchors"),
    )


def _calibration(stored: dict[str, Any] | None, config: DraftConfig, folder: Path) -> Calibration | None:
    sts = folder / STS_FILE
    where = sts if sts.is_file() else folder / "config.json"
    try:
        calibration = read_sts(sts) if where == sts else Calibration.from_dict(stored) if stored else None
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} holds no valid calibration ({error}); calibrate again") from error
    if calibration is not None and (fitted := len(calibration.temperatures)) != config.num_drafts:
        raise UserError(f"{where} holds {fitted} STS temperatures for {config.num_drafts} drafts; calibrate again")
    return calibration


def parse_config(raw: dict[str, Any], *, folder: Path, layout: str | None) -> DraftConfig:
    """A DraftConfig from DeepSpec's or z-lab's config.json; raises UserError if keys or the layout are missing."""
    architecture = (raw.get("architectures") or [None])[0]
    stored = (raw.get("dspec") or {}).get("layout")
    if stored is None and architecture == DEEPSPEC:
        stored = "anchor_first"  # DeepSpec's class has no other layout
    if layout is not None and stored is not None and layout != stored:
        raise UserError(f"{folder} was trained with layout={stored}, not {layout}; leave the layout out")
    layout = layout or stored
    if layout is None:
        raise UserError(
            f"{folder}/config.json does not say its slot layout: pass layout=fill_in (z-lab) or anchor_first"
        )
    try:
        flat = {**raw, **(raw.get("dflash_config") or {})}
        is_dspark = architecture == DEEPSPEC
        rank = int(raw.get("markov_rank") or 0)
        transformer = Qwen3Config(**{k: v for k, v in raw.items() if k not in _DRAFT_KEYS})
        if "sliding_attention" in (transformer.layer_types or ()):
            raise UserError(f"the drafter in {folder} has sliding-window layers, which dspec's drafter does not model")
        return DraftConfig(
            transformer=transformer,
            layout=layout,
            block_size=int(flat["block_size"]),
            target_layer_ids=tuple(flat["target_layer_ids"]),
            num_target_layers=int(flat["num_target_layers"]),
            mask_token_id=int(flat["mask_token_id"]),
            markov_head_type=raw["markov_head_type"] if is_dspark and rank > 0 else None,
            markov_rank=rank,
            confidence_head=is_dspark and bool(raw["enable_confidence_head"]),
            confidence_head_with_markov=is_dspark and rank > 0 and bool(raw["confidence_head_with_markov"]),
        )
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}/config.json is not a DeepSpec or z-lab drafter config (at {reason})") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"no drafter in {folder}: {path} is missing; pass the draft/ folder of a finished run")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); the checkpoint is incomplete, use another") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return raw


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise UserError(f"{path} is missing: the checkpoint is incomplete, use another")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); the checkpoint is incomplete, use another") from error


def _check_fits(config: DraftConfig, tensors: dict[str, Tensor], target: LanguageModel, folder: Path) -> None:
    width = config.transformer.hidden_size
    if width != target.hidden_size:
        raise UserError(
            f"the drafter in {folder} has width {width}, target {target.name!r} has {target.hidden_size}: "
            "use the target it was trained for"
        )
    vocab = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else config.transformer.vocab_size
    if vocab != target.vocab_size:
        raise UserError(
            f"the drafter in {folder} has a vocabulary of {vocab}, target {target.name!r} of {target.vocab_size}: "
            "use the target it was trained for"
        )
    if config.num_target_layers != target.num_layers:
        raise UserError(
            f"the drafter in {folder} was trained for a target of {config.num_target_layers} layers, "
            f"{target.name!r} has {target.num_layers}: use the target it was trained for"
        )


def _shared(copy: Tensor | None, module: Any) -> Any:
    """The target's own module, unless the folder's copy differs from it."""
    if copy is None or torch.equal(copy.to(module.weight), module.weight):
        return module
    separate = (
        nn.Embedding(*copy.shape)
        if isinstance(module, nn.Embedding)
        else nn.Linear(copy.shape[1], copy.shape[0], bias=False)
    )
    separate.weight = nn.Parameter(copy.to(module.weight), requires_grad=False)
    return separate
