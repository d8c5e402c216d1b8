"""The stages of the main job: train -> export -> calibrate -> evaluate -> report.

    stage       artefact                     what is redone on resume
    train       checkpoints/last.ckpt        only steps after the last checkpoint; rejected if settings (config.json),
                                             the target's weights or the training rows have changed
    export      draft/ or target/            everything, before and after calibration
    calibrate   calibration.json             nothing if weights, prompts and settings are the same
    evaluate    samples.jsonl, results.json  only samples not yet written with the same weights, prompts and settings
    report      table, plots                 everything: it takes seconds

Each stage starts from the artefacts of those before it, so a killed run resumes after the last finished one. This
module wires up what the config names. It is independent of the method with one exception: a drafter gets the prompt
policy recorded in it and, if the config has a calibration, STS temperatures fitted between two exports. The command is
dspec/train.py.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import write_json
from dspec.calibration.stage import CalibrateSTS
from dspec.config.compose import check_decoders, instantiate, instantiate_decoders
from dspec.config.run_folder import remember_command
from dspec.config.types import check_types
from dspec.errors import UserError
from dspec.method import Method
from dspec.models.draft import Draft
from dspec.models.language_model import require_causal
from dspec.models.target_model import TargetModel
from dspec.provenance import provenance
from dspec.terminal import quiet
from dspec.training.checkpoints import AtomicCheckpointIO, FinalCheckpoint, resume_checkpoint
from dspec.training.checks import check_accelerator, check_optimizer, check_trainer
from dspec.training.history import History
from dspec.training.lit_module import LitModule
from dspec.training.models import Models
from dspec.training.parts import DecoderSpec, Evaluation, Report, TrainingData
from dspec.training.resuming import check_same_config, portable

log = logging.getLogger(__name__)


def run_job(cfg: DictConfig) -> None:
    """One run in Hydra's run folder; each stage writes its artefact there before the next one starts."""
    quiet()
    job = prepare(cfg)
    train(job)
    if not job.trainer.is_global_zero:
        return
    run = _provenance(job)
    export(job, run)
    calibration = calibrate(job, run)
    results = evaluate(job, run, calibration)
    job.report(results=results, history=job.history.rows, run_dir=job.run_dir, logger=job.trainer.logger)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the config names, built and checked before any heavy work."""

    run_dir: Path
    config: dict[str, Any]
    recipe: str | None
    models: Models
    data: TrainingData
    method: Method
    calibration: CalibrateSTS | None  # None: no calibration stage
    specs: Mapping[str, DecoderSpec]
    benchmarks: Mapping[str, object]
    evaluation: Evaluation
    report: Report
    history: History
    trainer: L.Trainer
    module: LitModule

    @property
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device


def prepare(cfg: DictConfig) -> Job:
    """Builds all parts and checks them against each other. Raises UserError for anything that would fail later."""
    check_types(cfg)
    check_accelerator(cfg.trainer.accelerator)
    hydra = HydraConfig.get().runtime
    run_dir = Path(hydra.output_dir)
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if cfg.resume is not None:
        check_same_config(run_dir, config)
    torch.set_num_threads(torch.get_num_threads())  # once set, MKL no longer picks its thread count by load
    L.seed_everything(cfg.seed, workers=True, verbose=False)

    specs = instantiate_decoders(cfg)
    check_decoders(specs, drafter=cfg.draft is not None, without="use recipe=dspark or recipe=dflash")
    # models first: the rest is built for them; the random numbers of fresh weights depend on this order
    target: TargetModel = instantiate(cfg.target)
    data: TrainingData = instantiate(cfg.data, target=target)
    draft: Draft | None = instantiate(cfg.draft, target=target) if cfg.draft is not None else None
    models = Models(target=target, draft=draft)
    method: Method = instantiate(cfg.method, **models.parts)
    calibration: CalibrateSTS | None = instantiate(cfg.calibration)
    benchmarks = instantiate(cfg.benchmark)
    evaluation: Evaluation = instantiate(cfg.evaluation)
    report: Report = instantiate(cfg.report)
    if calibration is not None:
        calibration.check(draft)  # raises without a drafter
        calibration.check_prompts(target, draft, calibration_prompts(data))  # type: ignore[arg-type]
    for spec in specs.values():
        spec.check(target=target, draft=draft)
    evaluation.encode_prompts(target=target, specs=specs, benchmarks=benchmarks, policy=data.policy)

    # then the trainer, whose logger writes from now on
    history = History()
    trainer: L.Trainer = instantiate(
        cfg.trainer,
        default_root_dir=str(run_dir),
        callbacks=[*filter(None, instantiate(cfg.callbacks).values()), models, history, FinalCheckpoint(run_dir)],
        logger=instantiate(cfg.logger),
        plugins=[AtomicCheckpointIO()],
    )
    check_trainer(trainer, method)
    optimizer = instantiate(cfg.optimizer)
    check_optimizer(optimizer["optimizer"])
    module = LitModule(method=method, **optimizer, seed=cfg.seed)
    rank_zero_only(write_json)(run_dir / "config.json", portable(config, run_dir))
    rank_zero_only(remember_command)(cfg)
    log.info("training %s against %s in %s", cfg.label, target.name, run_dir)
    return Job(
        run_dir=run_dir,
        config=config,
        recipe=hydra.choices["recipe"],
        models=models,
        data=data,
        method=method,
        calibration=calibration,
        specs=specs,
        benchmarks=benchmarks,
        evaluation=evaluation,
        report=report,
        history=history,
        trainer=trainer,
        module=module,
    )


def calibration_prompts(data: TrainingData) -> list[list[int]]:
    return [ids for _, ids in data.encoded("calibration")]


def train(job: Job) -> None:
    """Trains the method, or resumes from the last checkpoint; leaves plain models as they ship."""
    job.models.for_data(job.method, job.device)
    checkpoint = resume_checkpoint(job.run_dir) if job.config["resume"] is not None else None
    try:
        # a protocol cannot extend Lightning's class
        job.trainer.fit(job.module, datamodule=job.data, ckpt_path=checkpoint)  # type: ignore[arg-type]
    except SystemExit as stopped:  # Lightning's exit on Ctrl-C and SIGTERM: without a message, on SIGTERM with code 0
        if not job.trainer.is_global_zero:
            raise
        raise UserError(f"interrupted; continue with resume={job.run_dir}") from stopped
    if job.trainer.is_global_zero:
        torch.use_deterministic_algorithms(False)  # evaluation is timed
        job.method.finish()
        job.models.as_shipped(job.method, job.device)


def _provenance(job: Job) -> dict[str, Any]:
    dtype = str(job.models.dtype).removeprefix("torch.")
    policy = job.data.prompt_policy
    return provenance(seed=job.config["seed"], dtype=dtype, config=job.config, prompt_policy=policy)


def export(job: Job, run: dict[str, Any]) -> None:
    """Exports the trained component to its own folder, with a model card."""
    if job.models.draft is not None:
        job.models.draft.metadata.prompt_policy = job.data.prompt_policy
    drafter = job.models.draft is not None
    card = job.report.card(target=job.models.target.name, run=run, command=job.recipe, drafter=drafter)
    job.method.export(job.run_dir, card=card)


def calibrate(job: Job, run: dict[str, Any]) -> dict[str, Any] | None:
    """The calibration report; the fitted temperatures are stored in the drafter. None without a calibration stage."""
    draft = job.models.draft
    if draft is None or job.calibration is None:
        return None
    target = require_causal(job.models.target)
    report: dict[str, Any] = job.calibration(
        target=target,
        draft=draft,
        prompts=calibration_prompts(job.data),
        stop_ids=target.stop_ids,
        artefact=job.run_dir / "calibration.json",
    )
    export(job, run)  # with its temperatures
    return report


def evaluate(job: Job, run: dict[str, Any], calibration: dict[str, Any] | None) -> dict[str, Any]:
    """The content of results.json, which grows with every finished benchmark."""
    results: dict[str, Any] = job.evaluation(
        target=job.models.target,
        draft=job.models.draft,
        specs=job.specs,
        benchmarks=job.benchmarks,
        policy=job.data.policy,
        stop_ids=job.models.target.stop_ids,
        folder=job.run_dir,
        run=run,
        calibration=calibration,
        settings=portable(job.config | {"resume": None}, job.run_dir),
    )
    return results
