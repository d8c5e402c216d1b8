"""Builds and runs one evaluation as conf/eval.yaml (or speed.yaml) describes it: eval/run.py is its command,
eval/evaluate.py does the decoding and judging."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from data.chat import PromptPolicy
from dspec.atomic import write_json
from dspec.config.checks import check_blocks
from dspec.config.compose import check_decoders, instantiate, instantiate_decoders
from dspec.config.run_folder import remember_command
from dspec.config.types import check_types
from dspec.provenance import provenance
from dspec.terminal import quiet
from eval.benchmarks.base import Benchmark
from eval.checkpoints import checkpoint_of, fill_in
from eval.decoders import DecoderSpec, build_ar, only_diffusion
from eval.evaluate import Evaluation
from eval.load import LoadedModel, load_model
from eval.results import AR

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation ran and measured; `results` is the content of results.json.
    `policy` is the checkpoint's, else the config's."""

    loaded: LoadedModel
    policy: PromptPolicy
    specs: dict[str, DecoderSpec]
    benchmarks: Mapping[str, Benchmark]
    evaluation: Evaluation
    results: dict[str, Any]


def run_evaluation(cfg: DictConfig, benchmarks: Mapping[str, Benchmark], run_dir: Path) -> EvaluationResult:
    """Runs the decoders of `cfg`, and plain AR unless all are those of diffusion LMs or all `benchmarks` have holes to
    fill. samples.jsonl and results.json grow in `run_dir`."""
    quiet()
    torch.set_num_threads(torch.get_num_threads())  # once set, MKL no longer picks its thread count by load
    check_types(cfg)
    named = instantiate_decoders(cfg)
    check_decoders(
        named if only_diffusion(named.values()) else {AR: _plain_ar(), **named},
        drafter=cfg.checkpoint is not None,
        without="set checkpoint=<run folder>",
    )
    evaluation = instantiate(cfg.evaluation)
    fill_in(cfg)
    check_blocks(cfg)
    loaded = load_model(target=cfg.target, checkpoint=checkpoint_of(cfg), layout=cfg.layout)
    target = loaded.target
    policy: PromptPolicy = loaded.policy or instantiate(cfg.policy)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    specs = instantiate_decoders(cfg)
    left_to_right = any(not item.infills for b in benchmarks.values() for item in b.items()[:1])
    if AR not in specs and left_to_right and not only_diffusion(specs.values()):
        specs = {AR: _plain_ar(), **specs}
    log.info("evaluating %s in %s", target.name, run_dir)
    dtype = str(target.dtype).removeprefix("torch.")
    results = evaluation(
        target=target,
        draft=loaded.draft,
        specs=specs,
        benchmarks=benchmarks,
        policy=policy,
        stop_ids=target.stop_ids,
        folder=run_dir,
        run=provenance(seed=cfg.seed, dtype=dtype, config=plain, prompt_policy=policy.to_dict(target.tokenizer)),
        calibration=None,
        settings={key: value for key, value in plain.items() if key not in ("resume", "limit", "logger")},
        on_start=lambda: remember_command(cfg),
    )
    write_json(run_dir / "config.json", plain)
    return EvaluationResult(loaded, policy, specs, benchmarks, evaluation, results)


def _plain_ar() -> DecoderSpec:
    return DecoderSpec(label="AR", build=build_ar)
