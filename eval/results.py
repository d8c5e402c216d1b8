"""results.json: its format, and how it is assembled, read and pooled. Imports nothing heavy.

    {"schema": 3, "run": {provenance, "benchmarks", "ar_check", "complete"}, "rows": [...], "calibration": ...}

A row is one decoder on one benchmark at one temperature: counts over its prompts (COUNTS), ratios of these sums,
quality (a proportion of right answers), `scores` (continuous ones: {name: {mean, se, n}}), speed and intervals.
`baseline` is the decoder of the same weights that emits one token per pass: `speedup` is over it. `reference` is the
decoder that all rows of a benchmark share: `speedup_vs_base_ar` is over that.

Any further pooling (over benchmarks, over runs) goes through `pool` and starts from the counts, so that no reader has
to know how many tokens a prefill emits or which passes were rounds.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dspec.config.old_names import renamed
from dspec.errors import UserError

SCHEMA = 3
AR = "autoregressive"
AR_OF_BASE = "base_autoregressive"  # plain AR of the untrained base, if a method trains the target's own weights
DIFFUSION = "diffusion"  # a diffusion LM's most confident token per pass: the baseline of its other decoders
ANY_SUBSET = "any_subset"  # one token per pass at given positions: the baseline of infilling, where AR cannot be used
UNTRUSTED = "*"  # suffix of a speedup over an AR loop that does not keep up with transformers' generate
COUNTS = ("n", "tokens", "prefill_tokens", "nfe", "nfe_prefill", "rounds", "positions_computed", "branch_forwards")

ResultRow = dict[str, Any]
T = TypeVar("T")
ByAnswer = dict[tuple[str, str, float], dict[str, dict[str, T]]]  # (decoder, benchmark, temperature), prompt id, name


def assemble(
    rows: Sequence[ResultRow],
    *,
    run: Mapping[str, Any],
    ar_check: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    complete: bool,
) -> dict[str, Any]:
    """The content of results.json. `run` is the provenance, `ar_check` the result of eval/gate.py; `complete` is False
    while there are benchmarks left to evaluate."""
    run = {**run, "ar_check": ar_check, "complete": complete}
    return {"schema": SCHEMA, "run": run, "rows": list(rows), "calibration": calibration}


def reference(decoders: Container[str]) -> str:
    """The decoder, among those of one benchmark, that `speedup_vs_base_ar` of every row is relative to: AR of the base
    if it is there, else AR; of diffusion LMs diffusion, of infilling any_subset likewise. Raises UserError if none of
    them is there."""
    one_token = (AR, DIFFUSION, ANY_SUBSET)  # decoders that emit one per pass
    for name in (name for decoder in one_token for name in (f"base_{decoder}", decoder)):
        if name in decoders:
            return name
    names = f"{AR}, {DIFFUSION} or {ANY_SUBSET}"
    raise UserError(f"no decoder that emits one token per pass ({names}): quality has no reference")


def baseline_label(baselines: Iterable[str]) -> str:
    """How tables name these baselines: AR, any_subset, diffusion, or, if they are of several kinds, "baseline"."""
    kinds = {name.removeprefix("base_") for name in baselines}
    return "baseline" if len(kinds) > 1 else "AR" if kinds <= {AR} else kinds.pop()


def pool(parts: Iterable[Mapping[str, Any]]) -> ResultRow:
    """Sums of COUNTS over prompts, or over rows of results.json, and ratios of these sums: tau = tokens per round,
    tpf = tokens per forward pass that is not prefill, both without the tokens that prefills emitted, and
    tpf_with_prefill = all tokens per all forward passes. A ratio with denominator 0 is None.

    tpf_paper is what papers on diffusion LMs report: all filled slots, also after the answer's end, per pass.
    Rows from before there were such decoders have no `slots_filled`: it is their number of tokens."""
    parts = list(parts)
    total: ResultRow = {name: sum(part[name] for part in parts) for name in COUNTS}
    total["slots_filled"] = sum(part.get("slots_filled", part["tokens"]) for part in parts)
    decoded = total["tokens"] - total["prefill_tokens"]
    ratios = {
        "tau": _ratio(decoded, total["rounds"]),
        "tpf": _ratio(decoded, total["nfe"] - total["nfe_prefill"]),
        "tpf_with_prefill": _ratio(total["tokens"], total["nfe"]),
        "tpf_paper": _ratio(total["slots_filled"], total["nfe"]),
    }
    return total | ratios


def pool_rows(rows: Sequence[Mapping[str, Any]]) -> ResultRow:
    """`pool`, plus `quality` (fraction correct among the judged prompts; None if none is) and `speedup` (mean of the
    rows' medians; None if a row has none, since early versions left it out where AR was slow), both weighted by
    prompts."""
    judged = [row for row in rows if row["quality"] is not None]
    timed = [row for row in rows if row["speedup"] is not None]
    return pool(rows) | {
        "quality": _mean_over_prompts("quality", judged),
        "speedup": _mean_over_prompts("speedup", timed) if len(timed) == len(rows) else None,
    }


def _mean_over_prompts(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    return _ratio(sum(row[name] * row["n"] for row in rows), sum(row["n"] for row in rows))


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def load(folder: Path) -> dict[str, Any]:
    """results.json of a finished run, in the current format whichever version of dspec wrote it.

    Raises UserError if it is missing, malformed, of an unfinished run, or of a newer dspec.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(f"{path} is missing: pass folders of finished runs")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        run, schema = results["run"], results.get("schema", 1)
        if schema > SCHEMA:
            raise UserError(f"{path} has schema {schema}, this dspec reads up to {SCHEMA}: update dspec")
        sources = run.get("benchmarks", {})
        rows = [_upgraded(row, schema, sources.get(row["benchmark"], {})) for row in results["rows"]]
        pool(rows)
        _ = run["seed"], run["config"], [(r["method"], r["benchmark"], r["decoder"]["temperature"]) for r in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a run's results.json ({error!r}): pass folders of finished runs") from error
    if not run.get("complete", True):
        raise UserError(f"{folder} has not finished: continue with resume={folder}")
    run["config"] = renamed(run["config"])  # so that runs from before and after a renaming can be compared
    return {**results, "schema": SCHEMA, "rows": rows}


def _upgraded(row: ResultRow, schema: int, source: Mapping[str, Any]) -> ResultRow:
    """A row of an earlier schema in the current format; `source` is the provenance of its benchmark.

    Schema 2 had `serial` for `baseline`, and no `reference`. Schema 1 lacked some counts: each of its decoders emitted
    one token in a prompt's prefill, and tau was the mean over rounds; passes over several branches came later. Its
    first files had no `serial`: the baseline was AR. `scores` and `gold_length` came within schema 3.
    """
    if schema < 3:
        row = {**row, "baseline": row.get("serial", AR)}
        row.pop("serial", None)
    if schema < 2:
        rounds = round((row["tokens"] - row["n"]) / row["tau"]) if row["tau"] else 0
        old = {"prefill_tokens": row["n"], "rounds": rounds, "positions_computed": 0}
        row = {**old, "branch_forwards": row["nfe"] - row["nfe_prefill"], **row}
    return {"scores": {}, "gold_length": bool(source.get("gold_length")), **row}


def kept_ar_check(folder: Path) -> dict[str, Any] | None:
    """The AR check of an earlier session of the same run; None if results.json has none."""
    try:
        return dict(json.loads((folder / "results.json").read_text(encoding="utf-8"))["run"]["ar_check"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_verdicts(folder: Path) -> ByAnswer[bool]:
    """Verdicts by (decoder, benchmark, temperature) and prompt id, from samples.jsonl. Raises UserError if it is
    missing, malformed, or has two answers of one decoder to a prompt."""
    return _load_answers(folder, "verdicts")


def load_scores(folder: Path) -> ByAnswer[float]:
    """Continuous scores alike; none in files from before there were any."""
    return _load_answers(folder, "scores")


def _load_answers(folder: Path, field: str) -> ByAnswer[Any]:
    path, answers = folder / "samples.jsonl", ByAnswer[Any]()
    if not path.is_file():
        raise UserError(f"{path} is missing: quality is compared prompt by prompt")
    # of bytes: a text's lines also end at characters that an answer may have, such as U+2028
    for number, line in enumerate(path.read_bytes().splitlines()[1:], 2):
        try:
            sample = {"scores": {}, **json.loads(line)}
            answered = answers.setdefault((sample["decoder"], sample["benchmark"], sample["temperature"]), {})
            name, judged = sample["id"], sample[field]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number} is malformed ({error!r}); evaluate again") from error
        if name in answered:
            raise UserError(f"{path} has two answers to {name}: two runs wrote into it; evaluate again")
        answered[name] = judged
    return answers
