"""The LightningModule on a toy method: the loss it steps on, the randomness of a step, warm-up, and pooling over ranks.

Ranks are played in this process here: `all_gather` gives what the other ones gave at the same call.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader

from dspec.method import Batch, LossOutput, Method
from dspec.training.lit_module import LitModule

RATE = 0.5
ACCEPT = [0.5, 0.8, 0.25]


def rows(numbers: Tensor) -> Batch:
    """A batch whose rows hold a number each."""
    return Batch(numbers[:, None], torch.ones(len(numbers), 1, dtype=torch.bool))


class Weighted(Method):
    """loss_sum = sum (w x)^2 over a batch x of n numbers, weight n; draws one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.drawn: list[float] = []
        self.row_numbers: list[int] = []

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        x = batch.ids_BL[:, 0]
        self.row_numbers += batch.row_numbers
        self.drawn += [torch.rand((), generator=g).item() for g in generators]
        count = torch.tensor(float(len(x)), dtype=torch.float64)
        accepted = torch.tensor(ACCEPT, dtype=torch.float64) * 10
        metrics = {
            "size": (x.detach().sum(), count),
            "accept": (accepted, torch.full((3,), 10.0, dtype=torch.float64)),
        }
        return LossOutput((self.w * x).square().sum(), count, metrics)

    def derived(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"all_accepted": values["accept"].prod()}

    def export(self, folder: Path, *, card: str) -> Path:
        return folder


def module(method: Method | None = None, *, seed: int = 0, warmup: float = 0.0, cycles: int = 1) -> LitModule:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE)

    return LitModule(method=method or Weighted(), optimizer=sgd, warmup=warmup, cycles=cycles, seed=seed)


def on_rank(rank: int = 0, *, ranks: int = 1) -> LitModule:
    """A module without a real trainer, one of `ranks`; `logged` holds what it logs."""
    lit = module()
    lit.trainer = lit.stub = SimpleNamespace(world_size=ranks, global_rank=rank)  # `trainer` is a weak reference
    lit.logged = {}
    lit.log = lambda name, value, *args, **kwargs: lit.logged.update({name: float(value)})
    return lit


def batches(count: int, *, sizes: int) -> DataLoader:
    data = [torch.arange(1.0, 2 + i % sizes, dtype=torch.float64) for i in range(count)]  # one number, two, ...
    return DataLoader([rows(x) for x in data], batch_size=None)


class Watch(L.Callback):
    """The learning rate of each step, and what was logged after it."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.logged.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def trained(
    lit: LitModule, folder: Path, *, steps: int, every: int = 1, sizes: int = 3, resume: str | None = None
) -> tuple[Watch, L.Trainer]:
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=every,
        callbacks=[watch],
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(lit, batches(60, sizes=sizes), ckpt_path=resume, weights_only=False)
    return watch, trainer


# ---- the method's hooks


class Numbers(L.LightningDataModule):
    """Its rows exist once it is set up."""

    def setup(self, stage: str) -> None:
        self.rows = [[1], [2]]

    def train_dataloader(self) -> DataLoader:
        return batches(4, sizes=2)


def test_a_method_begins_with_the_data_once_before_the_first_step(tmp_path: Path) -> None:
    class Begun(Weighted):
        def begin(self, data: Any) -> None:
            begun.append((data.rows, float(self.w)))

    begun: list[tuple[list[list[int]], float]] = []
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=2, default_root_dir=str(tmp_path), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    lit = module(Begun())
    trainer.fit(lit, datamodule=Numbers())
    assert begun == [([[1], [2]], 1.0)]
    assert float(lit.method.w) != 1.0


# ---- the loss


def test_a_step_follows_the_loss_divided_by_its_weight(tmp_path: Path) -> None:
    """Batches of 1, 2 and 3 numbers: each one's mean counts, whatever its size."""
    lit = module()
    watch, _ = trained(lit, tmp_path, steps=1)
    assert watch.logged[0]["train/loss"] == pytest.approx(1.0)
    assert lit.method.w.item() == pytest.approx(1 - RATE * 2 * 1.0)
    for size in (1, 3):
        lit = on_rank()
        x = torch.arange(1.0, size + 1, dtype=torch.float64)
        loss = lit.training_step(rows(x), 0)
        loss.backward()
        assert loss.item() == pytest.approx(x.square().mean().item())
        assert lit.method.w.grad.item() == pytest.approx(2 * x.square().mean().item())


def test_an_unsupervised_batch_has_no_loss() -> None:
    """weight 0: nothing to divide by, and no NaN in the weights."""
    lit = on_rank()
    loss = lit.training_step(rows(torch.zeros(0, dtype=torch.float64)), 0)
    loss.backward()
    assert loss.item() == lit.method.w.grad.item() == 0


def test_slots_and_what_the_method_derives_are_logged(tmp_path: Path) -> None:
    watch, _ = trained(module(), tmp_path, steps=1)
    (logged,) = watch.logged
    assert [logged[f"train/accept_{k}"] for k in range(3)] == pytest.approx(ACCEPT)
    assert logged["train/all_accepted"] == pytest.approx(0.5 * 0.8 * 0.25)


# ---- randomness of a step


def test_every_batch_draws_anew(tmp_path: Path) -> None:
    """Micro-batches of one optimizer step too; the same seed draws the same, another seed other numbers."""
    runs = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        method = Weighted()
        trained(module(method, seed=seed), tmp_path, steps=4, every=3)
        runs[name] = method.drawn
    assert len(runs["first"]) == 24  # twelve batches of one to three rows
    assert len({*runs["first"], *runs["other"]}) == 48
    assert runs["first"] == runs["again"]


def test_a_resumed_run_draws_what_an_unbroken_one_draws(tmp_path: Path) -> None:
    whole = Weighted()
    trained(module(whole), tmp_path, sizes=1, steps=6)
    first, second = Weighted(), Weighted()
    _, trainer = trained(module(first), tmp_path, sizes=1, steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    trained(module(second), tmp_path, sizes=1, steps=6, resume=str(tmp_path / "two.ckpt"))
    assert first.drawn + second.drawn == whole.drawn
    assert len(set(whole.drawn)) == 6


def test_ranks_draw_different_numbers() -> None:
    drawn = []
    for rank in range(3):
        lit = on_rank(rank)
        for batch in range(4):
            lit.training_step(rows(torch.ones(1, dtype=torch.float64)), batch)
        drawn += lit.method.drawn
    assert len(set(drawn)) == 12


def test_ranks_draw_what_one_rank_draws_for_their_rows() -> None:
    """Row r of a rank is row r * ranks + rank of the batch of all together (data/loaders.py shares rows out so)."""
    alone = on_rank()
    for batch in range(3):
        alone.training_step(rows(torch.ones(6, dtype=torch.float64)), batch)
    ranks = [on_rank(rank, ranks=2) for rank in range(2)]
    for lit in ranks:
        lit.all_gather = lambda value: torch.stack([value, value])
        for batch in range(3):
            lit.training_step(rows(torch.ones(3, dtype=torch.float64)), batch)
    for batch in range(3):
        for row in range(6):
            assert alone.method.drawn[6 * batch + row] == ranks[row % 2].method.drawn[3 * batch + row // 2]


def test_rows_are_numbered_over_batches_and_ranks() -> None:
    """Consecutively, so that a sequence over row numbers covers ranks and accumulated batches evenly. Each validation
    begins anew."""
    ranks = [on_rank(rank, ranks=2) for rank in range(2)]
    for lit in ranks:
        lit.all_gather = lambda value: torch.stack([value, value])
        for _ in range(4):
            lit.training_step(rows(torch.ones(3, dtype=torch.float64)), 0)
        for _ in range(2):
            lit.validation_step(rows(torch.ones(3, dtype=torch.float64)), 0)
            lit.validation_step(rows(torch.ones(3, dtype=torch.float64)), 1)
            lit.on_validation_epoch_end()
    together = [ranks[row % 2].method.row_numbers[3 * batch + row // 2] for batch in range(8) for row in range(6)]
    assert together == [*range(24), *range(12), *range(12)]


def test_a_rank_with_fewer_rows_numbers_as_the_others_do() -> None:
    """Four rows in the first batch of validation, five in the second, the last one: three and two."""
    for rank, numbers in enumerate(([0, 2, 4, 6, 8], [1, 3, 5, 7])):
        lit = on_rank(rank, ranks=2)
        for number, counts in enumerate(([2.0, 2.0], [3.0, 2.0])):
            lit.all_gather = lambda value, counts=counts: torch.tensor(counts)
            lit.validation_step(rows(torch.ones(int(counts[rank]), dtype=torch.float64)), number)
        assert lit.method.row_numbers == numbers


def test_validation_draws_the_same_numbers_each_time() -> None:
    """Curves of val/ would else move with the anchors; and they are not those of a training batch."""
    lit = on_rank()
    batch, drawn = rows(torch.ones(1, dtype=torch.float64)), lit.method.drawn
    for _ in range(2):
        for number in range(3):
            lit.validation_step(batch, number)
        for number in range(4):
            lit.training_step(batch, number)
    first, second = drawn[:7], drawn[7:]
    assert first[:3] == second[:3]
    assert len({*first, *second}) == 3 + 2 * 4


# ---- warm-up and cosines


def _expected(step: int, *, warmup: int, steps: int, cycles: int) -> float:
    if step < warmup:
        return RATE * step / warmup
    share = (step - warmup) / (steps - warmup)
    return RATE * 0.5 * (1 + math.cos(math.pi * (share * cycles % 1)))


@pytest.mark.parametrize(("warmup", "cycles"), [(0.0, 1), (0.4, 1), (0.2, 2)])
def test_warm_up_then_cosines(tmp_path: Path, warmup: float, cycles: int) -> None:
    """`warmup` is a share of optimizer steps, not of micro-batches."""
    lit = module(warmup=warmup, cycles=cycles)
    watch, _ = trained(lit, tmp_path, steps=10, every=2)
    expected = [_expected(step, warmup=round(warmup * 10), steps=10, cycles=cycles) for step in range(10)]
    assert watch.rates[::2] == pytest.approx(expected)
    assert watch.rates[1::2] == pytest.approx(expected)
    assert max(expected) == RATE


# ---- ranks


def _in_step(parts: Sequence[Tensor], step: Callable[[LitModule, Tensor], None]) -> list[LitModule]:
    """The ranks' modules after each took a step on its part, in two runs: the first one hears what each rank gives to
    `all_gather`, the second one answers it with what all gave."""

    def run(answer: Callable[[int, list[Tensor]], Tensor]) -> tuple[list[LitModule], list[list[Tensor]]]:
        ranks, given = [on_rank(rank, ranks=len(parts)) for rank in range(len(parts))], []
        for rank, (lit, part) in enumerate(zip(ranks, parts, strict=True)):
            given.append(said := [])

            def all_gather(value: Tensor, *args: Any, rank: int = rank, said: list[Tensor] = said) -> Tensor:
                said.append(value)
                return answer(rank, said)

            lit.all_gather = all_gather
            step(lit, part)
        return ranks, given

    _, heard = run(lambda rank, said: torch.stack([said[-1]] * len(parts)))
    ranks, given = run(lambda rank, said: torch.stack([other[len(said) - 1] for other in heard]))
    torch.testing.assert_close(given, heard, rtol=0, atol=0)
    return ranks


PARTS = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([5.0], dtype=torch.float64)]
WHOLE = torch.cat(PARTS)


def test_two_ranks_step_like_one_on_both_batches() -> None:
    """DDP takes the mean of the ranks' gradients; it must be that of the ratio of the sums, not the mean of ratios."""
    ranks = _in_step(PARTS, lambda lit, part: lit.training_step(rows(part), 0).backward())
    gradients = [lit.method.w.grad.item() for lit in ranks]
    assert sum(gradients) / len(ranks) == pytest.approx(2 * WHOLE.square().mean().item())
    for lit in ranks:
        assert lit.logged["train/loss"] == pytest.approx(WHOLE.square().mean().item())
        assert lit.logged["train/size"] == pytest.approx(WHOLE.mean().item())
        assert lit.logged["train/accept_1"] == pytest.approx(ACCEPT[1])


def _validated(lit: LitModule, *parts: Tensor) -> None:
    for number, part in enumerate(parts):
        lit.validation_step(rows(part), number)
    lit.on_validation_epoch_end()


def test_two_ranks_validate_like_one() -> None:
    for lit in _in_step(PARTS, _validated):
        assert lit.logged["val/loss"] == pytest.approx(WHOLE.square().mean().item())
        assert lit.logged["val/size"] == pytest.approx(WHOLE.mean().item())


def test_batches_of_validation_are_pooled_by_their_counts() -> None:
    """A batch of three rows counts three times one of a single row; the next validation begins at nothing."""
    lit = on_rank()
    for _ in range(2):
        _validated(lit, *PARTS)
        assert lit.logged["val/size"] == pytest.approx(WHOLE.mean().item())
        assert lit.logged["val/all_accepted"] == pytest.approx(0.5 * 0.8 * 0.25)
