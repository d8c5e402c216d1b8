"""What a run evaluates is what it has written, to the last bit, for every method that trains a target."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.jacobi_forcing import noise
from dspec.jacobi_forcing.teachers import StopGradientTeacher
from dspec.masked_diffusion.answers import AnswerLayout
from dspec.masked_diffusion.noise import BlockRates
from dspec.method import Method
from dspec.methods.ar_base import ARBase
from dspec.methods.as_arm import ASARM, MaskRate
from dspec.methods.d2f import D2F
from dspec.methods.jacobi_forcing import JacobiForcing, per_token
from dspec.methods.masked_diffusion import MaskedDiffusion
from dspec.models.language_model import LanguageModel, embedded_target, load_language_model
from dspec.training import stages
from dspec.training.models import Models
from dspec.tuning import FullFineTuning, LoRA

IDS = torch.tensor([[5, 3, 8, 1, 9, 30, 200]])


def _full() -> FullFineTuning:
    return FullFineTuning(interpolation=0.7)


def _lora() -> LoRA:
    return LoRA(rank=2, alpha=4, modules="all-linear", interpolation=0.7)


def _ar_base(target: LanguageModel) -> Method:
    return ARBase(target=target, chunk_mb=1)


def _as_arm(tuning: Callable[[], Any]) -> Callable[[LanguageModel], Method]:
    rate = MaskRate(low=[0.1, 0.1], high=[0.9, 0.9], steps=0)
    return lambda target: ASARM(
        target=target, tuning=tuning(), rate=rate, order="sorted", first_visible=True, draft_depth=1,
        normalisation="per_token", chunk_mb=1,
    )  # fmt: skip


def _jacobi(tuning: Callable[[], Any]) -> Callable[[LanguageModel], Method]:
    return lambda target: JacobiForcing(
        target=target, schedule=noise.AnyState(), distance=noise.hamming, window=None, teacher=StopGradientTeacher(),
        tuning=tuning(), normalisation=per_token, consistency_weight=1.0, ar_weight=1.0, ar_on_prompt=False,
        temperature=1.0, decay=None, chunk_mb=1,
    )  # fmt: skip


def _masked_diffusion(target: LanguageModel) -> Method:
    return MaskedDiffusion(
        target=target, tuning=_full(), layout=AnswerLayout(block_size=4, tail_blocks=0, tail_rows=1),
        rates=BlockRates(schedule="constant", low=0.1, high=1.0), shift=True, chunk_mb=1,
    )  # fmt: skip


def _d2f(target: LanguageModel) -> Method:
    return D2F(
        target=target, tuning=_lora(), layout=AnswerLayout(block_size=4, tail_blocks=0, tail_rows=1),
        rates=BlockRates(schedule="monotone", low=0.2, high=0.7), kl="student_teacher", weight="none", eos_blocks=True,
        shift=True, chunk_mb=1,
    )  # fmt: skip


def _changed(method: Method) -> Callable[..., None]:
    """Stands for training: float32 masters whose changes bfloat16 cannot hold."""

    @torch.no_grad()
    def fit(module: Any, **unused: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for p in method.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 2e-3)

    return fit


def _finished(method: Method, models: Models, folder: Path) -> None:
    """The stages from training on, as a run goes through them."""
    job: Any = SimpleNamespace(
        models=models, method=method, module=method, data=None, config={"resume": None}, run_dir=folder,
        device=torch.device("cpu"), recipe=None, report=SimpleNamespace(card=lambda **said: "a card"),
        trainer=SimpleNamespace(fit=_changed(method), is_global_zero=True),
    )  # fmt: skip
    models.setup(job.trainer, method, "fit")  # type: ignore[arg-type]
    stages.train(job)
    stages.export(job, run={})


@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "written"),
    [
        (_ar_base, "bfloat16"),
        (_as_arm(_full), "bfloat16"),
        (_as_arm(_lora), "bfloat16"),
        (_jacobi(_full), None),  # as loaded
        (_jacobi(_lora), None),
        (_masked_diffusion, "bfloat16"),
        (_d2f, "bfloat16"),
    ],
    ids=["ar_base", "as_arm", "as_arm-lora", "jacobi_forcing", "jacobi_forcing-lora", "masked_diffusion", "d2f"],
)
def test_what_is_evaluated_is_what_is_written(
    make: Callable[[LanguageModel], Method], written: str | None, loaded: str, tmp_path: Path
) -> None:
    target = embedded_target(dtype=loaded, device="cpu")
    before = target.model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    models = Models(target=target, draft=None)
    _finished(make(target), models, tmp_path)
    evaluated = target.model.state_dict()
    assert {w.dtype for w in evaluated.values()} == {getattr(torch, loaded)}
    assert not torch.equal(evaluated["model.layers.0.mlp.up_proj.weight"], before)

    folder = tmp_path / "target"
    assert json.loads((folder / "config.json").read_text())["dtype"] == (written or loaded)
    own = {"path": str(folder), "name": "t", "device": "cpu", "mask_token": None}
    again = load_language_model(**own, dtype=loaded)
    assert again.mask_token_id == target.mask_token_id
    stored = load_language_model(**own, dtype=written or loaded).model.state_dict()
    assert evaluated.keys() == again.model.state_dict().keys() == stored.keys()
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, evaluated[name])
        assert torch.equal(stored[name].to(weight.dtype), weight)
    with torch.no_grad():
        assert torch.equal(target(IDS).hidden_BLD, again(IDS).hidden_BLD)  # what no state dict holds: rotary, norms
    assert (folder / "README.md").read_text() == "a card"
