"""The stages of the main job: train -> export -> calibrate -> export with temperatures -> evaluate -> report.

Each leaves its artefact in the run folder, so that a killed run goes on behind the last one. This module wires what the
config names; the command is dspec/train.py.
"""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import write_json
from dspec.config import instantiate, instantiate_decoders, remember_command
from dspec.errors import UserError
from dspec.method import Method
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.provenance import provenance
from dspec.terminal import quiet
from dspec.training.lightning_parts import (
    AtomicCheckpointIO,
    FinalCheckpoint,
    History,
    check_same_config,
    check_trainer,
    portable,
    resume_checkpoint,
)
from dspec.training.lit_module import LitModule

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> None:
    """One run in Hydra's run folder; each stage leaves its artefact there before the next one begins."""
    quiet()
    choices = HydraConfig.get().runtime.choices
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if cfg.resume is not None:
        check_same_config(run_dir, plain)
    torch.set_num_threads(torch.get_num_threads())  # said once, MKL no longer picks its thread count by load
    L.seed_everything(cfg.seed, workers=True, verbose=False)

    target: LanguageModel = instantiate(cfg.target)
    dtype = target.dtype  # as it is decoded and shipped; in training a method may hold wider weights
    data = instantiate(cfg.data, target=target)
    draft: Draft | None = instantiate(cfg.draft, target=target) if cfg.draft is not None else None
    parts: dict[str, LanguageModel | Draft] = (
        {"target": target} if draft is None else {"target": target, "draft": draft}
    )
    method: Method = instantiate(cfg.method, **parts)
    calibrate = instantiate(cfg.calibration)
    contenders, benchmarks = instantiate_decoders(cfg), instantiate(cfg.benchmark)
    evaluation, report = instantiate(cfg.evaluation), instantiate(cfg.report)
    if calibrate is not None:
        calibrate.check(draft)
        calibrate.check_prompts(target, draft, [ids for _, ids in data.encoded("calibration")])
    evaluation.encode_prompts(target=target, contenders=contenders, benchmarks=benchmarks, policy=data.policy)
    history = History()
    trainer: L.Trainer = instantiate(
        cfg.trainer,
        default_root_dir=str(run_dir),
        callbacks=[*filter(None, instantiate(cfg.callbacks).values()), history, FinalCheckpoint(run_dir)],
        logger=instantiate(cfg.logger),
        plugins=[AtomicCheckpointIO()],
    )
    check_trainer(trainer, method)
    rank_zero_only(write_json)(run_dir / "config.json", portable(plain, run_dir))
    rank_zero_only(remember_command)(cfg)

    log.info("training %s against %s in %s", cfg.label, target.name, run_dir)
    method.to(trainer.strategy.root_device)  # responses are written there, too
    module = LitModule(method=method, **instantiate(cfg.optimizer), seed=cfg.seed)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume_checkpoint(run_dir) if cfg.resume is not None else None)
    except SystemExit as stopped:  # how Lightning ends on Ctrl-C and on SIGTERM: without a word, on SIGTERM with code 0
        if not trainer.is_global_zero:
            raise
        raise UserError(f"interrupted; go on with resume={run_dir}") from stopped
    if not trainer.is_global_zero:
        return
    torch.use_deterministic_algorithms(False)  # what follows is timed
    method.finish()
    for part in parts.values():  # Lightning has left them on the CPU
        part.eval().to(device=trainer.strategy.root_device, dtype=dtype)

    run = provenance(
        seed=cfg.seed, dtype=str(dtype).removeprefix("torch."), config=plain, prompt_policy=data.prompt_policy
    )
    card = report.card(target=target.name, run=run, command=choices["recipe"])
    if draft is not None:
        draft.prompt_policy = data.prompt_policy
    method.export(run_dir, card=card)
    calibration = None
    if draft is not None and calibrate is not None:
        prompts = [ids for _, ids in data.encoded("calibration")]
        calibration = calibrate(
            target=target, draft=draft, prompts=prompts, stop_ids=target.stop_ids, artefact=run_dir / "calibration.json"
        )
        method.export(run_dir, card=card)  # with its temperatures
    results = evaluation(
        target=target,
        draft=draft,
        contenders=contenders,
        benchmarks=benchmarks,
        policy=data.policy,
        stop_ids=target.stop_ids,
        folder=run_dir,
        run=run,
        calibration=calibration,
        settings=portable(plain | {"resume": None}, run_dir),
    )
    report(results=results, history=history.rows, run_dir=run_dir, logger=trainer.logger)
