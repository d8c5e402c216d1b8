"""The main job: train a method, calibrate it, evaluate it beside its baselines, and report.

    python -m dspec.train recipe=dspark
    python -m dspec.train recipe=dspark resume=runs/dspark/<time>

It wires what the config names and knows no method, data set or benchmark by name.
"""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import write_json
from dspec.config import entry_point, instantiate
from dspec.errors import UserError
from dspec.lit_module import LitModule
from dspec.models.draft import Draft
from dspec.models.target import Target, check_bfloat16
from dspec.provenance import provenance
from dspec.terminal import quiet
from dspec.training import AtomicCheckpointIO, History, check_same_config, resume_checkpoint

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> None:
    """One run in Hydra's run folder."""
    quiet()
    choices = HydraConfig.get().runtime.choices
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if cfg.resume is not None:
        check_same_config(run_dir, plain)
    torch.set_num_threads(torch.get_num_threads())  # said once, MKL no longer picks its thread count by load
    L.seed_everything(cfg.seed, workers=True, verbose=False)

    target: Target = instantiate(cfg.target)
    data = instantiate(cfg.data, target=target)
    draft: Draft | None = instantiate(cfg.draft, target=target) if cfg.draft is not None else None
    parts = {"target": target} if draft is None else {"target": target, "draft": draft}
    method = instantiate(cfg.method, **parts)
    calibrate = instantiate(cfg.calibration)
    contenders, benchmarks = instantiate(cfg.decoder), instantiate(cfg.benchmark)
    evaluation, report = instantiate(cfg.evaluation), instantiate(cfg.report)
    if calibrate is not None:
        calibrate.check(draft)
    evaluation.check(target=target, contenders=contenders, benchmarks=benchmarks, policy=data.policy)
    write_json(run_dir / "config.json", plain)

    history = History()
    trainer: L.Trainer = instantiate(
        cfg.trainer,
        default_root_dir=str(run_dir),
        callbacks=[*instantiate(cfg.callbacks).values(), history],
        logger=instantiate(cfg.logger),
        plugins=[AtomicCheckpointIO()],
    )
    if "bf16" in str(trainer.precision) and trainer.strategy.root_device.type == "cpu":
        check_bfloat16()
    module = LitModule(method=method, **instantiate(cfg.optimizer), seed=cfg.seed)
    log.info("training %s against %s in %s", choices["method"], target.name, run_dir)
    trainer.fit(module, datamodule=data, ckpt_path=resume_checkpoint(run_dir) if cfg.resume is not None else None)
    if not trainer.is_global_zero:
        return
    if trainer.interrupted:
        raise UserError(f"interrupted; go on with the same command and resume={run_dir}")

    target.eval().to(trainer.strategy.root_device)
    method.eval()
    run = provenance(
        seed=cfg.seed, dtype=str(target.dtype).removeprefix("torch."), config=plain, prompt_policy=data.prompt_policy
    )
    calibration = None
    if draft is not None:
        draft.to(target.dtype)  # as it will be decoded with, and shipped
        draft.prompt_policy = data.prompt_policy
        if calibrate is not None:
            prompts = [ids for _, ids in data.encoded("calibration")]
            calibration = calibrate(target=target, draft=draft, prompts=prompts, stop_ids=target.stop_ids)
    method.export(run_dir, card=report.card(target=target.name, run=run, command=choices["recipe"]))
    run["benchmarks"] = {name: benchmark.source() for name, benchmark in benchmarks.items()}

    def results(rows: Any, check: Any, *, complete: bool) -> dict[str, Any]:
        return {"run": run | {"ar_check": check, "complete": complete}, "rows": rows, "calibration": calibration}

    rows, check = evaluation(
        target=target,
        draft=draft,
        contenders=contenders,
        benchmarks=benchmarks,
        policy=data.policy,
        stop_ids=target.stop_ids,
        samples=run_dir / "samples.jsonl",
        settings=plain | {"resume": None},
        grown=lambda rows, check: write_json(run_dir / "results.json", results(rows, check, complete=False)),
    )
    report(results=results(rows, check, complete=True), history=history.rows, run_dir=run_dir, logger=trainer.logger)


main = entry_point(config="train")(train)

if __name__ == "__main__":
    main()
