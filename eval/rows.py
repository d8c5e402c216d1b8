"""From samples to rows of results.json: counts, ratios, paired speedups and their intervals. Pure functions.

Counting follows design.md. Pooled sums over prompts are the headline; the mean over prompts stands beside it.
Intervals are 95 %: Wilson's for shares, percentile bootstrap over prompts for tau, tpf and speedup.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dspec.decoding.base import Generation
from eval.samples import Sample

Row = dict[str, Any]
Statistic = Callable[[Sequence[int]], float | None]  # of the units (prompts or batches) with these indices


def row(
    samples: Sequence[Sample],
    baseline: Sequence[Sample],
    base: Sequence[Sample],
    *,
    quality: str,
    greedy: bool,
    seed: int,
) -> Row:
    """What one decoder did on one benchmark. `baseline` are samples of the same prompts, in order, by plain AR of the
    same weights, `base` by plain AR of the base that all methods share."""
    generations = [s.generation for s in samples]
    verdicts = {name: [s.verdicts[name] for s in samples] for name in (samples[0].verdicts if samples else {})}
    ratios = paired_speedups(samples, baseline)
    differing = sum(a.generation.tokens != b.generation.tokens for a, b in zip(samples, baseline, strict=True))
    seconds = sum({(s.batch): s.seconds for s in samples}.values())
    return {
        "n": len(samples),
        "quality": statistics.fmean(verdicts[quality]) if quality else None,
        "quality_name": quality or None,
        "verdicts": {name: statistics.fmean(values) for name, values in verdicts.items()},
        **counts(generations),
        "tokens_per_second": sum(len(g.tokens) for g in generations) / seconds,
        "speedup": statistics.median(ratios),
        "speedup_vs_base_ar": statistics.median(paired_speedups(samples, base)),
        "interval_95": intervals(generations, verdicts.get(quality, []), ratios, seed=seed),
        "mismatches": differing if greedy else None,
        "acceptance": acceptance(generations),
    }


def paired_speedups(samples: Sequence[Sample], baseline: Sequence[Sample]) -> list[float]:
    """Tokens per second over the baseline's, batch by batch (a batch of one is a prompt)."""
    own, base = _batch_speeds(samples), _batch_speeds(baseline)
    return [own[number] / base[number] for number in own]


def _batch_speeds(samples: Sequence[Sample]) -> dict[int, float]:
    tokens: dict[int, int] = {}
    for s in samples:
        tokens[s.batch] = tokens.get(s.batch, 0) + len(s.generation.tokens)
    return {s.batch: tokens[s.batch] / s.seconds for s in samples}


def counts(generations: Sequence[Generation]) -> Row:
    """Pooled counts and ratios, and the means over prompts beside them."""
    tokens = sum(len(g.tokens) for g in generations)
    beyond = tokens - sum(g.prefill_tokens for g in generations)
    forwards = sum(g.forwards for g in generations)
    nfe = sum(g.nfe for g in generations)
    rounds = sum(len(g.rounds) for g in generations)
    own = [(len(g.tokens) - g.prefill_tokens) / len(g.rounds) for g in generations if g.rounds]
    return {
        "tau": beyond / rounds if rounds else None,
        "tau_prompt_mean": statistics.fmean(own) if own else None,
        "tpf": beyond / forwards if forwards else None,
        "tpf_with_prefill": tokens / nfe,
        "nfe": nfe,
        "nfe_prefill": nfe - forwards,
        "positions_computed": sum(g.positions_computed for g in generations),
        "branch_forwards": sum(g.branch_forwards for g in generations),
        "tokens": tokens,
    }


def acceptance(generations: Sequence[Generation]) -> Row | None:
    """Per slot: conditional acceptance, of the `reached` rounds (whose earlier drafts were accepted), and prefix
    survival, of all `counted` rounds (in which the slot counts)."""
    rounds = [r for g in generations for r in g.rounds]
    slots = max((r.drafted for r in rounds), default=0)
    if not slots:
        return None
    conditional, survival, reached_K, counted_K = [], [], [], []
    for k in range(slots):
        counted = [r for r in rounds if r.valid > k]
        reached = [r for r in counted if r.accepted >= k]
        passed = sum(r.accepted > k for r in counted)
        conditional.append(passed / len(reached) if reached else None)
        survival.append(passed / len(counted) if counted else None)
        reached_K.append(len(reached))
        counted_K.append(len(counted))
    return {"conditional": conditional, "prefix_survival": survival, "reached": reached_K, "counted": counted_K}


def intervals(
    generations: Sequence[Generation], verdicts: Sequence[bool], ratios: Sequence[float], *, seed: int
) -> Mapping[str, list[float] | None]:
    """Of the headline numbers: Wilson's for quality, else bootstrap over prompts (speedup: over batches)."""
    beyond = [len(g.tokens) - g.prefill_tokens for g in generations]
    forwards, rounds = [g.forwards for g in generations], [len(g.rounds) for g in generations]

    def pooled(below: Sequence[int]) -> Statistic:
        return lambda at: sum(beyond[i] for i in at) / total if (total := sum(below[i] for i in at)) else None

    n = len(generations)
    return {
        "quality": wilson(sum(verdicts), len(verdicts)),
        "tau": bootstrap(pooled(rounds), n if any(rounds) else 0, seed=seed),
        "tpf": bootstrap(pooled(forwards), n if any(forwards) else 0, seed=seed),
        "speedup": bootstrap(lambda at: statistics.median(ratios[i] for i in at), len(ratios), seed=seed),
    }


def wilson(right: int, n: int) -> list[float] | None:
    """Wilson's 95 % score interval of a share; None for no trials. It has a width at 0 and at n of n, too."""
    if not n:
        return None
    share, z = right / n, statistics.NormalDist().inv_cdf(0.975)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def bootstrap(statistic: Statistic, units: int, *, seed: int, resamples: int = 1000) -> list[float] | None:
    """2.5 % and 97.5 % quantiles of `statistic` over resampled unit indices; None for no units."""
    if not units:
        return None
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(units, (resamples, units), generator=generator).tolist()
    values = torch.tensor([v for at in draws if (v := statistic(at)) is not None], dtype=torch.float64)
    return torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist() if len(values) else None
