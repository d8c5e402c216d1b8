"""The study from end to end: records and measures (or reads), simulates, writes results and plots."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import atomic_file, write_json
from dspec.config.compose import instantiate
from dspec.config.types import check_types
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.models.language_model import require_causal
from dspec.provenance import provenance
from dspec.serving.recording import Recording, read_recording
from dspec.serving.step_table import StepTable, read_step_table
from dspec.terminal import quiet
from eval.benchmarks.base import Benchmark
from eval.checkpoints import checkpoint_of, fill_in
from eval.load import load_model
from eval.profile_steps.measure import fit, measure
from eval.profile_steps.settings import ProfileSettings
from eval.reports.serving_plots import plot_gains, plot_reliabilities, plot_waste
from eval.serving.prompts import left_to_right, served_prompts
from eval.serving.record import record_answers
from eval.serving_study import tables
from eval.serving_study.scenarios import HINDSIGHT, ORACLE, RAW, STS, dearer, scenarios
from eval.serving_study.settings import StudySettings
from eval.serving_study.simulate import DEARER, MEASURED, Cell, Study

log = logging.getLogger(__name__)


def run(
    cfg: DictConfig, benchmarks: Mapping[str, Benchmark], settings: StudySettings, profile: ProfileSettings
) -> None:
    """One study in Hydra's run folder."""
    quiet()
    torch.set_num_threads(torch.get_num_threads())
    check_types(cfg)
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    recordings, table = gather(cfg, benchmarks, settings, profile, run_dir)
    given = [one for recording in recordings for one in scenarios(recording, settings, seed=cfg.seed)]
    by_name = {MEASURED: table, DEARER: dearer(table, settings.dearer)}
    cells = Study(settings, by_name, cfg.seed).cells(given)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    made = provenance(seed=cfg.seed, dtype=recordings[0].about.dtype, config=plain, prompt_policy={})
    about = [vars(recording.about) | {"answers": len(recording.traces)} for recording in recordings]
    results = {"run": made, "simulated": True, "recordings": about, "cells": cells}
    write_json(run_dir / "results.json", results | {"steps": {k: t.to_dict() for k, t in by_name.items()}})
    report(cells, settings, table, run_dir)


def gather(
    cfg: DictConfig,
    benchmarks: Mapping[str, Benchmark],
    settings: StudySettings,
    profile: ProfileSettings,
    run_dir: Path,
) -> tuple[list[Recording], StepTable]:
    """Recorded answers and a step table, read or made; what is made is written. Raises UserError for files that do not
    fit."""
    recordings = [read_recording(Path(path).expanduser()) for path in settings.traces]
    table = read_step_table(Path(settings.steps).expanduser()) if settings.steps is not None else None
    if recordings and table is not None:
        return recordings, table
    items = left_to_right(benchmarks, limit=cfg.limit) if not recordings else []
    fill_in(cfg)
    loaded = load_model(target=cfg.target, checkpoint=checkpoint_of(cfg), layout=cfg.layout)
    if (draft := loaded.draft) is None:
        raise UserError("the study is of a drafter: set checkpoint=<run folder of recipe=dspark>")
    target = require_causal(loaded.target)
    policy = loaded.policy or instantiate(cfg.policy)
    common: dict[str, Any] = {"drafter": str(cfg.checkpoint), "seed": cfg.seed, "every_position": True}
    for temperature in settings.temperatures if items else []:
        log.info("recording %d answers at temperature %g", len(items), temperature)
        sampling = Sampling(temperature=temperature, top_p=1.0)
        prompts = served_prompts(items, target=target, policy=policy, sampling=sampling, seed=cfg.seed, use="study")
        recordings.append(record_answers(target, draft, prompts, concurrency=settings.concurrency, **common))
        recordings[-1].write(run_dir / f"traces_{temperature:g}.jsonl")
    if table is None:
        log.info("timing steps at %d points", len(profile.requests) * len(profile.lengths))
        dtype = str(target.dtype).removeprefix("torch.")
        made = provenance(seed=cfg.seed, dtype=dtype, config={}, prompt_policy={})
        where = {name: made[name] for name in ("hardware", "threads", "dtype", "git", "versions")}
        where |= {"context": profile.context, "target": target.name, "drafter": str(cfg.checkpoint)}
        table = fit(measure(target, draft, profile, seed=cfg.seed), about=where)
        write_json(run_dir / "sps.json", table.to_dict())
    return recordings, table


def report(cells: Sequence[Cell], settings: StudySettings, table: StepTable, run_dir: Path) -> None:
    """Prints the tables, writes results.md and the plots."""
    where: dict[str, Any] = {"focus": settings.focus, "scheduler": settings.schedulers[0]}
    dear = f'"dear" steps are hypothetical: tokens cost {settings.dearer:g} times as much.'
    steps = f"Steps measured on: {_machine(table)}. {dear}"
    with atomic_file(run_dir / "results.md") as scratch:
        scratch.write_text(tables.markdown(cells, steps=steps, **where), encoding="utf-8")
    draw(cells, settings, run_dir / "plots")
    picked = tables.at(cells, **where)
    print(f"{tables.gains(cells)}\n{tables.LEGEND}\n{steps}\n")
    print(f"{tables.waste(picked)}\n\n{tables.calibration(picked)}\n")
    print(f"{tables.verdict(cells)}\nnumbers and plots: {run_dir}")


def _machine(table: StepTable) -> str:
    hardware = table.about.get("hardware") or "an unnamed machine"
    return ", ".join(f"{k} {v}" for k, v in hardware.items()) if isinstance(hardware, Mapping) else str(hardware)


def draw(cells: Sequence[Cell], settings: StudySettings, folder: Path) -> None:
    """Gains by load of the domains together; reliability and waste of every scenario."""
    for temperature in dict.fromkeys(cell["temperature"] for cell in cells):
        chosen = [cell for cell in cells if cell["temperature"] == temperature]
        plot_gains(_gains(chosen), folder / f"gains_{temperature:g}.png")
        picked = tables.at(chosen, focus=settings.focus, scheduler=settings.schedulers[0])
        curves = {c["scenario"]: _curves(c) for c in picked}
        plot_reliabilities({k: v for k, v in curves.items() if v}, folder / f"reliability_{temperature:g}.png")
        plot_waste(
            {c["scenario"].replace(" -> ", " →\n"): _waste(c) for c in picked}, folder / f"waste_{temperature:g}.png"
        )


def _gains(cells: Sequence[Cell]) -> dict[str, dict[str, list[tuple[float, float, float, float]]]]:
    panels: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    for cell in cells:
        if cell["kind"] != "all":
            continue
        steps = "measured steps" if cell["steps"] == MEASURED else "dear steps (hypothetical)"
        panel = panels.setdefault(f"{tables.ALGORITHMS[cell['scheduler']]}, {steps}", {})
        for name, measured in cell["estimators"].items():
            if name not in (RAW, HINDSIGHT):
                gain = measured["gain"]
                point = (cell["concurrency"], gain["mean"], gain["low"], gain["high"])
                panel.setdefault(tables.SHORT[name], []).append(point)
    return panels


def _curves(cell: Cell) -> dict[str, Any]:
    found = {
        name: cell["estimators"].get(name, {}).get("curve") for name in tables.SHORT if name not in (HINDSIGHT, ORACLE)
    }
    return {tables.SHORT[name]: bins for name, bins in found.items() if bins is not None}


def _waste(cell: Cell) -> dict[str, tuple[float, float]]:
    return {
        tables.SHORT[name]: (one["verified_per_token"] - one["wasted_per_token"], one["wasted_per_token"])
        for name, one in cell["estimators"].items()
        if name in (RAW, STS, "sts_online", "logistic", ORACLE)
    }
