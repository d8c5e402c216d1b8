"""Compares the decoders of one run, prompt by prompt: the sampler tables of AS-ARM (arXiv 2504.20456, tables 1, 5, 8).

    python -m eval.samplers runs/eval/<time>       (folder of a finished run)

Each measure's mean over prompts with its standard error, and, against the decoder's baseline on the same prompts, the
mean difference with two paired tests: Student's t and Wilcoxon's signed ranks (scipy, .[infill]). Measures are the
passes of each kind, seconds, and the benchmark's continuous scores. Writes samplers.json into the folder.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dspec.atomic import write_json
from dspec.config.compose import one_line_errors
from dspec.decoding.generation import Generation
from dspec.errors import UserError
from eval.reports.report import Report
from eval.reports.scores import mean_cell
from eval.reports.table import GOLD_LENGTH, aligned
from eval.results import load
from eval.rows import mean_and_error
from eval.samples import Sample, read_samples

BIASED = "~"  # suffix of a decoder that does not have its baseline's distribution
LEGEND = f"""\
mean ± standard error over prompts (seconds: over batches); p: paired tests
against the baseline on the same prompts (Student's t, Wilcoxon's signed ranks)
NFE: passes of the model, those that test drafts (oracle) and others (draft);
rows: of all these passes (one per pass, but for samplers that test several
orders at once); aux: passes of another drafter, such as n-grams
{BIASED}: not its baseline's distribution: biased, or lossy by a tolerance
{GOLD_LENGTH}: samplers are told how many tokens of the reference are hidden"""

Entry = dict[str, Any]
Values = dict[str, dict[str, float]]  # by measure and prompt id


def passes(generation: Generation) -> dict[str, int]:
    """Passes of the model, those of them that tested no draft or some, the rows computed in them, and the passes of
    another drafter."""
    oracle = sum(p.kind != "draft" and p.drafted > 0 for p in generation.passes)
    return {
        "nfe": generation.nfe,
        "nfe_draft": generation.nfe - oracle,
        "nfe_oracle": oracle,
        "nfe_rows": generation.prefill_forwards + generation.branch_forwards,
        "nfe_aux": generation.draft_forwards + generation.auxiliary_forwards,
    }


def measures(samples: Sequence[Sample]) -> Values:
    """What one decoder's answers are compared by, by prompt. The prompts of a batch share its seconds: there is one
    value per batch, seconds per prompt."""
    sizes: dict[int, int] = {}
    for s in samples:
        sizes[s.batch] = sizes.get(s.batch, 0) + 1
    values: Values = {}
    for s in samples:
        for name, value in {**passes(s.generation), **s.scores}.items():
            values.setdefault(name, {})[s.id] = value
        values.setdefault("seconds", {})[f"batch {s.batch}"] = s.seconds / sizes[s.batch]
    return values


def compare(rows: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> list[Entry]:
    """One entry per row of results.json."""
    by_row: dict[tuple[str, float, str], list[Sample]] = {}
    for s in samples:
        by_row.setdefault((s.benchmark, s.temperature, s.decoder), []).append(s)
    found = {key: measures(answers) for key, answers in by_row.items()}
    entries = []
    for row in rows:
        group = (row["benchmark"], row["decoder"]["temperature"])
        values, baseline = found[*group, row["decoder"]["name"]], found[*group, row["baseline"]]
        is_baseline = row["decoder"]["name"] == row["baseline"]
        compared = {
            name: mean_and_error(list(per_prompt.values()))
            | ({} if is_baseline else {"paired": paired_tests(per_prompt, baseline.get(name, {}))})
            for name, per_prompt in values.items()
        }
        named = {"benchmark": row["benchmark"], "temperature": group[1], "method": row["method"], "n": row["n"]}
        named |= {"gold_length": bool(row.get("gold_length"))}
        decoder = {"decoder": row["decoder"], "baseline": row["baseline"], "lossless": row["lossless"]}
        entries.append(named | decoder | {"measures": compared})
    return entries


def paired_tests(values: Mapping[str, float], baseline: Mapping[str, float]) -> Entry | None:
    """The mean difference over the prompts that both have, and the p values of the paired t test and of Wilcoxon's
    signed-rank test (two-sided; 1 where there is no difference at all); None for fewer than two prompts.

    Raises UserError without scipy.
    """
    try:
        from scipy.stats import ttest_rel, wilcoxon
    except ImportError as error:
        raise UserError("paired tests need scipy: pip install -e '.[infill]'") from error
    pairs = [(value, baseline[id_]) for id_, value in values.items() if id_ in baseline]
    if len(pairs) < 2:
        return None
    ours, theirs = zip(*pairs, strict=True)
    differences = [a - b for a, b in pairs]
    spread = len(set(differences)) > 1
    t_p = float(ttest_rel(ours, theirs).pvalue) if spread else float(differences[0] == 0)
    wilcoxon_p = float(wilcoxon(differences).pvalue) if any(differences) else 1.0
    return {"difference": mean_and_error(differences)["mean"], "n": len(pairs), "t_p": t_p, "wilcoxon_p": wilcoxon_p}


def show(entries: Sequence[Entry]) -> str:
    """Passes and seconds, then each score, under a line for each benchmark and temperature."""
    headers = ("sampler", "NFE", "draft", "oracle", "rows", "aux", "NFE %", "seconds", "time %")
    cells = [
        [
            _method(e),
            _mean(e, "nfe"),
            *(f"{e['measures'][name]['mean']:.1f}" for name in _BESIDE),
            _change(e, "nfe"),
            _mean(e, "seconds"),
            _change(e, "seconds"),
        ]
        for e in entries
    ]
    tables = [aligned(headers, cells, titles=[_title(e) for e in entries])]
    groups = dict.fromkeys(_title(e) for e in entries)
    lines, titles = [], []
    for title in groups:
        group = [e for e in entries if _title(e) == title]
        for name in dict.fromkeys(name for e in group for name in e["measures"] if name not in _COUNTED):
            for e in group:
                lines.append([_method(e), _mean(e, name), *_tests(e, name)])
                titles.append(f"{title}: {name}")
    if lines:
        tables.append(aligned(("sampler", "mean ± se", "difference", "t: p", "Wilcoxon: p"), lines, titles=titles))
    return "\n\n".join([*tables, LEGEND])


_BESIDE = ("nfe_draft", "nfe_oracle", "nfe_rows", "nfe_aux")  # shown without an error
_COUNTED = ("nfe", *_BESIDE, "seconds")


def _title(entry: Entry) -> str:
    told = f", {GOLD_LENGTH}" if entry["gold_length"] else ""
    return f"{entry['benchmark']}, T={entry['temperature']:g}, {entry['n']} prompts{told}"


def _method(entry: Entry) -> str:
    return entry["method"] + ("" if entry["lossless"] else BIASED)


def _mean(entry: Entry, name: str) -> str:
    return mean_cell(entry["measures"].get(name))


def _change(entry: Entry, name: str) -> str:
    """In per cent of the baseline's mean."""
    found = entry["measures"][name]
    if not found.get("paired"):
        return "–"
    before = found["mean"] - found["paired"]["difference"]
    return f"{100 * found['paired']['difference'] / before:+.1f}" if before else "–"


def _tests(entry: Entry, name: str) -> tuple[str, str, str]:
    paired = entry["measures"].get(name, {}).get("paired")
    if not paired:
        return "–", "–", "–"
    return f"{paired['difference']:+.3f}", _p(paired["t_p"]), _p(paired["wilcoxon_p"])


def _p(value: float) -> str:
    """A dash for NaN: the tests are not defined for such differences."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def report(folder: Path) -> str:
    """Writes samplers.json and returns the tables. Raises UserError for a folder that is no finished run's."""
    results, path = load(folder), folder / "samples.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is missing: decoders are compared prompt by prompt")
    samples = read_samples(path)
    answered = {(s.benchmark, s.temperature, s.decoder) for s in samples}
    for row in results["rows"]:
        for name in (row["decoder"]["name"], row["baseline"]):
            if (row["benchmark"], row["decoder"]["temperature"], name) not in answered:
                raise UserError(f"{path} has no answers of {name} to {row['benchmark']}: evaluate again")
    entries = compare(results["rows"], samples)
    write_json(folder / "samplers.json", {"run": results["run"], "samplers": entries})
    return show(entries)


class SamplerReport(Report):
    """A run's report, and then this comparison (report._target_ of a page in recipes/sweeps)."""

    def __call__(
        self, *, results: dict[str, Any], history: Sequence[dict[str, float]], run_dir: Path, logger: object = None
    ) -> None:
        super().__call__(results=results, history=history, run_dir=run_dir, logger=logger)
        _print(f"\n{report(run_dir)}")


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.samplers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of a finished run")
    args = parser.parse_args()
    with one_line_errors():
        _print(report(args.folder))
