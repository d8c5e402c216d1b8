"""Writes a trained language model as an ordinary Hugging Face folder: weights, config, tokenizer, model card."""

from copy import deepcopy
from pathlib import Path

import torch

from dspec.atomic import atomic_folder
from dspec.models.target_model import TargetModel


def export_language_model(target: TargetModel, folder: Path, *, dtype: torch.dtype | None, card: str) -> Path:
    """Writes `folder` atomically and returns it; `card` becomes its README.md, the mask token's id is in config.json.

    Weights are written in `dtype` (None: that of `target`, which is left alone). They are the evaluated ones to the
    last bit, since training/models.py has rounded those to `dtype`.
    """
    model = deepcopy(target.model).to(dtype or target.dtype)
    if target.mask_token_id is not None:
        model.config.mask_token_id = target.mask_token_id
    with atomic_folder(folder) as scratch:
        model.save_pretrained(scratch, save_original_format=False)  # not under the names of a foreign folder
        target.tokenizer.save_pretrained(scratch)
        (scratch / "README.md").write_text(card, encoding="utf-8")
    return folder
