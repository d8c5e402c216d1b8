"""Compares methods across runs: quality, tau, tpf, speedup, scores, and all pairwise differences with 95 % intervals.

    python -m eval.compare runs/sweep/<time>/*/       (folders of finished runs)

All but scores (continuous ones, such as generative perplexity) are pooled over a run's benchmarks. Differences of tau,
tpf and speedup are paired by seed (Student's t over seeds; one seed gives no interval), those of quality and scores by
prompt (the mean over common seeds, Student's t over prompts). Runs of the same method and seed are distinguished by the
settings in which they differ, or by their folders.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from dspec.config.compose import one_line_errors
from dspec.config.leaves import flat
from dspec.errors import UserError
from eval.intervals import student
from eval.reports.scores import NOTE, mean_cell
from eval.reports.table import GOLD_LENGTH, over_ar
from eval.results import (
    AR,
    AR_OF_BASE,
    UNTRUSTED,
    ByAnswer,
    baseline_label,
    load,
    load_scores,
    load_verdicts,
    pool_rows,
)
from eval.rows import mean_and_error

# settings that do not make a different method: parts of the config (rows name decoder and benchmark) and single keys
_IGNORED_PARTS = ("logger", "callbacks", "resume", "report", "hydra", "label", "decoder", "benchmark", "judge")
_IGNORED_KEYS = (
    "allow_unsafe_code",
    "data.cache_dir",
    "trainer.log_every_n_steps",
    *(f"evaluation.{key}" for key in ("warmup", "generate_prompts", "generate_floor")),
)
_MOST_NAMED = 4  # at most this many settings in a name: runs that differ in more are named by their folders
METRICS = ("tau", "tpf", "speedup")

PromptKey = tuple[str, str]  # benchmark, id
ScoreKey = tuple[str, str]  # benchmark, name of the score


@dataclass
class Outcome:
    """One method's results in one run: metrics over all benchmarks, and each prompt's headline verdict and scores."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    right: dict[PromptKey, bool] = field(default_factory=dict)
    scores: dict[ScoreKey, dict[str, float]] = field(default_factory=dict)  # by prompt id
    baselines: frozenset[str] = frozenset({AR})  # what its speedups are relative to
    trusted: bool = True  # whether that is AR, and kept up with transformers' generate; else speedups may be inflated


Outcomes = dict[tuple[str, float], dict[int, Outcome]]  # (method, temperature) -> seed -> outcome
Run = tuple[Path, Mapping[str, Any]]  # folder, results


def outcomes(runs: Sequence[Run]) -> Outcomes:
    """Outcomes by method, temperature and seed. Raises UserError for a duplicate run."""
    found: Outcomes = defaultdict(dict)
    for (folder, result), names in zip(runs, _names(runs), strict=True):
        verdicts, scores = load_verdicts(folder), load_scores(folder)
        rows = defaultdict(list)
        for row in result["rows"]:
            rows[names[row["method"]], row["decoder"]["temperature"]].append(row)
        trusted = bool(result["run"].get("ar_check", {}).get("trusted"))
        for key, same in rows.items():
            seed = result["run"]["seed"]
            outcome = _outcome(same, verdicts, scores, trusted=trusted)
            if seed not in found[key]:
                found[key][seed] = outcome
            elif not _shared(same[0], result):
                raise UserError(
                    f"two runs of {key[0]!r} have seed {seed}: pass each once, and compare runs of one target, with "
                    "the same benchmarks and limits"
                )
    return dict(found)


def _shared(row: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Whether a row is plain AR of weights that the run did not train: it is the same for several methods."""
    trains = any(other["decoder"]["name"] == AR_OF_BASE for other in result["rows"])
    return row["decoder"]["name"] == AR_OF_BASE or (row["decoder"]["name"] == AR and not trains)


def _basis(row: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows of plain AR must have in common to be interchangeable: target, prompts, sampling."""
    source = result["run"].get("benchmarks", {}).get(row["benchmark"], {})
    settings = sorted((name, str(value)) for name, value in row["decoder"].items())
    return row["target"], row["benchmark"], row["n"], str(source.get("sha256")), *settings


def _outcome(
    rows: Sequence[Mapping[str, Any]], verdicts: ByAnswer[bool], scores: ByAnswer[float], *, trusted: bool
) -> Outcome:
    pooled, right, scored = pool_rows(rows), dict[PromptKey, bool](), dict[ScoreKey, dict[str, float]]()
    for row in rows:
        benchmark, key = row["benchmark"], (row["decoder"]["name"], row["benchmark"], row["decoder"]["temperature"])
        if row["quality_name"]:
            right |= {(benchmark, id_): judged[row["quality_name"]] for id_, judged in verdicts[key].items()}
        for id_, values in scores.get(key, {}).items():
            for name, value in values.items():
                scored.setdefault((benchmark, name), {})[id_] = value
    baselines = frozenset(row["baseline"] for row in rows)
    trusted = trusted and all(map(over_ar, baselines))
    return Outcome({name: pooled[name] for name in METRICS}, right, scored, baselines, trusted)


def _names(runs: Sequence[Run]) -> list[dict[str, str]]:
    """For each run, by method: its name in the table, with the settings that distinguish it from others of its seed.

    Two runs of DSpark with seeds 0 and 1 and equal settings are one "DSpark"; with block sizes 4 and 7 they are
    "DSpark draft.block_size=4" and "DSpark draft.block_size=7".
    """
    methods = dict.fromkeys(row["method"] for _, result in runs for row in result["rows"])
    names: list[dict[str, str]] = [{} for _ in runs]
    for method in methods:
        having = [i for i, (_, result) in enumerate(runs) if any(row["method"] == method for row in result["rows"])]
        seeds = [runs[i][1]["run"]["seed"] for i in having]
        rows = {i: [row for row in runs[i][1]["rows"] if row["method"] == method] for i in having}
        shared = all(_shared(row, runs[i][1]) for i in having for row in rows[i])
        kinds = {(seed, *(_basis(row, runs[i][1]) for row in rows[i])) for i, seed in zip(having, seeds, strict=True)}
        same = shared and len(kinds) == len(set(seeds))
        if same:
            differing: dict[str, tuple[str, ...]] = {}
        else:
            differing = _differing([(runs[i][1]["run"]["config"], rows[i][0]["decoder"]) for i in having])
        if len(differing) > _MOST_NAMED:
            differing = {"run": tuple(runs[i][0].resolve().name for i in having)}
        for at, i in enumerate(having):
            names[i][method] = " ".join([method, *(f"{key}={values[at]}" for key, values in differing.items())])
    return names


def _differing(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, tuple[str, ...]]:
    """Settings in which runs (config, decoder of the row) differ, seeds aside; of those that always differ together,
    the one with the shortest name. Settings that follow from the class of their part are not named beside it."""
    settings = []
    for config, decoder in runs:
        parts = flat({key: value for key, value in config.items() if key not in _IGNORED_PARTS} | {"decoder": decoder})
        settings.append({path: value for path, value in parts.items() if path not in _IGNORED_KEYS})
    paths = sorted({path for parts in settings for path in parts}, key=lambda path: (len(path), path))
    values_of = {path: tuple(str(parts.get(path)) for parts in settings) for path in paths}
    found: dict[tuple[str, ...], str] = {}
    for path, values in values_of.items():
        kinds = [values_of[kind] for kind in paths if kind.endswith("_target_") and _is_beside(path, kind)]
        if any(len(set(kind)) == len(set(zip(kind, values, strict=True))) > 1 for kind in kinds):
            continue
        if path.endswith("_target_"):
            values = tuple(value.rpartition(".")[2] for value in values)
        if len(set(values)) > 1 and path != "decoder.temperature" and path.rpartition(".")[2] != "seed":
            found.setdefault(values, path.removesuffix("._target_"))
    return {path: values for values, path in found.items()}


def _is_beside(path: str, kind: str) -> bool:
    """Whether a setting is of the part that has this `_target_`, or of a part of it."""
    return path != kind and path.startswith(kind.removesuffix("_target_"))


def compare(folders: Sequence[Path]) -> str:
    """The comparison as text: methods by temperature, then all pairwise differences."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a folder is listed twice: pass each run once")
    runs = [(folder, load(folder)) for folder in folders]
    found = outcomes(runs)
    lines = []
    for temperature in sorted({t for _, t in found}):
        at_t = {method: by_seed for (method, t), by_seed in found.items() if t == temperature}
        lines += [f"T={temperature:g}", *(_line(method, by_seed) for method, by_seed in at_t.items())]
        for a, b in combinations(at_t, 2):
            lines += _difference(a, at_t[a], b, at_t[b])
    every = [outcome for by_seed in found.values() for outcome in by_seed.values()]
    speedup = _shown_name("speedup", every)
    scored = any(outcome.scores for outcome in every)
    by_prompt = "quality, scores" if scored else "quality"
    lines.append(f"differences: mean and 95 % interval, paired by seed (tau, tpf, {speedup}) or prompt ({by_prompt})")
    if scored:
        lines.append(f"scores: {NOTE}")
    if told := sorted({row["benchmark"] for _, run in runs for row in run["rows"] if row["gold_length"]}):
        lines.append(f"{GOLD_LENGTH}, {', '.join(told)}: decoders are told how many tokens of the reference are hidden")
    shown = [outcome for outcome in every if outcome.metrics["speedup"] is not None]
    if _mark(shown):
        marked = _label([outcome for outcome in shown if not outcome.trusted])
        lines.append(
            f"{UNTRUSTED} {marked} fell behind transformers' generate, or was not timed against it: x {marked} may be "
            "inflated"
        )
    return "\n".join(lines)


def _mark(outcomes: Iterable[Outcome]) -> str:
    """The mark appended to their speedups."""
    return "" if all(outcome.trusted for outcome in outcomes) else UNTRUSTED


def _quality(outcome: Outcome) -> float | None:
    return 100 * statistics.fmean(outcome.right.values()) if outcome.right else None


def _line(method: str, by_seed: Mapping[int, Outcome]) -> str:
    """A method's means over its seeds, tau by seed, and the scores of each benchmark."""
    parts = []
    for name, form, value in (
        ("quality", ".1f", _quality),
        *((m, ".2f", lambda o, m=m: o.metrics[m]) for m in METRICS),
    ):
        values = [v for outcome in by_seed.values() if (v := value(outcome)) is not None]
        if values:
            mark = _mark(by_seed.values()) if name == "speedup" else ""
            parts.append(f"{_shown_name(name, by_seed.values())} {statistics.fmean(values):{form}}{mark}")
    taus = [f"{s}: {o.metrics['tau']:.2f}" for s, o in sorted(by_seed.items()) if o.metrics["tau"] is not None]
    by = f"\n      tau by seed {', '.join(taus)}" if len(taus) > 1 else ""
    head = f"  {method} (seed {', '.join(map(str, sorted(by_seed)))})"
    return "\n".join([head, f"      {', '.join(parts)}{by}", *_scores(list(by_seed.values()))])


def _label(outcomes: Iterable[Outcome]) -> str:
    return baseline_label({name for outcome in outcomes for name in outcome.baselines})


def _shown_name(metric: str, outcomes: Iterable[Outcome]) -> str:
    """How the text names a metric of these outcomes."""
    return f"x {_label(outcomes)}" if metric == "speedup" else {"quality": "quality %"}.get(metric, metric)


def _difference(a: str, left: Mapping[int, Outcome], b: str, right: Mapping[int, Outcome]) -> list[str]:
    """Lines for a − b; none without common seeds, or if both are plain AR and therefore equal."""
    seeds = sorted(left.keys() & right.keys())
    if not seeds:
        return []
    lines = [f"  {a} − {b} (seed {', '.join(map(str, seeds))})"]
    prompts = sorted(set.intersection(*(left[s].right.keys() & right[s].right.keys() for s in seeds)))
    if prompts:
        gaps = [statistics.fmean(left[s].right[p] - right[s].right[p] for s in seeds) for p in prompts]
        lines.append(
            f"      {_shown_name('quality', ())} {_shown([100 * gap for gap in gaps], '+.1f')}, {len(prompts)} prompts"
        )
    for (benchmark, name), gaps in _score_gaps([left[s] for s in seeds], [right[s] for s in seeds]).items():
        lines.append(f"      {benchmark}: {name} {_shown(gaps, '+.3f')}, {len(gaps)} prompts")
    for name in METRICS:
        pairs = [(left[s].metrics[name], right[s].metrics[name]) for s in seeds]
        gaps = [x - y for x, y in pairs if x is not None and y is not None]
        if len(gaps) == len(seeds):
            both = [side[s] for side in (left, right) for s in seeds]
            mark = _mark(both) if name == "speedup" else ""
            lines.append(f"      {_shown_name(name, both)} {_shown(gaps, '+.2f')}{mark}")
    return lines


def _score_keys(outcomes: Iterable[Outcome]) -> list[ScoreKey]:
    return list(dict.fromkeys(key for outcome in outcomes for key in outcome.scores))


def _over_seeds(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over seeds of what each prompt has in all of them."""
    ids = [id_ for id_ in values[0] if all(id_ in one for one in values)]
    return {id_: statistics.fmean(one[id_] for one in values) for id_ in ids}


def _scores(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each benchmark: the scores' means over seeds and prompts."""
    cells: dict[str, list[str]] = {}
    for benchmark, name in _score_keys(outcomes):
        values = _over_seeds([outcome.scores.get((benchmark, name), {}) for outcome in outcomes])
        if values:
            cells.setdefault(benchmark, []).append(f"{name} {mean_cell(mean_and_error(list(values.values())))}")
    return [f"      {benchmark}: {', '.join(shown)}" for benchmark, shown in cells.items()]


def _score_gaps(left: Sequence[Outcome], right: Sequence[Outcome]) -> dict[ScoreKey, list[float]]:
    """The differences of each score, by prompt; a side has an outcome per common seed."""
    gaps = {}
    for key in _score_keys(left):
        a, b = (_over_seeds([outcome.scores.get(key, {}) for outcome in side]) for side in (left, right))
        if both := [a[id_] - b[id_] for id_ in a if id_ in b]:
            gaps[key] = both
    return gaps


def _shown(differences: Sequence[float], form: str) -> str:
    if len(differences) < 2:
        return format(differences[0], form)
    if len(set(differences)) == 1:  # no spread, no interval: zero width would claim certainty
        return f"{differences[0]:{form}} each time"
    mean, low, high = student(differences)
    return f"{mean:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.compare", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders with results.json and samples.jsonl")
    with one_line_errors():
        print(compare(parser.parse_args().folders))


if __name__ == "__main__":
    main()
