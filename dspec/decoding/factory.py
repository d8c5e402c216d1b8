"""Builds decoders from target and drafter; eval/decoders.py passes on what the config sets."""

import warnings

import torch

from dspec.decoding.any_subset import AnySubset, AnySubsetConfig
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import Decoder
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sigma_gpt import SigmaGPT
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import ConfidenceThreshold, VerificationPolicy, VerifyAll
from dspec.errors import UserError
from dspec.models.backbone import Backbone
from dspec.models.draft import Draft
from dspec.models.language_model import causal


def autoregressive(*, target: Backbone, draft: Draft | None) -> Decoder:
    """Plain AR; the drafter is not used."""
    return Autoregressive(target=causal(target))


def speculative(
    *,
    target: Backbone,
    draft: Draft | None,
    sequential_head: bool,
    refinement_passes: int,
    confidence_threshold: float,
) -> Decoder:
    """Speculative decoding with the drafter, with or without its sequential head; threshold 0 verifies every draft."""
    if draft is None:
        raise UserError("decoder=speculative needs a drafter: train one (recipe=dspark) or use decoder=autoregressive")
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
    policy: VerificationPolicy = VerifyAll()
    if confidence_threshold != 0:
        if draft.confidence_head is None:
            raise UserError(
                f"confidence_threshold={confidence_threshold} reads a confidence head, which this drafter does not have"
            )
        policy = ConfidenceThreshold(confidence_threshold, calibration=calibration)
    return Speculative(target=causal(target), proposer=proposer, policy=policy)


def prompt_lookup(*, target: Backbone, draft: Draft | None, num_drafts: int, max_ngram: int) -> Decoder:
    """Drafts copied from the text so far; the drafter is not used."""
    device = torch.device(target.device)
    proposer = PromptLookupProposer(num_drafts=num_drafts, max_ngram=max_ngram, device=device)
    return Speculative(target=causal(target), proposer=proposer, policy=VerifyAll())


def jacobi(*, target: Backbone, draft: Draft | None, config: JacobiConfig) -> Decoder:
    """Jacobi decoding: several of the target's own tokens per pass; the drafter is not used."""
    return Jacobi(target=causal(target), config=config)


def any_subset(*, target: Backbone, draft: Draft | None, config: AnySubsetConfig) -> Decoder:
    """Any-subset decoding: the tokens at chosen positions, one or several per pass; the drafter is not used."""
    return AnySubset(target=target, config=config)


def sigma_gpt(*, target: Backbone, draft: Draft | None, num_orders: int) -> Decoder:
    """Rejection sampling in random orders, biased; the drafter is not used."""
    return SigmaGPT(target=target, num_orders=num_orders)
