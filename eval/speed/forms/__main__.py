"""What dspec's optimised forms of the heavy parts save: each against its plain form, alternating in one process.

    python -m eval.speed.forms                      (all, on the CPU; minutes)
    python -m eval.speed.forms --only step prefill  (cases whose name starts with these)

Times are medians over repeats in which the two forms alternate; a ratio below 1 is a gain. Peak memory is what one
call adds to the resident memory of a separate process (Linux: VmHWM after it minus VmRSS before it), for cases where
memory matters. Writes a JSON file with the machine, the versions and all numbers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dspec.atomic import write_json
from dspec.config.compose import one_line_errors
from dspec.devices import check_bfloat16
from dspec.errors import UserError
from dspec.provenance import provenance
from dspec.terminal import quiet
from eval.speed.forms import caching, plain_forms
from eval.speed.forms.plain_forms import Pair

Build = Callable[[torch.dtype], Pair]
FORMS = ("plain", "ours")
BOTH = ("float32", "bfloat16")
_STATUS = Path("/proc/self/status")


def cases(*, small: bool) -> Mapping[str, tuple[Build, tuple[str, ...], bool]]:
    """Name -> (builder, dtypes, whether memory is measured). `small` shrinks all cases to a smoke test."""

    def sizes(large: int, tiny: int) -> int:
        return tiny if small else large

    long, medium, layers = sizes(2048, 24), sizes(512, 16), sizes(30, 1)
    dspark = partial(plain_forms.step, anchors=sizes(512, 6), length=sizes(2048, 32))
    single = ("float32",)
    ar = partial(plain_forms.ar_pass, layers=layers)
    return (
        {
            "step V=32k": (partial(dspark, vocab=sizes(32_000, 50)), BOTH, True),
            "step V=152k": (partial(dspark, vocab=sizes(151_936, 50)), single, True),
            "loss V=32k": (partial(plain_forms.loss, vocab=sizes(32_000, 50), rows=sizes(1792, 9)), BOTH, True),
            "loss V=152k": (partial(plain_forms.loss, vocab=sizes(151_936, 50), rows=sizes(512, 9)), BOTH, True),
            "training attention, 512 anchors": (
                partial(plain_forms.training_attention, anchors=medium, length=long),
                BOTH,
                True,
            ),
            "1 query after 512": (partial(plain_forms.few_queries, queries=1, rows=1, context=medium), BOTH, False),
            "1 query after 2048": (partial(plain_forms.few_queries, queries=1, rows=1, context=long), BOTH, False),
            "1 query after 512, 16 rows": (
                partial(plain_forms.few_queries, queries=1, rows=16, context=medium),
                BOTH,
                False,
            ),
            "8 queries after 512": (partial(plain_forms.few_queries, queries=8, rows=1, context=medium), BOTH, False),
            "8 queries after 2048": (partial(plain_forms.few_queries, queries=8, rows=1, context=long), BOTH, False),
            "AR pass after 512": (partial(ar, rows=1, context=medium), BOTH, False),
            "AR pass after 2048": (partial(ar, rows=1, context=long), BOTH, False),
            "AR pass after 512, 16 rows": (partial(ar, rows=sizes(16, 2), context=medium), BOTH, False),
            "prefill of 2048": (partial(plain_forms.prefill, rows=1, length=long, layers=sizes(8, 1)), BOTH, True),
            "prefill of 512, 8 rows": (
                partial(plain_forms.prefill, rows=sizes(8, 2), length=medium, layers=sizes(8, 1)),
                BOTH,
                True,
            ),
        }
        | {
            f"LM head, {rows} rows, V={vocab}": (
                partial(plain_forms.head_rows, rows=rows, vocab=sizes(vocab, 50)),
                single,
                False,
            )
            for rows in (3, 7)
            for vocab in (32_000, 49_152, 151_936)
        }
        | {name: (build, single, False) for name, build in caching.pairs(small=small).items()}
    )


def time_forms(pair: Pair, *, repeats: int) -> dict[str, float]:
    """Median milliseconds of each form; the forms alternate, after a warm-up call of each."""
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(repeats + 1):
        for form in FORMS:
            start = time.perf_counter()
            getattr(pair, form)()
            times[form].append(1000 * (time.perf_counter() - start))
    return {form: statistics.median(times[form][1:]) for form in FORMS}


def _kib(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def added_memory(build: Build, dtype: torch.dtype, form: str) -> float:
    """MiB that the first call of a form adds to this process's peak memory."""
    run = getattr(build(dtype), form)
    before = _kib("VmRSS")
    run()
    return (_kib("VmHWM") - before) / 1024


def _peak(name: str, dtype: str, form: str, args: argparse.Namespace) -> float:
    """`added_memory` in a separate process."""
    command = [sys.executable, "-m", "eval.speed.forms", "--peak", name, dtype, form]
    command += ["--threads", str(args.threads), *(["--small"] if args.small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"measuring the memory of {name!r} failed: {(done.stderr.splitlines() or ['?'])[-1]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def row(name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case in one dtype: milliseconds and MiB of both forms, and the ratio of ours to plain."""
    build, _, about_memory = cases(small=args.small)[name]
    found = time_forms(build(getattr(torch, dtype)), repeats=args.repeats)
    line: dict[str, Any] = {"case": name, "dtype": dtype, "milliseconds": found, "time": found["ours"] / found["plain"]}
    line |= {"mib": None, "memory": None}
    if about_memory and _STATUS.is_file():
        mib = {form: _peak(name, dtype, form, args) for form in FORMS}
        line |= {"mib": mib, "memory": mib["ours"] / mib["plain"] if mib["plain"] > 0 else None}
    return line


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    result = Table(title="ours against the plain form: below 1 is a gain", title_justify="left")
    result.add_column("case")
    for name in ("dtype", "plain ms", "ours ms", "time", "plain MiB", "ours MiB", "memory"):
        result.add_column(name, justify="right")
    for line in rows:
        times, mib = line["milliseconds"], line["mib"]
        memory = [f"{mib[form]:.0f}" for form in FORMS] if mib else ["–", "–"]
        share = "–" if line["memory"] is None else f"{line['memory']:.2f}x"
        result.add_row(
            line["case"],
            line["dtype"],
            *(f"{times[form]:.2f}" for form in FORMS),
            f"{line['time']:.2f}x",
            *memory,
            share,
        )
    return result


def run(args: argparse.Namespace) -> None:
    """Runs the selected cases; the file is rewritten after each."""
    known = cases(small=args.small)
    chosen = [name for name in known if args.only is None or name.startswith(tuple(args.only))]
    if not chosen:
        raise UserError(f"no case starts with {' or '.join(args.only)}; the cases are: {'; '.join(known)}")
    if args.repeats < 1 or args.threads < 1:
        raise UserError("--repeats and --threads must be at least 1")
    if any("bfloat16" in known[name][1] for name in chosen):
        check_bfloat16()
    config = {"threads": args.threads, "repeats": args.repeats, "chunk_mb": plain_forms.CHUNK_MB, "small": args.small}
    made = provenance(seed=0, dtype="see rows", config=config, prompt_policy={})
    rows: list[dict[str, Any]] = []
    for name in chosen:
        for dtype in known[name][1]:
            rows.append(row(name, dtype, args))
            print(f"{name}, {dtype}: {rows[-1]['time']:.2f}x", file=sys.stderr, flush=True)
            write_json(args.out, {"run": made, "rows": rows})
    console = Console()
    console.width = max(console.width, 110)
    console.print(table(rows))
    console.print(f"all numbers: {args.out}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.speed.forms", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name starts with these (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each form (default: 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (default: torch's)")
    parser.add_argument("--out", type=Path, default=Path("runs/speed_forms.json"), help="the JSON file")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a smoke test, no timing")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # one form's memory, in a separate process
    args = parser.parse_args(argv)
    quiet()
    with one_line_errors():
        torch.set_num_threads(args.threads)
        if args.peak is None:
            run(args)
            return
        name, dtype, form = args.peak
        print(json.dumps(added_memory(cases(small=args.small)[name][0], getattr(torch, dtype), form)))


if __name__ == "__main__":
    main()
