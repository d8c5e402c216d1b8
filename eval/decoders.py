"""The decoders that configs name: each function takes the keys of its file in conf/decoder.

`weights` selects the model that decodes: the trained target, or its base before training. `base()` returns that base;
it is loaded when its first decoder is built, so that no training run holds a second model, and shared by all decoders
(instantiate_decoders in dspec/config/compose.py).
"""

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspec.decoding.any_subset.decoder import AnySubset, AnySubsetConfig
from dspec.decoding.any_subset.sigma_gpt import SigmaGPT
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.diffusion.block_state import BlockRules
from dspec.decoding.diffusion.branch_parallel import join_processes
from dspec.decoding.diffusion.decoder import COMMITTED, NONE, BlockDiffusion, DiffusionConfig, not_as_trained
from dspec.decoding.diffusion.forward import PROBABILITY
from dspec.decoding.diffusion.lookahead import Lookahead
from dspec.decoding.diffusion.row_state import BranchExecutor, SingleProcess
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import Decoder
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import ConfidenceThreshold, VerificationPolicy, VerifyAll
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel, require_causal
from dspec.models.target_model import TargetModel
from dspec.models.temperatures import Calibration
from dspec.models.training_record import BLOCK_CAUSAL, FULL, TrainingRecord
from dspec.serving import schedulers
from dspec.serving.policies import ScheduledVerification
from dspec.serving.step_table import StepTable, read_step_table
from eval.results import ANY_SUBSET, AR, DIFFUSION

log = logging.getLogger(__name__)

Base = Callable[[], TargetModel]
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

    def check(self, *, target: TargetModel, draft: Draft | None) -> None:
        """Raises UserError for settings that its decoder rejects; one of the base would have to load it first."""
        if not self.of_base:
            self.build(target=target, draft=draft)


def built(key: str, spec: DecoderSpec, *, target: TargetModel, draft: Draft | None) -> Decoder:
    """The decoder that configs call `key`; warns of a mask that its model was not trained under. Raises UserError,
    with that name, for settings that it rejects."""
    try:
        decoder = spec.build(target=target, draft=draft)
    except UserError as error:
        raise UserError(f"decoder.{key}: {error}") from error
    if isinstance(decoder, BlockDiffusion) and (differences := not_as_trained(decoder.config, decoder.trained)):
        log.warning(
            "decoder.%s: %r is not decoded as it was trained (%s)", key, decoder.target.name, "; ".join(differences)
        )
    return decoder


def autoregressive(*, label: str, weights: str, base: Base) -> DecoderSpec:
    """Plain AR; the drafter is not used."""
    return _spec(label, weights, base, build_ar)


def build_ar(*, target: TargetModel, draft: Draft | None) -> Decoder:
    """Plain AR of the target. Raises UserError for one that only fills holes."""
    return Autoregressive(target=require_causal(target))


def speculative(
    *, label: str, weights: str, base: Base, sequential_head: bool, refinement_passes: int, confidence_threshold: float
) -> DecoderSpec:
    """Speculative decoding with the drafter, with or without its sequential head; threshold 0 verifies every draft."""

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        if draft is None:
            raise UserError(
                "decoder=speculative needs a drafter: train one (recipe=dspark) or use decoder=autoregressive"
            )
        proposer = DraftProposer(draft, sequential_head=sequential_head, refinement_passes=refinement_passes)
        policy = _verification(draft, proposer, confidence_threshold, sequential_head=sequential_head)
        return Speculative(target=require_causal(target), proposer=proposer, policy=policy)

    return replace(_spec(label, weights, base, build), needs_draft=True)


def _verification(
    draft: Draft, proposer: DraftProposer, threshold: float, *, sequential_head: bool
) -> VerificationPolicy:
    """Which drafts are verified. Raises UserError for a threshold without a confidence head."""
    if threshold == 0:
        return VerifyAll()
    calibration = _calibration(draft, proposer, sequential_head=sequential_head)
    if draft.confidence_head is None:
        raise UserError(f"confidence_threshold={threshold} reads a confidence head, which this drafter does not have")
    return ConfidenceThreshold(threshold, calibration=calibration)


def _calibration(draft: Draft, proposer: DraftProposer, *, sequential_head: bool) -> Calibration | None:
    """The drafter's temperatures; warns where they do not fit its way of drafting."""
    if draft.metadata.calibration is None or proposer.plain:
        return draft.metadata.calibration
    warnings.warn(
        f"STS temperatures were fitted with the sequential head on and without refinement; this decoder has "
        f"sequential_head={sequential_head}, refinement_passes={proposer.refinement_passes}: they are "
        "not used, confidences stay raw",
        stacklevel=4,
    )
    return None


def scheduled(
    *,
    label: str,
    weights: str,
    base: Base,
    sequential_head: bool,
    refinement_passes: int,
    scheduler: str,
    steps: str | None,
    length: int,
    threshold: float,
    min_yield: float,
    horizon: int,
    probe_every: int,
) -> DecoderSpec:
    """Speculative decoding of which a scheduler verifies as much as pays, given what steps cost on this machine."""

    def table() -> StepTable:
        if steps is None:
            raise UserError(
                f"scheduler={scheduler} needs decoder.scheduled.steps=<sps.json>: measure one with "
                "python -m eval.profile_steps, or take scheduler=static or threshold"
            )
        return read_step_table(Path(steps).expanduser())

    rules: dict[str, Any] = {"min_yield": min_yield, "horizon": horizon, "probe_every": probe_every}
    known: dict[str, Callable[[], schedulers.Scheduler]] = {
        "synchronous": lambda: schedulers.Synchronous(table(), **rules),
        "asynchronous": lambda: schedulers.asynchronous(table(), **rules),
        "sglang": lambda: schedulers.sglang(table()),
        "vllm": lambda: schedulers.vllm(table()),
        "static": lambda: schedulers.Static(length),
        "threshold": lambda: schedulers.Threshold(threshold),
    }
    if scheduler not in known:
        raise UserError(f"decoder.scheduled.scheduler={scheduler} must be one of {', '.join(known)}")
    chosen = known[scheduler]()

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        if draft is None:
            raise UserError(
                "decoder=scheduled needs a drafter: train one (recipe=dspark) or use decoder=autoregressive"
            )
        if chosen.reads_confidence and draft.confidence_head is None:
            raise UserError(f"scheduler={scheduler} reads a confidence head, which this drafter does not have")
        proposer = DraftProposer(draft, sequential_head=sequential_head, refinement_passes=refinement_passes)
        if scheduler == "static" and length > proposer.num_drafts:
            raise UserError(f"length={length}: this drafter drafts {proposer.num_drafts} tokens")
        used = _calibration(draft, proposer, sequential_head=sequential_head) if chosen.reads_confidence else None
        policy = ScheduledVerification(chosen, calibration=used)
        return Speculative(target=require_causal(target), proposer=proposer, policy=policy)

    return replace(_spec(label, weights, base, build), needs_draft=True)


def prompt_lookup(*, label: str, weights: str, base: Base, num_drafts: int, max_ngram: int) -> DecoderSpec:
    """Drafts copied from the text so far; the drafter is not used."""

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        device = torch.device(target.device)
        proposer = PromptLookupProposer(num_drafts=num_drafts, max_ngram=max_ngram, device=device)
        return Speculative(target=require_causal(target), proposer=proposer, policy=VerifyAll())

    return _spec(label, weights, base, build)


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

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        return Jacobi(target=require_causal(target), config=config)

    return _spec(label, weights, base, build)


def any_subset(*, label: str, weights: str, base: Base) -> DecoderSpec:
    """An any-subset model's tokens at chosen positions, one per pass; the drafter is not used."""
    return _any_subset(
        label, weights, base, AnySubsetConfig(num_drafts=1, drafted_by="model", bonus=False, tolerance=0.0)
    )


def assd(
    *, label: str, weights: str, base: Base, num_drafts: int, drafted_by: str, bonus: bool, tolerance: float
) -> DecoderSpec:
    """Any-Subset Speculative Decoding: the same tokens, several per pass; the drafter is not used."""
    config = AnySubsetConfig(num_drafts=num_drafts, drafted_by=drafted_by, bonus=bonus, tolerance=tolerance)
    return _any_subset(label, weights, base, config)


def _any_subset(label: str, weights: str, base: Base, config: AnySubsetConfig) -> DecoderSpec:
    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        return AnySubset(target=target, config=config)

    return _spec(label, weights, base, build, baseline=ANY_SUBSET)


def sigma_gpt(*, label: str, weights: str, base: Base, num_orders: int) -> DecoderSpec:
    """Rejection sampling in random orders (sigma-GPT): biased; the drafter is not used."""

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        return SigmaGPT(target=target, num_orders=num_orders)

    return _spec(label, weights, base, build, baseline=ANY_SUBSET)


_NO_LOOKAHEAD = Lookahead(branches=0, branch_score="mean", segment=1)


def diffusion(
    *, label: str, weights: str, base: Base, tokens_per_step: int, block_size: int | None, attention: str | None
) -> DecoderSpec:
    """A diffusion LM's most confident tokens, a fixed number per pass, block after block; with one the baseline of all
    its decoders."""

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        rules = BlockRules(
            block_size=block_size, append_ratio=1.0, activate_ratio=1.0, threshold=1.0, min_fills=tokens_per_step
        )
        return _block_by_block(require_causal(target), rules, attention, NONE)

    return _spec(label, weights, base, build, baseline=DIFFUSION)


def fast_dllm(
    *,
    label: str,
    weights: str,
    base: Base,
    threshold: float,
    block_size: int | None,
    attention: str | None,
    cache: str,
) -> DecoderSpec:
    """A diffusion LM's tokens that are probable enough, at least one per pass, block after block."""

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        rules = BlockRules(
            block_size=block_size, append_ratio=1.0, activate_ratio=1.0, threshold=threshold, min_fills=1
        )
        return _block_by_block(require_causal(target), rules, attention, cache)

    return _spec(label, weights, base, build, baseline=DIFFUSION)


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
    """Several blocks of a diffusion LM at a time, under block-causal attention, cached exactly."""

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        rules = BlockRules(
            block_size=block_size,
            append_ratio=append_ratio,
            activate_ratio=activate_ratio,
            threshold=threshold,
            min_fills=1,
        )
        return _block_diffusion(require_causal(target), rules, BLOCK_CAUSAL, COMMITTED)

    return _spec(label, weights, base, build, baseline=DIFFUSION)


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
    """D2F with lookahead branches; with cache=none and full attention: lookahead branches for a plain diffusion LM.
    With a `process_timeout_s` they are divided over processes, which wait for one another so many seconds."""

    def build(*, target: TargetModel, draft: Draft | None) -> Decoder:
        rules = BlockRules(
            block_size=block_size,
            append_ratio=append_ratio,
            activate_ratio=activate_ratio,
            threshold=threshold,
            min_fills=1,
        )
        lookahead = Lookahead(branches=branches, branch_score=branch_score, segment=segment)
        executor: BranchExecutor = SingleProcess()
        if process_timeout_s is not None:
            executor = join_processes(timeout_seconds=process_timeout_s, device=torch.device(target.device))
        return _block_diffusion(
            require_causal(target), rules, window_attention, cache, lookahead, confidence_measure, executor
        )

    return _spec(label, weights, base, build, baseline=DIFFUSION)


def _block_by_block(target: LanguageModel, rules: BlockRules, attention: str | None, cache: str) -> Decoder:
    """Under the attention that the model was trained with unless told otherwise. Filled blocks cost nothing to cache
    exactly under block-causal attention."""
    attention = attention or TrainingRecord.read(target).attention or FULL
    return _block_diffusion(
        target, rules, attention, COMMITTED if (attention, cache) == (BLOCK_CAUSAL, NONE) else cache
    )


def _block_diffusion(
    target: LanguageModel,
    rules: BlockRules,
    attention: str,
    cache: str,
    lookahead: Lookahead = _NO_LOOKAHEAD,
    confidence_measure: str = PROBABILITY,
    executor: BranchExecutor | None = None,
) -> Decoder:
    config = DiffusionConfig(
        rules=rules, attention=attention, cache=cache, lookahead=lookahead, confidence_measure=confidence_measure
    )
    return BlockDiffusion(target=target, config=config, executor=executor or SingleProcess())


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


def on_base(*, target: TargetModel, base: Base, build: Build, **parts: Any) -> Decoder:
    """`build` on the base, in the trained target's dtype and on its device; without the target's drafter. A base that
    does not say whether its logits are shifted is read as it was in training, so as the target."""
    model = base().to(device=target.device, dtype=target.dtype)
    if isinstance(model, LanguageModel) and isinstance(target, LanguageModel):
        record = TrainingRecord.read(model)
        if record.attention is None:
            replace(record, shift=TrainingRecord.read(target).shift).write(model)
    return build(target=model, **parts | {"draft": None})
