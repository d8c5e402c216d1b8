"""The search: all configurations and plain AR decode the same prompts greedily, alternating prompt by prompt.

All give the same tokens, up to ties between logits in floating point: answers that differ from plain AR's are counted,
and quality is reported. Warm-up is not timed; the order of configurations rotates from prompt to prompt.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import write_json
from dspec.config.compose import instantiate
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Request
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import Decoder, decode
from dspec.decoding.sampling import GREEDY
from dspec.decoding.stopping import StopStrings
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, require_causal
from dspec.models.target_model import TargetModel
from dspec.models.training_record import TrainingRecord
from dspec.provenance import provenance
from dspec.seeding import prompt_seed
from dspec.terminal import quiet
from eval.benchmarks.base import Benchmark, Item
from eval.checkpoints import checkpoint_of, fill_in
from eval.evaluate import rotated
from eval.gate import timed
from eval.load import load_model
from eval.meter import Meter
from eval.prompts import encode
from eval.search.roofline import Roofline, measure_roofline, pass_cost
from eval.search.settings import SearchSettings
from eval.search.tables import Point, plot, show, verdict

log = logging.getLogger(__name__)
SearchPrompt = tuple[Benchmark, Item, list[int]]


class Search:
    """Decodes with each configuration and measures it."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings, self.configs = settings, settings.configs

    def __call__(
        self, target: LanguageModel, prompts: Sequence[SearchPrompt], *, seed: int
    ) -> tuple[list[Point], Roofline]:
        """A point per configuration, plain AR's first, and the roofline."""
        roofline = measure_roofline(
            target.device, target.dtype, stream_mb=self.settings.stream_mb, matrix=self.settings.matrix
        )
        decoders: list[Decoder] = [Autoregressive(target=target)]
        decoders += [Jacobi(target=target, config=config) for config in self.configs]
        results: list[list[tuple[Generation, float]]] = [[] for _ in decoders]
        right: list[list[bool]] = [[] for _ in decoders]
        with Meter("search") as meter:
            meter.phase("warm-up")
            for prompt in prompts[: self.settings.warmup]:
                for decoder in decoders:
                    self._decode(target, decoder, prompt, seed)
            meter.expect(len(prompts) * len(decoders), done=0)
            meter.phase(f"{len(self.configs)} configurations and AR")
            for number, prompt in enumerate(prompts):
                for i in rotated(range(len(decoders)), number):
                    generation, seconds, verdict = self._decode(target, decoders[i], prompt, seed)
                    results[i].append((generation, seconds))
                    right[i] += [] if verdict is None else [verdict]
                    meter.advance(1)
        # keys in the cache at a pass: the prompt, and half of the answer on average
        context = sum(len(p[2]) + len(g.tokens) / 2 for p, (g, _) in zip(prompts, results[0], strict=True))
        configs: list[JacobiConfig | None] = [None, *self.configs]
        return [
            point(target, config, decoded, results[0], judged, context=context / len(prompts), roofline=roofline)
            for config, decoded, judged in zip(configs, results, right, strict=True)
        ], roofline

    @staticmethod
    def _decode(
        target: LanguageModel, decoder: Decoder, prompt: SearchPrompt, seed: int
    ) -> tuple[Generation, float, bool | None]:
        """The answer, its seconds, and whether it is right by the benchmark's headline measure, if there is one."""
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
    config: JacobiConfig | None,
    decoded: Sequence[tuple[Generation, float]],
    baseline: Sequence[tuple[Generation, float]],
    right: Sequence[bool],
    *,
    context: float,
    roofline: Roofline,
) -> Point:
    """One configuration's results. `decoded` and plain AR's `baseline` are answers and their seconds, by prompt;
    `right` are the verdicts on the judged prompts; `context` is the mean number of keys in the cache at a pass. Tokens
    per second include the prefill's time, tokens per pass leave the prefill out. Raises UserError if there is no
    pass."""
    generations = [g for g, _ in decoded]
    forwards = sum(g.forwards for g in generations)
    if not forwards:
        raise UserError("every answer ended with its first token: there is no pass to measure; use other prompts")
    seconds = sum(s for _, s in decoded)
    rows = sum(g.branch_forwards for g in generations) / forwards
    positions = sum(g.positions_computed for g in generations) / forwards
    flops, read = pass_cost(target, positions=positions, context=context)
    return {
        "config": asdict(config) if config is not None else None,
        "quality": sum(right) / len(right) if right else None,
        "tpf": sum(len(g.tokens) - g.prefill_tokens for g in generations) / forwards,
        "tokens_per_second": sum(len(g.tokens) for g in generations) / seconds,
        "positions_per_pass": positions,
        "rows_per_pass": rows,
        "intensity": flops / read,
        "flops": flops * forwards / seconds,
        "share_of_roofline": flops * forwards / seconds / roofline.attainable(flops / read),
        "mismatches": sum(a.tokens != b.tokens for (a, _), (b, _) in zip(decoded, baseline, strict=True)),
    }


def left_to_right(benchmarks: Mapping[str, Benchmark], *, limit: int | None) -> list[tuple[Benchmark, Item]]:
    """The first `limit` items of each benchmark. Raises UserError for one that has holes to fill."""
    chosen = [(benchmark, item) for benchmark in benchmarks.values() for item in benchmark.items()[:limit]]
    if any(item.infills for _, item in chosen):
        raise UserError("the search decodes from left to right, it fills no holes: use benchmark=tiny or another one")
    return chosen


def left_to_right_model(model: TargetModel) -> LanguageModel:
    """The model itself. Raises UserError for one that Jacobi decoding is not for."""
    target = require_causal(model)
    if TrainingRecord.read(target).attention is not None:
        raise UserError(
            f"{target.name!r} is a diffusion LM, the search is for Jacobi decoding: use "
            "python -m eval.run recipe=sweeps/diffusion_frontier"
        )
    return target


def run(cfg: DictConfig, benchmarks: Mapping[str, Benchmark], settings: SearchSettings) -> None:
    """Runs one search and writes its results to Hydra's run folder."""
    quiet()
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    torch.set_num_threads(torch.get_num_threads())
    chosen = left_to_right(benchmarks, limit=cfg.limit)
    fill_in(cfg)
    loaded = load_model(target=cfg.target, checkpoint=checkpoint_of(cfg))
    target = left_to_right_model(loaded.target)
    policy = loaded.policy or instantiate(cfg.policy)
    prompts = [(benchmark, item, encode(target.tokenizer, benchmark, item, policy).ids) for benchmark, item in chosen]
    if not prompts:
        raise UserError("a benchmark has no prompts: set its count, and limit, to at least 1")
    log.info("searching %d configurations on %d prompts in %s", len(settings.configs), len(prompts), run_dir)
    with torch.inference_mode():
        points, roofline = Search(settings)(target, prompts, seed=cfg.seed)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    dtype = str(target.dtype).removeprefix("torch.")
    made = provenance(seed=cfg.seed, dtype=dtype, config=plain, prompt_policy=policy.to_dict(target.tokenizer))
    measured = asdict(roofline) | {"ridge_point": roofline.ridge_point}
    write_json(run_dir / "search.json", {"run": made, "roofline": measured, "points": points})
    plot(points, roofline, run_dir / "plots" / "roofline.png")
    print(f"{show(points, roofline)}\n\n{verdict(points, roofline)}\nnumbers and plot: {run_dir}")
