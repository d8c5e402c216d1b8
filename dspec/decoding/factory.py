"""Decoders as configs name them: each builds one from target, drafter and sampling."""

import warnings
from collections.abc import Callable

import torch

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.base import Decoder
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel


def autoregressive(*, target: LanguageModel, draft: Draft | None, sampling: Sampling) -> Decoder:
    """Plain AR; the drafter is not used."""
    return Autoregressive(target=target, sampling=sampling)


def speculative(
    *,
    target: LanguageModel,
    draft: Draft | None,
    sampling: Sampling,
    sequential_head: bool,
    refinement_passes: int,
    confidence_threshold: float,
) -> Decoder:
    """The trained drafter, with or without its sequential head; a threshold of 0 verifies every draft."""
    if draft is None:
        raise UserError("decoder=speculative needs a drafter: train one (recipe=dspark) or take decoder=autoregressive")
    proposer = DraftProposer(draft, sequential_head=sequential_head, refinement_passes=refinement_passes)
    calibration = draft.metadata.calibration
    if calibration is not None and confidence_threshold > 0 and not proposer.plain:
        warnings.warn(
            f"STS temperatures were fitted with the sequential head on and without refinement; this decoder has "
            f"sequential_head={sequential_head}, refinement_passes={refinement_passes}: they are not used, "
            "confidences stay raw",
            stacklevel=2,
        )
        calibration = None
    return Speculative(
        target=target,
        proposer=proposer,
        sampling=sampling,
        confidence_threshold=confidence_threshold,
        calibration=calibration,
    )


def prompt_lookup(
    *, target: LanguageModel, draft: Draft | None, sampling: Sampling, num_drafts: int, max_ngram: int
) -> Decoder:
    """Drafts copied from the text so far; the drafter is not used."""
    device = torch.device(target.device)
    proposer = PromptLookupProposer(num_drafts=num_drafts, max_ngram=max_ngram, device=device)
    return Speculative(target=target, proposer=proposer, sampling=sampling)


def jacobi(*, target: LanguageModel, draft: Draft | None, sampling: Sampling, plan: JacobiConfig) -> Decoder:
    """The target's own tokens, several a pass; the drafter is not used."""
    return Jacobi(target=target, sampling=sampling, plan=plan)


def on_base(
    *,
    target: LanguageModel,
    draft: Draft | None,
    sampling: Sampling,
    base: LanguageModel | None,
    build: Callable[..., Decoder],
) -> Decoder:
    """What `build` makes of the untrained `base`, to stand beside the same decoder of the trained target."""
    if base is None:
        raise UserError("a decoder of the base needs target=<the base>: say which weights it decodes")
    return build(target=base.to(device=target.device, dtype=target.dtype), draft=None, sampling=sampling)
