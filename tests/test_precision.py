"""bfloat16 targets learn in float32 masters, and what cannot work together is refused before anything runs."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from dspec.devices import local_device
from dspec.errors import UserError
from dspec.jacobi_forcing.teachers import EMATeacher, FrozenTeacher
from dspec.method import Batch, Method
from dspec.methods.ar_base import ARBase
from dspec.models.language_model import LanguageModel, embedded_target
from dspec.training.checks import check_trainer
from dspec.training.models import float32_masters
from dspec.tuning import FullFineTuning, LoRA


def _batch(seed: int) -> Batch:
    ids = torch.randint(40, (4, 24), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool))


def _ar_base(target: LanguageModel) -> ARBase:
    return ARBase(target=target, chunk_mb=1)


def test_small_steps_move_a_bfloat16_target(toys: SimpleNamespace) -> None:
    """20 AdamW steps at 1e-5: of bfloat16 weights 95 % would not change (finding 2)."""
    target = toys.target(hidden=64, vocab=41, scale=0.05, dtype=torch.bfloat16)
    method = _ar_base(target)
    float32_masters(method)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-5, weight_decay=0.0)
    for step in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            output = method.loss(_batch(step), generators=[])
        optimizer.zero_grad()
        (output.loss_sum / output.weight).backward()
        optimizer.step()
    same = sum(int((before[name] == p).sum()) for name, p in target.named_parameters())
    total = sum(p.numel() for p in target.parameters())
    assert same / total < 0.05


@pytest.mark.parametrize(
    "tuning",
    [FullFineTuning(interpolation=1.0), LoRA(rank=2, alpha=4, modules="all-linear", interpolation=1.0)],
    ids=["full", "lora"],
)
def test_what_is_trained_is_float32_what_is_frozen_stays(toys: SimpleNamespace, tuning: Any) -> None:

    target = toys.target(dtype=torch.bfloat16)
    tuning.prepare(target)
    float32_masters(target.model)
    dtypes = {p.requires_grad: p.dtype for p in target.parameters()}
    assert dtypes[True] == torch.float32
    assert dtypes.get(False, torch.bfloat16) == torch.bfloat16
    double = toys.target(dtype=torch.float64)
    float32_masters(double.requires_grad_(True))
    assert double.dtype == torch.float64


class _Mixed(Method):
    """Trains its first part."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(2, 2, dtype=d) for d in dtypes)
        self.parts[1:].requires_grad_(False)

    def loss(self, batch: Any, *, generators: Any) -> Any:
        raise AssertionError

    def export(self, folder: Any, *, card: str) -> Any:
        raise AssertionError


def _trainer(**settings: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)


@pytest.mark.slow
def test_precisions_that_cannot_work_are_refused() -> None:
    one, two = _Mixed(torch.float32), _Mixed(torch.float32, torch.bfloat16)
    check_trainer(_trainer(precision="32-true"), _Mixed(torch.bfloat16))  # all of it is trained, in float32
    with pytest.raises(UserError, match="bf16-mixed"):  # adapters in the dtype of the weights beside them
        check_trainer(_trainer(precision="32-true"), _Mixed(torch.bfloat16, torch.bfloat16))
    check_trainer(_trainer(precision="32-true"), one)
    check_trainer(_trainer(precision="bf16-mixed"), two)
    with pytest.raises(UserError, match=r"bfloat16 and float32.*bf16-mixed.*target\.dtype=float32"):
        check_trainer(_trainer(precision="32-true"), two)
    with pytest.raises(UserError, match=r"bf16-true has no float32 master weights"):
        check_trainer(_trainer(precision="bf16-true"), one)


def test_float16_is_refused() -> None:
    trainer: Any = SimpleNamespace(
        strategy=SingleDeviceStrategy(torch.device("cpu")), precision="16-mixed", world_size=1, num_nodes=1
    )
    with pytest.raises(UserError, match="16-mixed loses small gradients"):
        check_trainer(trainer, _Mixed(torch.float32))


def test_strategies_that_shard_are_refused() -> None:
    trainer = SimpleNamespace(strategy=SimpleNamespace())
    with pytest.raises(UserError, match=r"SimpleNamespace is not supported.*strategy=ddp"):
        check_trainer(trainer, _Mixed(torch.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize("teacher", [FrozenTeacher(), EMATeacher(decay=0.5)], ids=["frozen", "moving"])
def test_what_teachers_and_interpolation_keep_of_a_bfloat16_target_is_float32(
    toys: SimpleNamespace, teacher: Any
) -> None:
    """A moving average in bfloat16 would stand still, as weights would (finding 2)."""
    target = toys.target(dtype=torch.bfloat16)
    tuning = FullFineTuning(interpolation=0.5)
    tuning.prepare(target)
    teacher.bind(target)
    kept = [*teacher.buffers(), *tuning._before.values()]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    before = target.lm_head.weight.detach().float()
    float32_masters(target.model)
    with torch.no_grad():
        target.lm_head.weight.add_(2**-12)  # less than bfloat16 holds beside most weights
    tuning.merge(target)
    torch.testing.assert_close(target.lm_head.weight.detach(), before + 2**-13, rtol=0, atol=1e-7)


def test_each_process_of_a_machine_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [local_device(name) for name in ("cpu", "cuda", "cuda:3")] == ["cpu", "cuda:0", "cuda:3"]
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert local_device("cuda") == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device("cuda") == "cuda:1"


@pytest.mark.parametrize(("count", "own"), [(1, "cuda:0"), (2, "cuda:1"), (4, "cuda:3")])
def test_a_process_that_sees_fewer_gpus_than_its_rank_takes_one_of_them(
    count: int, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may show each of a machine's tasks one GPU, which then has number 0, whatever the task's local rank."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert local_device("cuda") == own


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("tpu", r"target\.device=tpu is unknown to torch: use cpu, cuda or cuda:<number>"),
        (None, r"target\.device=null is unknown to torch"),
        ("", r"target\.device= is unknown to torch"),
        ("cuda:x", r"target\.device=cuda:x is unknown to torch"),
        ("cudax", r"target\.device=cudax is unknown to torch"),
        ("meta", r"target\.device=meta: torch cannot use it here"),
        ("xla", r"target\.device=xla: torch cannot use it here"),
        ("cuda:2", r"target\.device=cuda:2: torch sees 2 GPU\(s\) here"),
    ],
)
def test_a_device_that_cannot_be_used_is_named(device: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match=words) as raised:
        embedded_target(dtype="bfloat16", device=device)
    assert "\n" not in str(raised.value)
