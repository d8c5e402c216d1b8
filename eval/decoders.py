"""The decoders that configs name: each function takes the keys of its file in conf/decoder.

`weights` selects the model that decodes: the trained target, or its base before training. `base()` returns that base;
it is loaded when its first decoder is built, so that no training run holds a second model, and shared by all decoders
(instantiate_decoders in dspec/config/compose.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dspec.decoding import factory
from dspec.decoding.any_subset import AnySubsetConfig
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import Decoder
from dspec.errors import UserError
from dspec.models.backbone import Backbone
from dspec.models.draft import Draft
from eval.results import ANY_SUBSET, AR, DIFFUSION

Base = Callable[[], Backbone]
Build = Callable[..., Decoder]


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A row of the table: its label, and `build(target=, draft=)` for its decoder.

    `baseline` names the decoder of the same weights that emits one token per pass: mismatches and speedup are relative
    to it. `infills`: whether it can fill holes at any positions; all others write left to right. `of_base`: whether it
    decodes with the base before training. `needs_draft`: whether it needs a drafter.
    """

    label: str
    build: Build
    baseline: str = AR
    infills: bool = False
    of_base: bool = False
    needs_draft: bool = False

    def check(self, *, target: Backbone, draft: Draft | None) -> None:
        """Raises UserError for settings that its decoder rejects; one of the base would have to load it first."""
        if not self.of_base:
            self.build(target=target, draft=draft)


def autoregressive(*, label: str, weights: str, base: Base) -> DecoderSpec:
    """Plain AR; the drafter is not used."""
    return _spec(label, weights, base, factory.autoregressive)


def speculative(
    *, label: str, weights: str, base: Base, sequential_head: bool, refinement_passes: int, confidence_threshold: float
) -> DecoderSpec:
    """Speculative decoding with the drafter, with or without its sequential head; threshold 0 verifies every draft."""
    settings: dict[str, Any] = {
        "sequential_head": sequential_head,
        "refinement_passes": refinement_passes,
        "confidence_threshold": confidence_threshold,
    }
    return replace(_spec(label, weights, base, partial(factory.speculative, **settings)), needs_draft=True)


def prompt_lookup(*, label: str, weights: str, base: Base, num_drafts: int, max_ngram: int) -> DecoderSpec:
    """Drafts copied from the text so far; the drafter is not used."""
    return _spec(label, weights, base, partial(factory.prompt_lookup, num_drafts=num_drafts, max_ngram=max_ngram))


def jacobi(
    *,
    label: str,
    weights: str,
    base: Base,
    block_size: int,
    blocks: int,
    activation: float,
    pool_size: int,
    candidates: int,
) -> DecoderSpec:
    """Jacobi decoding: several of the target's own tokens per pass; the drafter is not used."""
    config = JacobiConfig(
        block_size=block_size, blocks=blocks, activation=activation, pool_size=pool_size, candidates=candidates
    )
    return _spec(label, weights, base, partial(factory.jacobi, config=config))


def any_subset(*, label: str, weights: str, base: Base) -> DecoderSpec:
    """An any-subset model's tokens at chosen positions, one per pass; the drafter is not used."""
    config = AnySubsetConfig(num_drafts=1, draft="self", bonus=False, tolerance=0.0)
    return _spec(label, weights, base, partial(factory.any_subset, config=config), baseline=ANY_SUBSET)


def assd(
    *, label: str, weights: str, base: Base, num_drafts: int, draft: str, bonus: bool, tolerance: float
) -> DecoderSpec:
    """Any-Subset Speculative Decoding: the same tokens, several per pass; the drafter is not used."""
    config = AnySubsetConfig(num_drafts=num_drafts, draft=draft, bonus=bonus, tolerance=tolerance)
    return _spec(label, weights, base, partial(factory.any_subset, config=config), baseline=ANY_SUBSET)


def sigma_gpt(*, label: str, weights: str, base: Base, num_orders: int) -> DecoderSpec:
    """Rejection sampling in random orders (sigma-GPT): biased; the drafter is not used."""
    return _spec(label, weights, base, partial(factory.sigma_gpt, num_orders=num_orders), baseline=ANY_SUBSET)


def diffusion(
    *, label: str, weights: str, base: Base, tokens_per_step: int, block_size: int | None, attention: str | None
) -> DecoderSpec:
    """A diffusion LM's most confident tokens, a fixed number per pass; with one the baseline of all its decoders."""
    settings: dict[str, Any] = {"tokens_per_step": tokens_per_step, "block_size": block_size, "attention": attention}
    return _spec(label, weights, base, partial(factory.diffusion, **settings), baseline=DIFFUSION)


def confidence_threshold(
    *,
    label: str,
    weights: str,
    base: Base,
    threshold: float,
    block_size: int | None,
    attention: str | None,
    cache: str,
) -> DecoderSpec:
    """A diffusion LM's tokens that are probable enough, at least one per pass."""
    settings: dict[str, Any] = {
        "threshold": threshold,
        "block_size": block_size,
        "attention": attention,
        "cache": cache,
    }
    return _spec(label, weights, base, partial(factory.confidence_threshold, **settings), baseline=DIFFUSION)


def d2f(
    *,
    label: str,
    weights: str,
    base: Base,
    block_size: int | None,
    append_ratio: float,
    activate_ratio: float,
    threshold: float,
) -> DecoderSpec:
    """Several blocks of a diffusion LM at a time, under block-causal attention."""
    settings: dict[str, Any] = {
        "block_size": block_size,
        "append_ratio": append_ratio,
        "activate_ratio": activate_ratio,
        "threshold": threshold,
    }
    return _spec(label, weights, base, partial(factory.d2f, **settings), baseline=DIFFUSION)


def lopa(
    *,
    label: str,
    weights: str,
    base: Base,
    block_size: int | None,
    append_ratio: float,
    activate_ratio: float,
    threshold: float,
    window_attention: str,
    cache: str,
    branches: int,
    branch_score: str,
    segment: int,
    confidence_measure: str,
    process_timeout_s: float | None,
) -> DecoderSpec:
    """D2F, or plain diffusion, with lookahead branches."""
    settings: dict[str, Any] = {
        "block_size": block_size,
        "append_ratio": append_ratio,
        "activate_ratio": activate_ratio,
        "threshold": threshold,
        "window_attention": window_attention,
        "cache": cache,
        "branches": branches,
        "branch_score": branch_score,
        "segment": segment,
        "confidence_measure": confidence_measure,
        "process_timeout_s": process_timeout_s,
    }
    return _spec(label, weights, base, partial(factory.lopa, **settings), baseline=DIFFUSION)


def only_diffusion(specs: Iterable[DecoderSpec]) -> bool:
    """Whether all are decoders of diffusion LMs: their model cannot be decoded by plain AR, whatever its prompts."""
    found = list(specs)
    return bool(found) and all(spec.baseline.removeprefix("base_") == DIFFUSION for spec in found)


def _spec(label: str, weights: str, base: Base, build: Build, *, baseline: str = AR) -> DecoderSpec:
    """`baseline` is that of the trained weights; the base has its own. Raises UserError for unknown `weights`."""
    if weights not in ("trained", "base"):
        raise UserError(f"{label}: weights={weights} must be trained (the target after training) or base (before it)")
    infills = baseline == ANY_SUBSET
    if weights == "trained":
        return DecoderSpec(label=label, build=build, baseline=baseline, infills=infills)
    build = partial(on_base, base=base, build=build)
    return DecoderSpec(label=label, build=build, baseline=f"base_{baseline}", infills=infills, of_base=True)


def on_base(*, target: Backbone, base: Base, build: Build, **parts: Any) -> Decoder:
    """`build` on the base, in the trained target's dtype and on its device; without the target's drafter."""
    return build(target=base().to(device=target.device, dtype=target.dtype), **parts | {"draft": None})
