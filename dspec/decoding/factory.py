"""Builds decoders from target and drafter; eval/decoders.py passes on what the config sets."""

import warnings

import torch

from dspec.decoding.any_subset import AnySubset, AnySubsetConfig
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.block_state import BlockRules
from dspec.decoding.branch_parallel import join_ranks
from dspec.decoding.diffusion import COMMITTED, NONE, BlockDiffusion, DiffusionConfig
from dspec.decoding.diffusion_pass import BLOCK_CAUSAL, FULL, PROBABILITY, Trained
from dspec.decoding.flight import Alone, Placement
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.lookahead import Lookahead
from dspec.decoding.loop import Decoder
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sigma_gpt import SigmaGPT
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import ConfidenceThreshold, VerificationPolicy, VerifyAll
from dspec.errors import UserError
from dspec.models.backbone import Backbone
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel, causal


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


_NO_LOOKAHEAD = Lookahead(branches=0, confidence="mean", segment=1)


def diffusion(
    *, target: Backbone, draft: Draft | None, tokens_per_step: int, block_size: int | None, attention: str | None
) -> Decoder:
    """A diffusion LM's `tokens_per_step` most confident tokens a pass, block after block."""
    rules = BlockRules(block_size=block_size, append=1.0, activate=1.0, threshold=1.0, at_least=tokens_per_step)
    return _block_by_block(causal(target), rules, attention, NONE)


def confidence_threshold(
    *,
    target: Backbone,
    draft: Draft | None,
    threshold: float,
    block_size: int | None,
    attention: str | None,
    cache: str,
) -> Decoder:
    """All tokens more probable than the threshold, at least one a pass, block after block."""
    rules = BlockRules(block_size=block_size, append=1.0, activate=1.0, threshold=threshold, at_least=1)
    return _block_by_block(causal(target), rules, attention, cache)


def d2f(
    *,
    target: Backbone,
    draft: Draft | None,
    block_size: int | None,
    append: float,
    activate: float,
    threshold: float,
) -> Decoder:
    """Several blocks at a time under block-causal attention, cached exactly."""
    rules = BlockRules(block_size=block_size, append=append, activate=activate, threshold=threshold, at_least=1)
    return _block_diffusion(causal(target), rules, BLOCK_CAUSAL, COMMITTED)


def lopa(
    *,
    target: Backbone,
    draft: Draft | None,
    block_size: int | None,
    append: float,
    activate: float,
    threshold: float,
    window_attention: str,
    cache: str,
    branches: int,
    confidence: str,
    segment: int,
    ranking: str,
    rank_timeout: float | None,
) -> Decoder:
    """D2F with lookahead branches; without a cache and under full attention those of a plain diffusion LM. With a
    `rank_timeout` they are divided over ranks, which wait for one another so many seconds."""
    rules = BlockRules(block_size=block_size, append=append, activate=activate, threshold=threshold, at_least=1)
    lookahead = Lookahead(branches=branches, confidence=confidence, segment=segment)
    placement: Placement = Alone()
    if rank_timeout is not None:
        placement = join_ranks(timeout_seconds=rank_timeout, device=torch.device(target.device))
    return _block_diffusion(causal(target), rules, window_attention, cache, lookahead, ranking, placement)


def _block_by_block(target: LanguageModel, rules: BlockRules, attention: str | None, cache: str) -> Decoder:
    """Under the attention that the model was trained with unless told otherwise. Filled blocks cost nothing to cache
    exactly under block-causal attention."""
    attention = attention or Trained.of(target).attention or FULL
    return _block_diffusion(
        target, rules, attention, COMMITTED if (attention, cache) == (BLOCK_CAUSAL, NONE) else cache
    )


def _block_diffusion(
    target: LanguageModel,
    rules: BlockRules,
    attention: str,
    cache: str,
    lookahead: Lookahead = _NO_LOOKAHEAD,
    ranking: str = PROBABILITY,
    placement: Placement | None = None,
) -> Decoder:
    config = DiffusionConfig(rules=rules, attention=attention, cache=cache, lookahead=lookahead, ranking=ranking)
    trained = Trained.of(target).attention
    if trained not in (None, attention):
        warnings.warn(
            f"{target.name!r} was trained under {trained} attention, this decoder's is {attention}: its answers "
            "are not what the model was trained for (results have both)",
            stacklevel=3,
        )
    return BlockDiffusion(target=target, config=config, placement=placement or Alone())
