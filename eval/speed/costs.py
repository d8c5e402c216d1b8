"""The cost of rounds and forward passes on this device: the measurements of `python -m eval.speed`.

They follow the TPU report on DFlash (where a round's time goes; the cost of verifying and drafting K tokens after a
context of L; tau along a generation) and LoPA's table of speeds. Costs are medians over repeats in which K varies
fastest, so that a slow moment of the machine affects every K.
"""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dspec.decoding.generation import Generation, Request
from dspec.decoding.loop import Decoder, decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import GREEDY, SamplingBatch
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.spans import Profile
from eval.samples import Sample
from eval.speed.settings import check_curves

PREFILL = "prefill"
VERIFIES = ("target", "target LM head")
DRAFTS = ("draft", "draft LM head", "sequential head", "confidence head", "draft context", "lookup")
Line = dict[str, Any]


def round_profile(decoder: Decoder, requests: Sequence[Request], *, device: torch.device, batch_size: int) -> Line:
    """Milliseconds of a prompt's round (for plain AR: of a token) by span, without the prefill if there is one. In
    batches of `batch_size`, whose rows share a pass, it is one row's share of the pass.

    `spans` are timed with a synchronisation at both ends of each; `between spans` is the rest of a round: the host's
    own work. `unsynchronised` is a round without synchronisation; if a GPU runs asynchronously it is less than the sum.
    """

    def timed(given: Sequence[Request]) -> tuple[list[Generation], float]:
        clock = Profile(device)
        start = clock.now()
        batches = (given[i : i + batch_size] for i in range(0, len(given), batch_size))
        generations = [generation for batch in batches for generation in decode(decoder, batch)]
        return generations, clock.now() - start

    warm_up, _ = timed(requests)
    prefill = 0.0
    if any(g.prefill_forwards for g in warm_up):  # diffusion decoding has none
        _, prefill = timed([_first_token(request) for request in requests])
    generations, plain = timed(requests)
    with Profile(device) as profile:
        _, total = timed(requests)
    rounds = sum(g.forwards for g in generations)
    if not rounds:
        raise UserError("every answer ended with its first token: no round to profile; use other prompts")

    def per_round(seconds: float) -> float:
        return 1000 * seconds / rounds

    in_prefill = profile.seconds.get(PREFILL, 0.0)
    spans = {path: per_round(seconds) for path, seconds in profile.seconds.items() if path.split("/")[0] != PREFILL}
    outer = sum(seconds for path, seconds in profile.seconds.items() if "/" not in path and path != PREFILL)
    return {
        "rounds": rounds,
        "milliseconds": per_round(total - in_prefill),
        "unsynchronised": per_round(plain - prefill),
        "spans": spans,
        "between spans": per_round(total - in_prefill - outer),
    }


def _first_token(request: Request) -> Request:
    """The same request for one token."""
    positions = None if request.positions is None else request.positions[: len(request.ids) + 1]
    return replace(request, max_new_tokens=1, positions=positions)


def verify_cost(
    target: LanguageModel, *, tokens: Sequence[int], contexts: Sequence[int], repeats: int, seed: int
) -> list[Line]:
    """Milliseconds to verify K `tokens` after each context length, batch of one, random ids: the target's pass, its
    attention (timed separately, with synchronisation), the rest of the pass, the LM head, and the ratio of pass and
    head to those of the smallest K. Raises UserError if context and tokens exceed the model's positions."""
    _check_lengths(target, tokens, contexts)
    generator, lines = torch.Generator().manual_seed(seed), []
    for context in contexts:
        ids = torch.randint(target.vocab_size, (1, context + max(tokens)), generator=generator).to(target.device)
        cache, clock = target.new_cache(), Profile(target.device)
        target(ids[:, :context], cache=cache)
        times: dict[int, list[tuple[float, float, float]]] = {k: [] for k in tokens}
        for _ in range(repeats + 1):
            for k in tokens:
                block = ids[:, context : context + k]
                start = clock.now()
                hidden = target(block, start_B=[context], cache=cache).hidden_BLD
                middle = clock.now()
                target.logits(hidden)
                end = clock.now()
                with Profile(target.device) as profile:
                    target(block, start_B=[context], cache=cache)
                times[k].append((middle - start, profile.seconds["attention"], end - middle))
        for k in tokens:
            forward, attention, head = _medians(times[k])
            lines.append(
                {
                    "context": context,
                    "tokens": k,
                    "forward": forward,
                    "attention": attention,
                    "rest": forward - attention,
                    "lm_head": head,
                }
            )
    return _with_ratio(lines, ("forward", "lm_head"))


def draft_cost(
    target: LanguageModel, draft: Draft, *, tokens: Sequence[int], contexts: Sequence[int], repeats: int, seed: int
) -> list[Line]:
    """Milliseconds to draft a block of K slots after each context length: the block pass, its LM head and the
    sequential head (0 without one), and the ratio of their sum to that of the smallest K. The drafter is run at block
    sizes that it was not trained for: its cost does not depend on its weights."""
    _check_lengths(target, tokens, contexts)
    generator, lines = torch.Generator().manual_seed(seed), []
    sizes = [k for k in tokens if k > draft.config.first_slot]
    for context in contexts:
        ids = torch.randint(target.vocab_size, (1, context + 1), generator=generator)
        features = target(ids[:, :-1].to(target.device), taps=draft.config.target_layer_ids).features_BLF
        proposers = {k: DraftProposer(_resized(draft, k)) for k in sizes}
        times: dict[int, list[tuple[float, float, float]]] = {k: [] for k in sizes}
        memories = {k: proposer.start(features) for k, proposer in proposers.items()}
        for _ in range(repeats + 1):
            for k, proposer in proposers.items():
                with Profile(target.device) as profile:
                    proposer.propose(
                        memories[k],
                        ids.tolist(),
                        samplings=SamplingBatch([GREEDY]),
                        uniform_BJ=None,
                        confidence=False,
                    )
                seconds = profile.seconds
                times[k].append((seconds["draft"], seconds["draft LM head"], seconds.get("sequential head", 0.0)))
        for k in sizes:
            block, head, sequential = _medians(times[k])
            lines.append(
                {"context": context, "tokens": k, "forward": block, "lm_head": head, "sequential_head": sequential}
            )
    return _with_ratio(lines, ("forward", "lm_head", "sequential_head"))


def _resized(draft: Draft, block_size: int) -> Draft:
    """The same weights with another block size."""
    other = copy.copy(draft)
    other.config = replace(draft.config, block_size=block_size)
    return other


def _medians(times: Sequence[tuple[float, float, float]]) -> list[float]:
    """Medians in milliseconds, without the first repeat (warm-up)."""
    return [1000 * statistics.median(column) for column in zip(*times[1:], strict=True)]


def _with_ratio(lines: list[Line], parts: Sequence[str]) -> list[Line]:
    for line in lines:
        least = next(other for other in lines if other["context"] == line["context"])
        line["ratio"] = sum(line[part] for part in parts) / sum(least[part] for part in parts)
    return lines


def _check_lengths(target: LanguageModel, tokens: Sequence[int], contexts: Sequence[int]) -> None:
    check_curves(tokens, contexts)
    if max(contexts) + max(tokens) > target.max_positions:
        raise UserError(
            f"speed.contexts up to {max(contexts)} and speed.tokens up to {max(tokens)} exceed the context of "
            f"{target.name!r} ({target.max_positions} positions): lower one of them"
        )


def achieved_over_ideal(tau: float, speedup: float, baseline: Line, profile: Line) -> Line:
    """The speedup that the models alone would allow, tau * T_ar / (T_draft + T_verify), and the fraction achieved.

    T_ar is the pass of `baseline`, which emits one token per pass, with its LM head; `baseline` and `profile` come from
    `round_profile` at the batch size of `speedup`: times per row.
    """
    ar = sum(baseline["spans"][name] for name in VERIFIES)
    verify = sum(profile["spans"][name] for name in VERIFIES)
    draft = sum(profile["spans"].get(name, 0.0) for name in DRAFTS)
    ideal = tau * ar / (draft + verify)
    return {"T_ar": ar, "T_verify": verify, "T_draft": draft, "ideal": ideal, "achieved": speedup / ideal}


def tau_by_position(generations: Sequence[Generation], *, width: int) -> list[Line]:
    """tau of the rounds that started at tokens [start, start + width) of their answers."""
    emitted: dict[int, list[int]] = {}
    for generation in generations:
        at = generation.prefill_tokens
        for one in generation.rounds:
            emitted.setdefault(at // width, []).append(one.committed)
            at += one.committed
    return [
        {"start": number * width, "rounds": len(new), "tau": statistics.fmean(new)}
        for number, new in sorted(emitted.items())
    ]


def speeds(samples: Sequence[Sample], *, price_per_hour: float | None) -> Line:
    """Tokens per second (all tokens / all seconds; the fastest batch; the mean of the ten fastest), seconds per sample
    (all seconds / all samples), the mean seconds per batch, and the price of a million tokens in the currency of
    `price_per_hour`."""
    batches: dict[int, list[Sample]] = {}
    for sample in samples:
        batches.setdefault(sample.batch, []).append(sample)
    tokens = [sum(len(s.generation.tokens) for s in batch) for batch in batches.values()]
    seconds = [batch[0].seconds for batch in batches.values()]
    rates = sorted((n / t for n, t in zip(tokens, seconds, strict=True)), reverse=True)
    average = sum(tokens) / sum(seconds)
    return {
        "average": average,
        "max": rates[0],
        "top10": statistics.fmean(rates[:10]),
        "seconds_per_sample": sum(seconds) / len(samples),
        "latency": statistics.fmean(seconds),
        "price_per_million": None if price_per_hour is None else price_per_hour / 3600 / average * 1e6,
    }
