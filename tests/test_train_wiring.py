"""What the main job hands from stage to stage: what is calibrated is what is shipped and what decodes."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspec.calibration.stage import CalibrateSTS
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.train import main
from eval.evaluate import Evaluation

SMALL = [
    "recipe=dspark",
    "target.dtype=bfloat16",
    "trainer.precision=bf16-mixed",
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "data.source.train={problems: 8, functions: 0, stories: 0}",
    "data.source.calibration={problems: 8, functions: 0}",
    "data.regeneration.max_new_tokens=32",
    "data.validation=2",
    "data.batch_size=2",
    "calibration.max_new_tokens=48",
    "decoder=[autoregressive,speculative]",
    "benchmark.problems.count=1",
    "benchmark.functions.count=1",
    "evaluation.temperatures=[0.0]",
    "evaluation.generate_prompts=1",
    "evaluation.generate_floor=0",
    "evaluation.warmup=0",
    "callbacks.progress=null",
]


@pytest.mark.slow
def test_what_is_calibrated_is_what_is_shipped_and_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter trained in float32 against a bfloat16 target: rounding comes before the temperatures are fitted."""
    seen: dict[str, tuple[torch.dtype, dict[str, torch.Tensor]]] = {}

    def note(stage: str, target: LanguageModel, draft: Draft) -> None:
        seen[stage] = (target.dtype, {name: p.detach().clone() for name, p in draft.trainable().items()})

    class Calibrate(CalibrateSTS):
        def __call__(self, *, target: LanguageModel, draft: Draft, **rest: Any) -> dict[str, Any]:
            note("calibrated", target, draft)
            return super().__call__(target=target, draft=draft, **rest)

    class Evaluate(Evaluation):
        def __call__(self, *, target: LanguageModel, draft: Draft, **rest: Any) -> Any:
            note("decoded", target, draft)
            return super().__call__(target=target, draft=draft, **rest)

    recorders = ModuleType("recorders")
    recorders.Calibrate, recorders.Evaluate = Calibrate, Evaluate
    monkeypatch.setitem(sys.modules, "recorders", recorders)
    monkeypatch.setenv("DSPEC_CACHE", str(tmp_path / "cache"))
    targets = ["calibration._target_=recorders.Calibrate", "evaluation._target_=recorders.Evaluate"]
    monkeypatch.setattr(sys, "argv", ["dspec.train", *SMALL, *targets, f"hydra.run.dir={tmp_path / 'run'}"])
    main()
    shipped = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    assert seen.keys() == {"calibrated", "decoded"}
    for stage, (dtype, weights) in seen.items():
        assert dtype == torch.bfloat16, stage
        for name, weight in weights.items():
            assert weight.dtype == torch.bfloat16, (stage, name)
            assert torch.equal(weight, shipped[name].to(weight)), (stage, name)
