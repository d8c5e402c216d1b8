"""The speed report: where a round's time goes, and what passes of other sizes cost, on whatever device runs it.

    python -m eval.speed checkpoint=runs/dspark/<time>

Leaves speed.json, results.json and plots in its run folder. Speeds stand beside the quality of the same samples.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from dspec.atomic import write_json
from dspec.config import entry_point, instantiate
from dspec.errors import UserError
from dspec.seeding import prompt_seed
from eval.costs import achieved_over_ideal, draft_cost, round_profile, speeds, tau_by_position, verify_cost
from eval.measure import EvaluationResult, measure
from eval.plots import plot_costs, plot_rounds, plot_tau_by_position
from eval.results import AR
from eval.samples import Sample, read_samples


class SpeedReport:
    """Measures, given an evaluation's decoders and samples."""

    def __init__(
        self,
        *,
        tokens: Sequence[int],
        contexts: Sequence[int],
        repeats: int,
        profiled_prompts: int,
        position_width: int,
        price_per_hour: float | None,
        seed: int,
    ) -> None:
        """`tokens` are the K and `contexts` the L of the cost curves. Rounds are profiled on the first
        `profiled_prompts` of each benchmark, and tau is binned by `position_width` tokens of the answer."""
        for name, value in {"repeats": repeats, "profiled_prompts": profiled_prompts, "width": position_width}.items():
            if value < 1:
                raise UserError(f"speed.{name}={value} must be at least 1")
        if price_per_hour is not None and price_per_hour <= 0:
            raise UserError(f"speed.price_per_hour={price_per_hour} must be above 0 (null: no price)")
        self.curves: dict[str, Any] = {
            "tokens": list(tokens),
            "contexts": list(contexts),
            "repeats": repeats,
            "seed": seed,
        }
        self.profiled_prompts, self.width, self.price, self.seed = (
            profiled_prompts,
            position_width,
            price_per_hour,
            seed,
        )

    def __call__(self, done: EvaluationResult, samples: Sequence[Sample]) -> dict[str, Any]:
        """All measurements, JSON-ready. Rounds are profiled on the first benchmark at the first temperature."""
        target, draft = done.subject.target, done.subject.draft
        rows = done.results["rows"]
        lines = []
        for row in rows:
            own = [
                s
                for s in samples
                if (s.benchmark, s.temperature, s.decoder)
                == (row["benchmark"], row["decoder"]["temperature"], row["decoder"]["name"])
            ]
            line = {name: row[name] for name in ("benchmark", "method", "quality", "tau", "speedup")}
            line |= {"decoder": row["decoder"]["name"], "temperature": row["decoder"]["temperature"]}
            line |= speeds(own, price_per_hour=self.price)
            lines.append(line | {"tau_by_position": tau_by_position([s.generation for s in own], width=self.width)})
        with torch.inference_mode():
            rounds = self._rounds(done)
            verify = verify_cost(target, **self.curves)
            drafted = draft_cost(target, draft, **self.curves) if draft is not None else []
        return {"speeds": lines, "rounds": rounds, "verify_cost": verify, "draft_cost": drafted}

    def _rounds(self, done: EvaluationResult) -> list[dict[str, Any]]:
        target, policy = done.subject.target, done.subject.policy
        name, benchmark = next(iter(done.benchmarks.items()))
        sampling = done.evaluation.samplings[0]
        encoded = done.evaluation.check(
            target=target, contenders=done.contenders, benchmarks={name: benchmark}, policy=policy
        )
        # whole batches: rows that share a pass with fewer others cost more
        size = done.evaluation.batch_size
        prompts = encoded[name][: -(-self.profiled_prompts // size) * size]
        rounds: list[dict[str, Any]] = []
        for key, contender in done.contenders.items():
            profile = round_profile(
                contender.build(target=target, draft=done.subject.draft, sampling=sampling),
                [ids for _, ids in prompts],
                device=target.device,
                batch_size=done.evaluation.batch_size,
                max_new_tokens=benchmark.max_new_tokens,
                stop_ids=target.stop_ids,
                seeds=[prompt_seed(self.seed, item.id) for item, _ in prompts],
            )
            about = {"decoder": key, "method": contender.label, "benchmark": name}
            rounds.append(about | {"batch_size": done.evaluation.batch_size} | profile)
        first = {
            row["decoder"]["name"]: row
            for row in reversed(done.results["rows"])
            if row["benchmark"] == name and row["decoder"]["temperature"] == sampling.temperature
        }
        base = next(line for line in rounds if line["decoder"] == AR)
        for line in rounds:
            tau, speedup = first[line["decoder"]]["tau"], first[line["decoder"]]["speedup"]
            line["ideal"] = achieved_over_ideal(tau, speedup, base, line) if tau and speedup else None
        return rounds


def _format(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def speed_table(lines: Sequence[dict[str, Any]]) -> Table:
    """Quality, then tokens per second as LoPA's table has them."""
    table = Table(title="speeds", title_justify="left")
    for name in ("benchmark", "T", "method"):
        table.add_column(name)
    for name in ("quality", "tau", "tok/s", "max", "top 10", "s/sample", "speedup", "price/1M"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line["benchmark"],
            f"{line['temperature']:g}",
            line["method"],
            _format(line["quality"], ".1%"),
            _format(line["tau"], ".2f"),
            *(f"{line[name]:.0f}" for name in ("average", "max", "top10")),
            f"{line['seconds_per_sample']:.3f}",
            _format(line["speedup"], ".2f"),
            _format(line["price_per_million"], ".2f"),
        )
    return table


def round_table(rounds: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds a round and their share, span by span; then what models alone would allow."""
    batch = f", a row's share at batch {rounds[0]['batch_size']}" if rounds[0]["batch_size"] > 1 else ""
    table = Table(title=f"a round on {rounds[0]['benchmark']}: ms, share{batch}", title_justify="left")
    table.add_column("")
    for line in rounds:
        table.add_column(line["method"], justify="right")
    for name in span_names(rounds):
        shown = ("  of it " + name.split("/")[1]) if "/" in name else name
        table.add_row(shown, *(_share(line["spans"].get(name), line["milliseconds"]) for line in rounds))
    table.add_row("between spans", *(_share(line["between spans"], line["milliseconds"]) for line in rounds))
    table.add_section()
    table.add_row("round", *(f"{line['milliseconds']:.2f}" for line in rounds))
    table.add_row("without barriers", *(f"{line['unsynchronised']:.2f}" for line in rounds))
    for key, label in (("ideal", "ideal speedup"), ("achieved", "achieved share of it")):
        form = ".2f" if key == "ideal" else ".0%"
        table.add_row(label, *("–" if line["ideal"] is None else format(line["ideal"][key], form) for line in rounds))
    return table


def span_names(rounds: Sequence[dict[str, Any]]) -> list[str]:
    """All spans, each nested one behind its own."""
    names = list(dict.fromkeys(name for line in rounds for name in line["spans"]))
    outer = [name for name in names if "/" not in name]
    return [n for top in outer for n in (top, *(m for m in names if m.startswith(f"{top}/")))]


def _share(milliseconds: float | None, whole: float) -> str:
    return "–" if milliseconds is None else f"{milliseconds:.2f} {milliseconds / whole:4.0%}"


def cost_table(title: str, lines: Sequence[dict[str, Any]], parts: Sequence[str]) -> Table:
    """One row a K; per context the milliseconds, over those of the smallest K, and the parts."""
    contexts = list(dict.fromkeys(line["context"] for line in lines))
    table = Table(title=f"{title} after L tokens: ms ({', '.join(parts)}), ratio", title_justify="left")
    table.add_column("K", justify="right")
    for context in contexts:
        table.add_column(f"L={context}", justify="right")
    for tokens in dict.fromkeys(line["tokens"] for line in lines):
        found = {line["context"]: line for line in lines if line["tokens"] == tokens}
        cells = (
            f"{' + '.join(format(found[c][part], '.2f') for part in parts)}  {found[c]['ratio']:.2f}x" for c in contexts
        )
        table.add_row(str(tokens), *cells)
    return table


def position_table(lines: Sequence[dict[str, Any]], width: int) -> Table:
    """tau, and in brackets the rounds, by where in the answer a round began."""
    table = Table(title=f"tau (rounds) of the rounds begun in each {width} tokens of an answer", title_justify="left")
    for name in ("benchmark", "T", "method"):
        table.add_column(name)
    starts = sorted({b["start"] for line in lines for b in line["tau_by_position"]})
    for start in starts:
        table.add_column(f"{start}+", justify="right")
    for line in lines:
        bins = {b["start"]: f"{b['tau']:.2f} ({b['rounds']})" for b in line["tau_by_position"]}
        if bins:
            cells = (bins.get(start, "–") for start in starts)
            table.add_row(line["benchmark"], f"{line['temperature']:g}", line["method"], *cells)
    return table


def report(done: dict[str, Any], *, width: int, run_dir: Path) -> None:
    """Prints the tables and draws the plots."""
    console = Console()
    console.width = max(console.width, 140)
    console.print(speed_table(done["speeds"]))
    console.print(round_table(done["rounds"]))
    console.print(cost_table("verify K tokens", done["verify_cost"], ("attention", "rest", "lm_head")))
    if done["draft_cost"]:
        console.print(cost_table("draft K slots", done["draft_cost"], ("forward", "lm_head", "sequential_head")))
    if any(line["tau_by_position"] for line in done["speeds"]):
        console.print(position_table(done["speeds"], width))
    plots = run_dir / "plots"
    names = [name for name in span_names(done["rounds"]) if "/" not in name]
    bars = {
        line["method"]: {n: line["spans"].get(n, 0.0) for n in names} | {"between spans": line["between spans"]}
        for line in done["rounds"]
    }
    plot_rounds(bars, plots / "rounds.png")
    plot_costs(done["verify_cost"], done["draft_cost"], plots / "costs.png")
    curves = {
        f"{line['method']}, {line['benchmark']}": [(b["start"], b["tau"]) for b in line["tau_by_position"]]
        for line in done["speeds"]
        if line["tau_by_position"] and line["temperature"] == done["speeds"][0]["temperature"]
    }
    if curves:
        plot_tau_by_position(curves, plots / "tau_by_position.png")
    console.print(f"speed.json and plots: {run_dir}", soft_wrap=True)


def run(cfg: DictConfig) -> None:
    """One speed report in Hydra's run folder."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    measurements = instantiate(cfg.speed)
    done = measure(cfg, run_dir)
    logger = instantiate(cfg.get("logger"))
    instantiate(cfg.report)(results=done.results, history=[], run_dir=run_dir, logger=logger)
    found = measurements(done, read_samples(run_dir / "samples.jsonl"))
    write_json(run_dir / "speed.json", {"run": done.results["run"]} | found)
    report(found, width=measurements.width, run_dir=run_dir)


main = entry_point(config="speed")(run)

if __name__ == "__main__":
    main()
