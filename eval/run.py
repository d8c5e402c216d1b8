"""Evaluates a checkpoint of dspec, or any Hugging Face target, with any decoders on any benchmarks.

    python -m eval.run target=smollm2_135m decoder=autoregressive benchmark=gsm8k limit=50
    python -m eval.run checkpoint=runs/dspark/<time> decoder=speculative benchmark=[gsm8k,humaneval]

Leaves results.json (in the form of the main job), samples.jsonl and plots in its run folder; plain AR always runs
beside the other decoders. `resume=<folder>` goes on after a kill. It wires what the config names.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from data.chat import PromptPolicy
from dspec.atomic import write_json
from dspec.config import entry_point, instantiate
from dspec.decoding import factory
from dspec.errors import UserError
from dspec.models.checkpoint import from_pretrained
from dspec.models.draft import Draft
from dspec.models.target import Target, load_target
from dspec.provenance import provenance
from dspec.train import quiet
from eval.benchmarks.base import Benchmark
from eval.evaluate import BASELINE, Contender, Evaluation

log = logging.getLogger(__name__)


def draft_folder(checkpoint: Path) -> Path | None:
    """Where the drafter of a run folder (or the folder of a drafter itself) is; None for a run of an AR base."""
    if not checkpoint.is_dir():
        raise UserError(f"no checkpoint at {checkpoint}: give a run folder, or a drafter's folder with config.json")
    if (checkpoint / "draft").is_dir():
        return checkpoint / "draft"
    if (checkpoint / "target").is_dir():
        return None
    if not (checkpoint / "model.safetensors").is_file():
        raise UserError(f"{checkpoint} holds neither draft/ nor target/ nor model.safetensors: did its run finish?")
    return checkpoint


def run_config(checkpoint: Path | None) -> dict[str, Any]:
    """The composed config of the run that made `checkpoint`; {} for a foreign drafter or none."""
    for folder in [] if checkpoint is None else [checkpoint, checkpoint.parent]:
        path = folder / "config.json"
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            if "method" in config and "target" in config:
                return dict(config)
    return {}


def build_target(node: DictConfig | None, checkpoint: Path | None, stored: dict[str, Any]) -> Target:
    """What `target=` says, else the target that the checkpoint was trained against (or is)."""
    if node is not None:
        return instantiate(node)
    if checkpoint is None:
        raise UserError("nothing to evaluate: say target=<name>, checkpoint=<run folder>, or both")
    if (checkpoint / "target").is_dir():
        own = stored["target"]
        path = str(checkpoint / "target")
        return load_target(
            path=path, name=path, dtype=own["dtype"], device=own.get("device", "cpu"), mask_token_id=None
        )
    if "target" not in stored:
        raise UserError(f"{checkpoint} does not say which target it belongs to: add target=<name>")
    return instantiate(OmegaConf.create(stored["target"]))


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a target, its drafter if there is one, and how chat prompts are put to it."""

    target: Target
    draft: Draft | None
    label: str
    policy: PromptPolicy


def load_subject(cfg: DictConfig) -> Subject:
    """What `target`, `checkpoint`, `layout`, `label` and `policy` of conf/eval.yaml say; raises UserError."""
    checkpoint = Path(cfg.checkpoint).expanduser() if cfg.checkpoint is not None else None
    folder = draft_folder(checkpoint) if checkpoint is not None else None
    stored = run_config(checkpoint)
    target = build_target(cfg.get("target"), checkpoint, stored)
    draft = from_pretrained(folder, target=target, layout=cfg.layout) if folder is not None else None
    label = cfg.label or stored.get("label") or (folder.name if folder is not None else "draft")
    trained = (stored.get("data") or {}).get("policy") or (draft.prompt_policy if draft is not None else {})
    policy = (
        PromptPolicy(system=trained["system"], thinking=trained["thinking"]) if trained else instantiate(cfg.policy)
    )
    return Subject(target, draft, label, policy)


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation ran and found; `results` is what results.json holds."""

    subject: Subject
    contenders: dict[str, Contender]
    benchmarks: dict[str, Benchmark]
    evaluation: Evaluation
    results: dict[str, Any]


def measure(cfg: DictConfig, run_dir: Path) -> Evaluated:
    """Runs what `cfg` (conf/eval.yaml or speed.yaml) names; plain AR comes along."""
    quiet()
    torch.set_num_threads(torch.get_num_threads())  # said once, MKL no longer picks its thread count by load
    if "benchmark" not in cfg:
        raise UserError("nothing to evaluate on: say benchmark=<name> or benchmark=[<name>,...]; --help lists them")
    subject = load_subject(cfg)
    target, cfg.label = subject.target, subject.label
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    contenders = instantiate(cfg.decoder)
    if BASELINE not in contenders:
        contenders = {BASELINE: Contender(method="AR", build=factory.autoregressive), **contenders}
    benchmarks, evaluation = instantiate(cfg.benchmark), instantiate(cfg.evaluation)
    write_json(run_dir / "config.json", plain)
    log.info("evaluating %s in %s", target.name, run_dir)
    rows, check = evaluation(
        target=target,
        draft=subject.draft,
        contenders=contenders,
        benchmarks=benchmarks,
        policy=subject.policy,
        stop_ids=target.stop_ids,
        samples=run_dir / "samples.jsonl",
        settings=plain | {"resume": None},
    )
    dtype = str(target.dtype).removeprefix("torch.")
    run = provenance(seed=cfg.seed, dtype=dtype, config=plain, prompt_policy=subject.policy.to_dict(target.tokenizer))
    sources = {name: benchmark.source() for name, benchmark in benchmarks.items()}
    results = {"run": run | {"ar_check": check, "benchmarks": sources}, "rows": rows, "calibration": None}
    return Evaluated(subject, contenders, benchmarks, evaluation, results)


def evaluate(cfg: DictConfig) -> None:
    """One evaluation in Hydra's run folder."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    done = measure(cfg, run_dir)
    instantiate(cfg.report)(results=done.results, history=[], run_dir=run_dir)


main = entry_point(config="eval")(evaluate)

if __name__ == "__main__":
    main()
