"""From samples to rows of results.json: counts, ratios, paired speedups and their intervals. Pure functions.

Pooled sums over prompts are the headline numbers; the mean over prompts is reported next to them. Intervals are 95 %:
Wilson's for proportions, percentile bootstrap over prompts for tau and tpf, over batches for speedup.
"""

import statistics
from collections.abc import Mapping, Sequence

from dspec.decoding.generation import Generation
from eval.intervals import bootstrap, wilson
from eval.results import ResultRow, pool
from eval.samples import Sample


def result_row(
    samples: Sequence[Sample],
    baseline: Sequence[Sample],
    reference: Sequence[Sample],
    *,
    quality: str,
    greedy: bool,
    seed: int,
) -> ResultRow:
    """One decoder's row on one benchmark. `baseline` and `reference` are samples of the same prompts, in order, by
    these two decoders (eval/results.py)."""
    generations = [s.generation for s in samples]
    verdicts = {name: [s.verdicts[name] for s in samples] for name in (samples[0].verdicts if samples else {})}
    speedups = batch_speedups(samples, baseline)
    differing = sum(a.generation.tokens != b.generation.tokens for a, b in zip(samples, baseline, strict=True))
    counted, filled = counts(generations), filled_per_pass(generations)
    seconds = sum({s.batch: s.seconds for s in samples}.values())
    return {
        **counted,
        "quality": statistics.fmean(verdicts[quality]) if quality else None,
        "quality_name": quality or None,
        "verdicts": {name: statistics.fmean(values) for name, values in verdicts.items()},
        "scores": score_means(samples),
        "tokens_per_second": counted["tokens"] / seconds,
        "speedup": median_over_prompts(speedups),
        "speedup_vs_base_ar": median_over_prompts(batch_speedups(samples, reference)),
        "interval_95": intervals(generations, verdicts.get(quality, []), speedups, seed=seed),
        "mismatches": differing if greedy else None,
        "acceptance": acceptance(generations),
        "filled_per_pass": filled,
        "prompts_per_pass": None if filled is None else prompts_per_pass(generations),
    }


def score_means(samples: Sequence[Sample]) -> dict[str, ResultRow]:
    """Each continuous score's `mean` over the `n` answers that have it, and the `se` (standard error) of that mean."""
    names = dict.fromkeys(name for s in samples for name in s.scores)
    return {name: mean_and_error([s.scores[name] for s in samples if name in s.scores]) for name in names}


def mean_and_error(values: Sequence[float]) -> ResultRow:
    """Mean, standard error (None for fewer than two values) and number of values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "se": error, "n": len(values)}


def prompt_counts(generation: Generation) -> ResultRow:
    """One prompt's counts for `pool`."""
    return {
        "n": 1,
        "tokens": len(generation.tokens),
        "prefill_tokens": generation.prefill_tokens,
        "nfe": generation.nfe,
        "nfe_prefill": generation.prefill_forwards,
        "rounds": len(generation.rounds),
        "positions_computed": generation.positions_computed,
        "branch_forwards": generation.branch_forwards,
        "slots_filled": generation.slots_filled,
    }


def counts(generations: Sequence[Generation]) -> ResultRow:
    """Pooled counts and ratios, and tau's mean over prompts."""
    prompts = [prompt_counts(g) for g in generations]
    taus = [tau for p in prompts if (tau := pool([p])["tau"]) is not None]
    return pool(prompts) | {"tau_prompt_mean": statistics.fmean(taus) if taus else None}


def filled_per_pass(generations: Sequence[Generation]) -> list[float] | None:
    """The trace of a diffusion LM's decoder: the tokens of the answer that the first, second, ... pass filled in, mean
    over the prompts that still had one. None for other decoders."""
    traces = [[p.filled for p in g.passes] for g in generations]
    if not any(map(any, traces)):
        return None
    return [statistics.fmean(t[i] for t in traces if i < len(t)) for i in range(max(map(len, traces)))]


def prompts_per_pass(generations: Sequence[Generation]) -> list[int]:
    """How many prompts had a first, second, ... pass."""
    lengths = [len(g.passes) for g in generations]
    return [sum(length > i for length in lengths) for i in range(max(lengths))]


def batch_speedups(samples: Sequence[Sample], baseline: Sequence[Sample]) -> list[tuple[float, int]]:
    """Per batch: its tokens per second relative to `baseline`, and its number of prompts. The prompts of a batch share
    its seconds."""
    fast, slow = _by_batch(samples), _by_batch(baseline)
    return [
        (_tokens_per_second(batch) / _tokens_per_second(slow[number]), len(batch)) for number, batch in fast.items()
    ]


def _by_batch(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    batches: dict[int, list[Sample]] = {}
    for s in samples:
        batches.setdefault(s.batch, []).append(s)
    return batches


def _tokens_per_second(batch: Sequence[Sample]) -> float:
    return sum(len(s.generation.tokens) for s in batch) / batch[0].seconds


def median_over_prompts(speedups: Sequence[tuple[float, int]]) -> float:
    """Each batch is weighted by its number of prompts, so that an incomplete last batch weighs less."""
    return statistics.median(speedup for speedup, prompts in speedups for _ in range(prompts))


def acceptance(generations: Sequence[Generation]) -> ResultRow | None:
    """Per slot: conditional acceptance, over the `reached` rounds (whose earlier drafts were accepted), and prefix
    survival, over all `counted` rounds (in which the slot is valid)."""
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
    generations: Sequence[Generation],
    verdicts: Sequence[bool],
    speedups: Sequence[tuple[float, int]],
    *,
    seed: int,
) -> Mapping[str, list[float] | None]:
    """Intervals of the headline numbers. None if there is nothing to resample: no rounds, no passes after prefill."""
    return {
        "quality": wilson(sum(verdicts), len(verdicts)),
        "tau": decoded_interval(generations, [len(g.rounds) for g in generations], seed=seed),
        "tpf": tpf_interval(generations, seed=seed),
        "speedup": bootstrap(lambda at: median_over_prompts([speedups[i] for i in at]), len(speedups), seed=seed),
    }


def tpf_interval(generations: Sequence[Generation], *, seed: int) -> list[float] | None:
    """Interval of tokens per forward pass, both without the prefill, over resampled prompts; None without a pass."""
    return decoded_interval(generations, [g.forwards for g in generations], seed=seed)


def decoded_interval(generations: Sequence[Generation], per: Sequence[int], *, seed: int) -> list[float] | None:
    """Interval of the tokens after the prefill per sum of `per`, one count for each prompt; None if they are all 0."""
    decoded = [len(g.tokens) - g.prefill_tokens for g in generations]

    def ratio(at: Sequence[int]) -> float | None:
        return sum(decoded[i] for i in at) / total if (total := sum(per[i] for i in at)) else None

    return bootstrap(ratio, len(generations) if any(per) else 0, seed=seed)
