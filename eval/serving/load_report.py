"""The load report: costs of steps, traces at one concurrency, the engine under closed loops, and its prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from data.chat import PromptPolicy
from dspec.atomic import atomic_file, write_json
from dspec.config.compose import instantiate
from dspec.config.types import check_types
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel, require_causal
from dspec.provenance import provenance
from dspec.serving.recording import Recording
from dspec.serving.simulator import Outcome
from dspec.serving.step_table import StepTable, read_step_table
from dspec.serving.traces import Replay
from dspec.terminal import quiet
from eval.benchmarks.base import Benchmark
from eval.checkpoints import checkpoint_of, fill_in
from eval.load import load_model
from eval.meter import Meter
from eval.reports.serving_plots import plot_predicted, plot_serving
from eval.serving import tables
from eval.serving.costs import EngineCosts, StepTimer, measure_costs
from eval.serving.demonstrations import overhead, selection_bias
from eval.serving.lanes import clock, requests
from eval.serving.prompts import left_to_right, served_prompts
from eval.serving.record import record_answers
from eval.serving.settings import SCHEDULED, ServingSettings
from eval.serving.variants import Measured, measure, predict, row, verdicts


def run(cfg: DictConfig, benchmarks: Mapping[str, Benchmark], settings: ServingSettings) -> None:
    """Measures and writes to Hydra's run folder."""
    quiet()
    torch.set_num_threads(torch.get_num_threads())  # once set, MKL no longer picks its thread count by load
    check_types(cfg)
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    items = left_to_right(benchmarks, limit=cfg.limit)
    fill_in(cfg)
    loaded = load_model(target=cfg.target, checkpoint=checkpoint_of(cfg), layout=cfg.layout)
    target, draft = require_causal(loaded.target), loaded.draft
    if draft is None or draft.confidence_head is None:
        raise UserError(
            "a load report needs a drafter with a confidence head: set checkpoint=<run folder of recipe=dspark>"
        )
    for name, lengths in (("static", settings.static), ("profile_lengths", settings.profile_lengths)):
        if lengths[-1] > (slots := draft.config.num_drafts):
            raise UserError(f"serving.{name} up to {lengths[-1]}: this drafter drafts {slots} tokens")
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    policy: PromptPolicy = loaded.policy or instantiate(cfg.policy)
    dtype = str(target.dtype).removeprefix("torch.")
    made = provenance(seed=cfg.seed, dtype=dtype, config=plain, prompt_policy=policy.to_dict(target.tokenizer))
    report = LoadReport(target, draft.eval(), items, policy, settings, made=made, drafter=str(cfg.checkpoint))
    with torch.inference_mode(), Meter("serving") as meter:
        results = report(meter, run_dir)
    write_json(run_dir / "results.json", results)
    write_report(results, run_dir, clock=settings.clock)
    print(summary(results, clock=settings.clock))
    print(f"numbers, traces, step table and plots: {run_dir}")


class LoadReport:
    def __init__(
        self,
        target: LanguageModel,
        draft: Draft,
        items: Sequence[tuple[str, Benchmark, Any]],
        policy: PromptPolicy,
        settings: ServingSettings,
        *,
        made: Mapping[str, Any],
        drafter: str,
    ) -> None:
        self.target, self.draft, self.settings, self.made, self.drafter = target, draft, settings, made, drafter
        self.seed: int = made["seed"]
        sampling = Sampling(temperature=settings.temperature, top_p=settings.top_p)
        common: dict[str, Any] = {"target": target, "policy": policy, "sampling": sampling, "seed": self.seed}
        self.served = served_prompts(items, **common, use="served")
        self.recorded = served_prompts(items, **common, use="recorded")
        self.now = clock(settings.clock, target.device)
        fitted = draft.metadata.calibration
        applies = fitted is not None and fitted.applies_to(settings.temperature, settings.top_p)
        self.calibration = fitted if applies else None

    def __call__(self, meter: Meter, run_dir: Path) -> dict[str, Any]:
        """results.json's content; traces.jsonl and sps.json are written as soon as they are there."""
        settings = self.settings
        meter.phase(f"recording answers, {settings.trace_concurrency} in flight")
        recording = self._record()
        recording.write(run_dir / "traces.jsonl")
        meter.phase("timing steps")
        costs = self._costs()
        fitted = costs.table()
        write_json(run_dir / "sps.json", fitted.to_dict())
        table = fitted if settings.steps is None else read_step_table(Path(settings.steps).expanduser())
        lines, cells, predicted = self._cells(meter, recording, table)
        scheduled = verdicts(cells, predicted, statics=list(settings.statics()), scheduled=SCHEDULED, seed=self.seed)
        return {
            "run": self.made,
            "clock": settings.clock,
            "sampling": self.served[0].request.sampling.to_dict(),
            "costs": costs.to_dict(),
            "cells": lines,
            "scheduled": scheduled,
            "selection_bias": selection_bias(settings.rules),
            "overhead": overhead(
                table,
                settings.rules,
                requests=settings.overhead_requests,
                slots=settings.overhead_slots,
                repeats=settings.overhead_repeats,
                seed=self.seed,
            ),
        }

    def _record(self) -> Recording:
        """Of the same prompts, again and again, but other draws than those that are timed."""
        turns = zip(cycle(self.recorded), requests(self.recorded), strict=False)
        return record_answers(
            self.target,
            self.draft,
            [replace(prompt, request=request) for prompt, request in islice(turns, self.settings.trace_requests)],
            drafter=self.drafter,
            concurrency=self.settings.trace_concurrency,
            every_position=True,
            seed=self.seed,
        )

    def _costs(self) -> EngineCosts:
        about = {name: self.made[name] for name in ("hardware", "threads", "dtype", "git", "versions")}
        about |= {"target": self.target.name, "drafter": self.drafter, "clock": self.settings.clock}
        timers = [
            StepTimer(
                self.target,
                self.draft,
                self.served,
                self.settings,
                requests=R,
                calibration=self.calibration,
                now=self.now,
            )
            for R in self.settings.profile_requests
        ]
        return measure_costs(timers, repeats=self.settings.profile_repeats, about=about)

    def _cells(self, meter: Meter, recording: Recording, table: StepTable) -> tuple[Any, Any, Any]:
        settings, calibration, greedy = self.settings, self.calibration, self.served[0].request.sampling.greedy
        temperatures = None if calibration is None else calibration.temperatures
        source = Replay(recording.traces, slots=recording.about.slots, temperatures=temperatures)
        tokens_per_answer = fmean(trace.tokens for trace in recording.traces)
        variants = 2 + len(settings.static) + len(SCHEDULED)
        meter.expect(len(settings.concurrency) * settings.repeats * variants, done=0)
        lines: list[dict[str, Any]] = []
        cells: dict[int, dict[str, Measured]] = {}
        predicted: dict[int, dict[str, Outcome]] = {}
        for R in settings.concurrency:
            meter.phase(f"{R} in flight")
            cells[R], costs = measure(
                self.target,
                self.draft,
                self.served,
                settings,
                table,
                concurrency=R,
                tokens=max(1, round(settings.answers(R) * tokens_per_answer / settings.repeats)),
                calibration=calibration,
                now=self.now,
                advance=meter.advance,
            )
            predicted[R] = predict(source, settings, table, costs, concurrency=R, seed=self.seed)
            lines += [
                row(name, R, one, predicted[R][name], baseline=cells[R]["AR"], greedy=greedy, seed=self.seed)
                for name, one in cells[R].items()
            ]
        return lines, cells, predicted


def write_report(results: Mapping[str, Any], run_dir: Path, *, clock: str) -> None:
    """report.md and the plots."""
    with atomic_file(run_dir / "report.md") as scratch:
        scratch.write_text(tables.markdown(results["cells"], results["scheduled"], clock=clock), encoding="utf-8")
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for line in results["cells"]:
        curves.setdefault(line["variant"], []).append(line)
    plots, note = run_dir / "plots", f"seconds of the {clock} clock"
    plot_serving(curves, x="concurrency", y="throughput", note=note, path=plots / "throughput.png")
    plot_serving(curves, x="tokens_per_second_per_user", y="throughput", note=note, path=plots / "pareto.png")
    plot_serving(curves, x="concurrency", y="budget", note="", path=plots / "budget.png")
    plot_predicted(curves, note=note, path=plots / "predicted.png")


def summary(results: Mapping[str, Any], *, clock: str) -> str:
    bias = "\n".join(f"  {name:<36} {p:.2f}" for name, p in results["selection_bias"].items())
    spent = ", ".join(f"{name} {t['median']:.0f} us" for name, t in results["overhead"].items())
    return "\n".join(
        [
            tables.text(results["cells"], clock=clock),
            "",
            tables.verdict_text(results["scheduled"]),
            tables.errors(results["cells"]),
            "probability of token A in the paper's appendix A (the target's: 0.70):",
            bias,
            f"a decision for {results['run']['config']['serving']['overhead_requests']} requests: {spent}",
        ]
    )
