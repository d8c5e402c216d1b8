"""Exact log-likelihoods of texts given the text before them, by the distribution that a model decodes from.

A causal model gives every conditional in one pass over the text; so does an any-subset model, whose queries of the
scored tokens each see the tokens before them (arXiv 2504.20456, eq. 6).

Legend: B = texts, L = tokens, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspec.decoding.any_subset.queries import RowQuery, query_logits
from dspec.errors import UserError
from dspec.models.language_model import require_causal
from dspec.models.target_model import TargetModel
from dspec.precision import widest


@dataclass(frozen=True)
class Continuation:
    """A text to score: `tokens` given `context`, which they follow."""

    context: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Likelihood:
    """Log probability of each token of a continuation, given the context and the tokens before it."""

    log_probs: Tensor
    greedy: bool  # each token is the most probable one: greedy decoding writes this continuation

    @property
    def total(self) -> float:
        """Log-likelihood of the continuation, in nats."""
        return float(self.log_probs.sum())


@torch.inference_mode()
def log_likelihoods(model: TargetModel, texts: Sequence[Continuation], *, any_subset: bool) -> list[Likelihood]:
    """The texts' likelihoods in one pass: the joint density of an `any_subset` model, or a causal model's.

    Raises UserError for a text without context, with nothing to score or longer than the model's context, for an
    any-subset model without a mask token, and for the causal distribution of a model that has none.
    """
    for number, text in enumerate(texts):
        check_text(model, text, number, any_subset=any_subset)
    likelihoods = []
    logits = _any_subset_logits(model, texts) if any_subset else _causal_logits(model, texts)
    for text, logits_LV in zip(texts, logits, strict=True):
        label = torch.tensor(list(text.tokens), device=logits_LV.device)
        log_probs = logits_LV.to(widest(logits_LV.device)).log_softmax(-1).gather(-1, label[:, None])[:, 0]
        likelihoods.append(Likelihood(log_probs.cpu(), bool((logits_LV.argmax(-1) == label).all())))
    return likelihoods


def longest(model: TargetModel, *, any_subset: bool) -> int:
    """Tokens of the longest text that can be scored: a causal model does not read the last one."""
    return model.max_positions if any_subset else model.max_positions + 1


def check_text(model: TargetModel, text: Continuation, number: int, *, any_subset: bool) -> None:
    """Raises UserError for a text, the `number`-th, that cannot be scored."""
    if not text.context:
        raise UserError(f"text {number} has no visible token: it is scored given at least one before it")
    if not text.tokens:
        raise UserError(f"text {number} has no token to score")
    if (length := len(text.context) + len(text.tokens)) > longest(model, any_subset=any_subset):
        raise UserError(f"text {number} has {length} tokens, the context of {model.name!r} {model.max_positions}")


def _causal_logits(model: TargetModel, texts: Sequence[Continuation]) -> list[Tensor]:
    """[L, V] for the tokens of each text."""
    rows = [[*text.context, *text.tokens][:-1] for text in texts]  # no token depends on the last token
    ids_BL = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for b, row in enumerate(rows):
        ids_BL[b, : len(row)] = torch.tensor(row)
    hidden_BLD = require_causal(model)(ids_BL.to(model.device)).hidden_BLD
    return [
        model.logits(hidden_BLD[b, len(row) - len(text.tokens) : len(row)])
        for b, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]


def _any_subset_logits(model: TargetModel, texts: Sequence[Continuation]) -> list[Tensor]:
    """[L, V] for the tokens of each text, that of the mask token -inf."""
    rows = []
    for text in texts:
        first, length = len(text.context), len(text.context) + len(text.tokens)
        rows.append(
            RowQuery(
                tokens=[*text.context, *text.tokens][:-1],
                start=0,
                prompt=first,
                positions=range(length),
                queried=range(first, length),
                limits=range(first, length),
            )
        )
    return [logits_LV[: len(text.tokens)] for logits_LV, text in zip(query_logits(model, rows), texts, strict=True)]
