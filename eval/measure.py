"""One evaluation as conf/eval.yaml (or speed.yaml) describes it: what the config names, wired together."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import write_json
from dspec.config import instantiate, instantiate_decoders
from dspec.decoding import factory
from dspec.provenance import provenance
from dspec.terminal import quiet
from eval.benchmarks.base import Benchmark
from eval.checkpoints import check_arguments
from eval.decoders import DecoderSpec
from eval.evaluate import Check, Evaluation
from eval.load import LoadedModel, load_model
from eval.results import AR
from eval.rows import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation ran and found; `results` is what results.json holds."""

    subject: LoadedModel
    contenders: dict[str, DecoderSpec]
    benchmarks: dict[str, Benchmark]
    evaluation: Evaluation
    results: dict[str, Any]


def measure(cfg: DictConfig, run_dir: Path) -> EvaluationResult:
    """Runs what `cfg` names; plain AR comes along. results.json grows in `run_dir` with each benchmark that is done."""
    quiet()
    torch.set_num_threads(torch.get_num_threads())  # said once, MKL no longer picks its thread count by load
    check_arguments(cfg)
    benchmarks, evaluation = instantiate(cfg.benchmark), instantiate(cfg.evaluation)
    subject = load_model(cfg)
    target = subject.target
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    contenders = instantiate_decoders(cfg)
    if AR not in contenders:
        contenders = {AR: DecoderSpec(label="AR", build=factory.autoregressive), **contenders}
    log.info("evaluating %s in %s", target.name, run_dir)
    dtype = str(target.dtype).removeprefix("torch.")
    run = provenance(seed=cfg.seed, dtype=dtype, config=plain, prompt_policy=subject.policy.to_dict(target.tokenizer))
    run["benchmarks"] = {name: benchmark.source() for name, benchmark in benchmarks.items()}

    def results(rows: Sequence[Row], check: Check, *, complete: bool) -> dict[str, Any]:
        return {"run": run | {"ar_check": check, "complete": complete}, "rows": rows, "calibration": None}

    rows, check = evaluation(
        target=target,
        draft=subject.draft,
        contenders=contenders,
        benchmarks=benchmarks,
        policy=subject.policy,
        stop_ids=target.stop_ids,
        samples=run_dir / "samples.jsonl",
        settings={key: value for key, value in plain.items() if key not in ("resume", "limit", "logger")},
        grown=lambda rows, check: write_json(run_dir / "results.json", results(rows, check, complete=False)),
    )
    write_json(run_dir / "config.json", plain)
    return EvaluationResult(subject, contenders, benchmarks, evaluation, results(rows, check, complete=True))
