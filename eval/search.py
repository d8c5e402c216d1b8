"""Searches the configuration of Jacobi decoding on this machine: block size x candidates x K x r.

    python -m eval.search recipe=sweeps/jacobi_config checkpoint=runs/jacobi_forcing/<time>
    python -m eval.search recipe=sweeps/jacobi_config target=tiny search.block_sizes=[8,16]

Every configuration decodes the same prompts, prompt by prompt in turn with plain AR, greedily. It prints and writes
(search.json, plots/roofline.png) tokens a pass, tokens a second and where the passes stand under the measured
roofline of the device, and names the fastest one and the fastest near the knee. What is decoded is the same for all;
tokens that differ from plain AR's (float ties) are counted, and quality stands beside. Timing leaves out a warm-up;
which configuration goes first changes from prompt to prompt.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from dspec.atomic import write_json
from dspec.config import entry_point, instantiate
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.base import Decoder, Generation, Request, decode
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.sampling import GREEDY
from dspec.decoding.stopping import StopStrings
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from dspec.provenance import provenance
from dspec.seeding import prompt_seed
from dspec.terminal import quiet
from eval.benchmarks.base import Benchmark, Item
from eval.evaluate import encode, rotated
from eval.gate import timed
from eval.load import load_model
from eval.plots import plot_roofline
from eval.progress import Meter
from eval.roofline import Roofline, cost, measure

log = logging.getLogger(__name__)
NEAR = 2.0
Prompt = tuple[Benchmark, Item, list[int]]
Point = dict[str, Any]


class Search:
    """The grid and how it is measured."""

    def __init__(
        self,
        *,
        block_sizes: Sequence[int],
        candidates: Sequence[int],
        blocks: Sequence[int],
        activations: Sequence[float],
        pool_size: int,
        warmup: int,
        stream_mb: int,
        matrix: int,
    ) -> None:
        """`activations` matter with several blocks in flight alone: with one the first stands for all. The first
        `warmup` prompts are decoded untimed by each configuration before all."""
        if not (block_sizes and candidates and blocks and activations):
            raise UserError("search needs at least one value of block_sizes, candidates, blocks and activations")
        self.warmup, self.stream_mb, self.matrix = warmup, stream_mb, matrix
        self.plans = [
            JacobiConfig(block_size=n, blocks=k, activation=r, pool_size=pool_size, candidates=c)
            for n, c, k, r in itertools.product(block_sizes, candidates, blocks, activations)
            if k > 1 or r == activations[0]
        ]

    def __call__(self, target: LanguageModel, prompts: Sequence[Prompt], *, seed: int) -> tuple[list[Point], Roofline]:
        """A point a plan, plain AR's first, and the roofline."""
        roofline = measure(target.device, target.dtype, stream_mb=self.stream_mb, matrix=self.matrix)
        decoders: list[Decoder] = [Autoregressive(target=target)]
        decoders += [Jacobi(target=target, config=plan) for plan in self.plans]
        results: list[list[tuple[Generation, float]]] = [[] for _ in decoders]
        right: list[list[bool]] = [[] for _ in decoders]
        with Meter("search") as meter:
            meter.phase("warm-up")
            for prompt in prompts[: self.warmup]:
                for decoder in decoders:
                    self._decode(target, decoder, prompt, seed)
            meter.expect(len(prompts) * len(decoders), done=0)
            meter.phase(f"{len(self.plans)} configurations and AR")
            for number, prompt in enumerate(prompts):
                for i in rotated(range(len(decoders)), number):
                    generation, seconds, verdict = self._decode(target, decoders[i], prompt, seed)
                    results[i].append((generation, seconds))
                    right[i] += [] if verdict is None else [verdict]
                    meter.advance(1)
        # keys that a pass finds: the prompt, and half of the answer on average
        context = sum(len(p[2]) + len(g.tokens) / 2 for p, (g, _) in zip(prompts, results[0], strict=True))
        plans: list[JacobiConfig | None] = [None, *self.plans]
        return [
            point(target, plan, own, results[0], right, context=context / len(prompts), roofline=roofline)
            for plan, own, right in zip(plans, results, right, strict=True)
        ], roofline

    @staticmethod
    def _decode(
        target: LanguageModel, decoder: Decoder, prompt: Prompt, seed: int
    ) -> tuple[Generation, float, bool | None]:
        """The answer, its seconds and the headline verdict, if the benchmark has one."""
        benchmark, item, ids = prompt
        strings = StopStrings(target.tokenizer, benchmark.stop)
        asked = Request(
            ids=ids,
            sampling=GREEDY,
            max_new_tokens=benchmark.max_new_tokens,
            stop_ids=target.stop_ids,
            seed=prompt_seed(seed, item.id),
            should_stop=strings if benchmark.stop else None,
        )
        (generation,), seconds = timed(target, partial(decode, decoder, [asked]))
        text = strings.cut(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
        return generation, seconds, benchmark.score(item, text).get(benchmark.quality)


def point(
    target: LanguageModel,
    plan: JacobiConfig | None,
    own: Sequence[tuple[Generation, float]],
    serial: Sequence[tuple[Generation, float]],
    right: Sequence[bool],
    *,
    context: float,
    roofline: Roofline,
) -> Point:
    """What one configuration did; the prefill's time is in tokens a second, but not among the passes. `right` are the
    verdicts on those prompts that are judged."""
    generations = [g for g, _ in own]
    forwards = sum(g.forwards for g in generations)
    seconds = sum(s for _, s in own)
    rows = sum(g.branch_forwards for g in generations) / forwards
    positions = sum(g.positions_computed for g in generations) / forwards
    flops, read = cost(target, positions=positions, context=context)
    return {
        "plan": asdict(plan) if plan is not None else None,
        "quality": sum(right) / len(right) if right else None,
        "tpf": sum(len(g.tokens) - g.prefill_tokens for g in generations) / forwards,
        "tokens_per_second": sum(len(g.tokens) for g in generations) / seconds,
        "positions_per_pass": positions,
        "rows_per_pass": rows,
        "intensity": flops / read,
        "flops": flops * forwards / seconds,
        "share_of_roofline": flops * forwards / seconds / roofline.attainable(flops / read),
        "mismatches": sum(a.tokens != b.tokens for (a, _), (b, _) in zip(own, serial, strict=True)),
    }


def name(plan: Mapping[str, Any] | None) -> str:
    if plan is None:
        return "AR"
    ratio = f" r={plan['activation']:g}" if plan["blocks"] > 1 else ""
    return f"n={plan['block_size']} K={plan['blocks']}{ratio} candidates={plan['candidates']}"


def show(points: Sequence[Point], roofline: Roofline) -> Table:
    """One line a configuration, the fastest first."""
    title = (
        f"Jacobi configurations; this device reads {roofline.bandwidth / 1e9:.1f} GB/s, "
        f"does {roofline.flops / 1e9:.0f} GFLOP/s: knee at {roofline.knee:.1f} FLOP/byte"
    )
    table = Table(title=title, title_justify="left")
    for column in ("configuration", "quality", "tpf", "tok/s", "positions", "FLOP/byte", "of roofline", "mismatches"):
        table.add_column(column, justify="left" if column == "configuration" else "right", no_wrap=True)
    for p in sorted(points, key=lambda p: -p["tokens_per_second"]):
        table.add_row(
            name(p["plan"]),
            "–" if p["quality"] is None else f"{100 * p['quality']:.1f} %",
            f"{p['tpf']:.2f}",
            f"{p['tokens_per_second']:.0f}",
            f"{p['positions_per_pass']:.1f}",
            f"{p['intensity']:.1f}",
            f"{100 * p['share_of_roofline']:.0f} %",
            str(p["mismatches"]),
        )
    return table


def picks(points: Sequence[Point], roofline: Roofline) -> dict[str, Point]:
    """The fastest configuration, and the fastest of those within a factor of `NEAR` of the knee, by what they are."""
    own = [p for p in points if p["plan"] is not None]
    near = [p for p in own if _from_knee(p, roofline) <= math.log(NEAR)]
    found = {"fastest": _fastest(own)}
    if near:
        return found | {"fastest near the knee": _fastest(near)}
    return found | {"none is near the knee; the nearest": min(own, key=lambda p: _from_knee(p, roofline))}


def _fastest(points: Sequence[Point]) -> Point:
    return max(points, key=lambda p: p["tokens_per_second"])


def _from_knee(point: Point, roofline: Roofline) -> float:
    return abs(math.log(point["intensity"] / roofline.knee))


def verdict(points: Sequence[Point], roofline: Roofline) -> str:
    """A line a pick."""
    return "\n".join(
        f"{role}: {name(p['plan'])}, {p['tpf']:.2f} tokens a pass, "
        f"{p['tokens_per_second'] / points[0]['tokens_per_second']:.2f}x plain AR's tokens a second; "
        f"its passes stand at {p['intensity'] / roofline.knee:.2f} of the knee's FLOP/byte"
        for role, p in picks(points, roofline).items()
    )


def search(cfg: DictConfig) -> None:
    """One search in Hydra's run folder."""
    quiet()
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    torch.set_num_threads(torch.get_num_threads())
    if "benchmark" not in cfg or "search" not in cfg:
        raise UserError("nothing to search: say recipe=sweeps/jacobi_config")
    subject, benchmarks, grid = load_model(cfg), instantiate(cfg.benchmark), instantiate(cfg.search)
    prompts = [
        (benchmark, item, encode(subject.target, benchmark, item, subject.policy))
        for benchmark in benchmarks.values()
        for item in benchmark.items()[: cfg.limit]
    ]
    if not prompts:
        raise UserError("a benchmark has no prompts: set its count, and limit, to at least 1")
    log.info("searching %d configurations on %d prompts in %s", len(grid.plans), len(prompts), run_dir)
    with torch.inference_mode():
        points, roofline = grid(subject.target, prompts, seed=cfg.seed)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    dtype = str(subject.target.dtype).removeprefix("torch.")
    run = provenance(
        seed=cfg.seed, dtype=dtype, config=plain, prompt_policy=subject.policy.to_dict(subject.target.tokenizer)
    )
    measured = asdict(roofline) | {"knee": roofline.knee}
    write_json(run_dir / "search.json", {"run": run, "roofline": measured, "points": points})
    groups: dict[str, list[tuple[float, float]]] = {}
    for p in points:
        group = "AR" if p["plan"] is None else f"n={p['plan']['block_size']}"
        groups.setdefault(group, []).append((p["intensity"], p["flops"]))
    plot_roofline(
        groups,
        notes={
            f"{role}: {name(p['plan'])}": (p["intensity"], p["flops"]) for role, p in picks(points, roofline).items()
        },
        bandwidth=roofline.bandwidth,
        flops=roofline.flops,
        path=run_dir / "plots" / "roofline.png",
    )
    console = Console()
    console.width = max(console.width, 120)
    console.print(show(points, roofline))
    console.print(verdict(points, roofline), soft_wrap=True)
    console.print(f"numbers and plot: {run_dir}", soft_wrap=True)


main = entry_point(config="search")(search)

if __name__ == "__main__":
    main()
