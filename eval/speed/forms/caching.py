"""Any-subset decoding with its cache and without: a pair of `python -m eval.speed.forms`.

A whole text is decoded, end to end. The model is trained where drafts are accepted or rejected, so that there are as
many passes as with real texts; both forms have the same passes and tokens.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from data.embedded.corpus import generate
from data.embedded.target import fresh_xlnet
from dspec.decoding.any_subset import decoder
from dspec.decoding.any_subset.decoder import AnySubset, AnySubsetConfig
from dspec.decoding.any_subset.queries import RowQuery, query_logits
from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import State
from dspec.models.language_model import embedded_any_subset
from dspec.models.target_model import TargetModel
from eval.prompts import plain_ids
from eval.speed.forms.plain_forms import Form, Pair, replaced

_STORIES = 40  # of the embedded corpus: about 80 tokens each


class UncachedAnySubset(AnySubset):
    """Every pass computes the whole text."""

    def _advance(self, state: State, starts: Sequence[int]) -> None:
        def uncached(model: TargetModel, rows: Sequence[RowQuery], **cache: Any) -> torch.Tensor:
            return query_logits(model, rows)

        with replaced(decoder, "query_logits", uncached):
            super()._advance(state, [0] * len(starts))


def trained(dtype: str) -> TargetModel:
    """The embedded any-subset model."""
    return embedded_any_subset(dtype=dtype, device="cpu")


def xlnet(dtype: str) -> TargetModel:
    """A random XLNet of about the embedded model's size."""
    torch.manual_seed(0)
    return fresh_xlnet(
        name="random", dtype=dtype, device="cpu", hidden_size=192, num_layers=6, num_heads=6, intermediate_size=768
    )


def filled_text(
    dtype: torch.dtype, *, model: Callable[[str], TargetModel], length: int, hidden: float, num_drafts: int
) -> Pair:
    """One text of `length` tokens, the share `hidden` of them generated at temperature 1, `num_drafts` at a time."""
    target = model(str(dtype).removeprefix("torch."))
    stories = generate(task="stories", split="test", count=_STORIES, seed=0)
    ids = plain_ids(target.tokenizer, "\n".join(story.response for story in stories))[:length]
    holes = sorted(random.Random(0).sample(range(length), round(hidden * length)))
    seen = sorted(set(range(length)) - set(holes))
    request = Request(
        ids=[ids[position] for position in seen],
        positions=[*seen, *holes],
        sampling=Sampling(temperature=1.0, top_p=1.0),
        max_new_tokens=len(holes),
        stop_ids=(),
        seed=0,
    )
    config = AnySubsetConfig(num_drafts=num_drafts, drafted_by="model", bonus=False, tolerance=0.0)

    def form(decoder: type[AnySubset]) -> Form:
        built = decoder(target=target, config=config)
        return lambda: torch.tensor(decode(built, [request])[0].tokens)

    return Pair(form(UncachedAnySubset), form(AnySubset))


def pairs(*, small: bool) -> dict[str, Callable[[torch.dtype], Pair]]:
    """By name; `small` shrinks the texts."""
    text = partial(filled_text, model=trained, hidden=0.95)
    lengths = {length: 12 if small else length for length in (64, 128, 256, 512)}
    return {
        **{f"any-subset, 95 % of {n}": partial(text, length=m, num_drafts=1) for n, m in lengths.items()},
        **{f"ASSD, 95 % of {n}": partial(text, length=m, num_drafts=5) for n, m in lengths.items()},
        "ASSD, 128 of 1024": partial(text, length=16 if small else 1024, hidden=0.125, num_drafts=5),
        "any-subset, XLNet, 95 % of 128": partial(text, model=xlnet, length=lengths[128], num_drafts=1),
    }
