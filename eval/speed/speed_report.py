"""The measurements of a speed report: where a round's time goes, and the cost of passes of other sizes, on the current
device. Speeds are reported with the quality of the same samples. Formatting is in eval/speed/tables.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dspec.atomic import write_json
from dspec.config.compose import instantiate
from dspec.models.language_model import require_causal
from dspec.seeding import prompt_seed
from eval.benchmarks.base import Benchmark
from eval.job import EvaluationResult, run_evaluation
from eval.samples import Sample, read_samples
from eval.speed.costs import achieved_over_ideal, draft_cost, round_profile, speeds, tau_by_position, verify_cost
from eval.speed.settings import SpeedSettings
from eval.speed.tables import report


class SpeedReport:
    """Measures the decoders of an evaluation, given its samples."""

    def __init__(self, settings: SpeedSettings) -> None:
        self.settings = settings

    def __call__(self, done: EvaluationResult, samples: Sequence[Sample]) -> dict[str, Any]:
        """All measurements, JSON-ready. Rounds are profiled on the first benchmark at the first temperature, in full
        batches: rows that share a pass with fewer others cost more."""
        target, draft = done.loaded.target, done.loaded.draft
        rows = done.results["rows"]
        lines = []
        for row in rows:
            chosen = [
                s
                for s in samples
                if (s.benchmark, s.temperature, s.decoder)
                == (row["benchmark"], row["decoder"]["temperature"], row["decoder"]["name"])
            ]
            line = {name: row[name] for name in ("benchmark", "method", "baseline", "quality", "tau", "speedup")}
            line |= {"decoder": row["decoder"]["name"], "temperature": row["decoder"]["temperature"]}
            line |= speeds(chosen, price_per_hour=self.settings.price_per_hour)
            lines.append(
                line
                | {
                    "tau_by_position": tau_by_position(
                        [s.generation for s in chosen], width=self.settings.position_width
                    )
                }
            )
        with torch.inference_mode():
            rounds = self._rounds(done)
            verify = verify_cost(require_causal(target), **self.settings.curves)
            drafted = draft_cost(require_causal(target), draft, **self.settings.curves) if draft is not None else []
        return {"speeds": lines, "rounds": rounds, "verify_cost": verify, "draft_cost": drafted}

    def _rounds(self, done: EvaluationResult) -> list[dict[str, Any]]:
        target, policy = done.loaded.target, done.loaded.policy
        name, benchmark = next(iter(done.benchmarks.items()))
        sampling = done.evaluation.samplings[0]
        encoded = done.evaluation.encode_prompts(
            target=target, specs=done.specs, benchmarks={name: benchmark}, policy=policy
        )
        size = done.evaluation.batch_size
        prompts = encoded[name][: -(-self.settings.profiled_prompts // size) * size]
        rounds: list[dict[str, Any]] = []
        for key, spec in done.specs.items():
            profile = round_profile(
                spec.build(target=target, draft=done.loaded.draft),
                [
                    prompt.request(
                        sampling=sampling,
                        seed=prompt_seed(self.settings.seed, item.id),
                        stop_ids=target.stop_ids,
                        stop=None,
                    )
                    for item, prompt in prompts
                ],
                device=target.device,
                batch_size=size,
            )
            about = {"decoder": key, "method": spec.label, "baseline": spec.baseline, "benchmark": name}
            rounds.append(about | {"batch_size": size} | profile)
        first = {
            row["decoder"]["name"]: row
            for row in reversed(done.results["rows"])
            if row["benchmark"] == name and row["decoder"]["temperature"] == sampling.temperature
        }
        by_decoder = {line["decoder"]: line for line in rounds}
        for line in rounds:
            base = by_decoder[done.specs[line["decoder"]].baseline]
            tau, speedup = first[line["decoder"]]["tau"], first[line["decoder"]]["speedup"]
            line["ideal"] = achieved_over_ideal(tau, speedup, base, line) if tau and speedup else None
        return rounds


def run(cfg: DictConfig, benchmarks: Mapping[str, Benchmark], settings: SpeedSettings) -> None:
    """One speed report in Hydra's run folder."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    done = run_evaluation(cfg, benchmarks, run_dir)
    logger = instantiate(cfg.get("logger"))
    instantiate(cfg.report)(results=done.results, history=[], run_dir=run_dir, logger=logger)
    found = SpeedReport(settings)(done, read_samples(run_dir / "samples.jsonl"))
    write_json(run_dir / "speed.json", {"run": done.results["run"]} | found)
    trusted = bool(done.results["run"]["ar_check"]["trusted"])
    report(found, width=settings.position_width, trusted=trusted, run_dir=run_dir)
