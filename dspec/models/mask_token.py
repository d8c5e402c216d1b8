"""Which token masks: the model's own, an existing one that is unused, or a new learned one."""

import logging
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from dspec.errors import UserError
from dspec.models.target_model import end_tokens

log = logging.getLogger(__name__)

ADD: Final = "add"
NEW_TOKEN: Final = "<|mask|>"


def choose_mask_token(model: PreTrainedModel, tokenizer: Any, asked: int | str | None, *, name: str) -> int | None:
    """The mask token's id for `target.mask_token`: an id, "add", or null (None: the model's own, if it has one).

    "add" appends a token to the tokenizer and, where the embeddings have no unused row for it, a row to them. The
    row starts as the mean of the others, and so does the head's where it is not tied: no softmax prefers it.
    Raises UserError for an id outside the vocabulary or one that ends answers, and for "add" where there is a mask
    token already.
    """
    if asked is None:
        return None
    if asked == ADD:
        return _add(model, tokenizer, name=name)
    if isinstance(asked, str):
        raise UserError(f"target.mask_token={asked} is no token id: give one, or add for a new token")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if not 0 <= asked < vocabulary:
        raise UserError(
            f"target.mask_token={asked} is outside the vocabulary of target {name!r} ({vocabulary} tokens): give the "
            "id of an unused token, or add for a new one"
        )
    if asked in end_tokens(model, tokenizer):
        raise UserError(
            f"target.mask_token={asked} ends the answers of target {name!r}: give the id of an unused token, or add "
            "for a new one"
        )
    return asked


def _add(model: PreTrainedModel, tokenizer: Any, *, name: str) -> int:
    before = getattr(model.config, "mask_token_id", None)
    before = tokenizer.mask_token_id if before is None else before
    if before is not None:
        raise UserError(f"target.mask_token=add: target {name!r} has a mask token already (id {before}): leave it out")
    vocabulary = tokenizer.get_vocab()
    if NEW_TOKEN in vocabulary:
        raise UserError(
            f"target.mask_token=add: target {name!r} has a token {NEW_TOKEN} already; use "
            f"target.mask_token={vocabulary[NEW_TOKEN]}"
        )
    used = max(vocabulary.values()) + 1
    tokenizer.add_special_tokens({"mask_token": NEW_TOKEN})
    row, rows = int(tokenizer.mask_token_id), model.get_input_embeddings().weight.shape[0]
    if row < used:
        raise UserError(f"target.mask_token=add: token ids of target {name!r} have gaps; give the id of an unused one")
    if row >= rows:
        model.resize_token_embeddings(row + 1, mean_resizing=False)
    first = min(rows, row)
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight.data[first : row + 1] = weight.data[: min(used, rows)].mean(0, dtype=wide).to(weight.dtype)
    which = "a new row" if row >= rows else f"row {row}, unused until now,"
    log.info("target %r: its new mask token is %s of the embeddings (token %d)", name, which, row)
    return row
