"""Jacobi Forcing: packing, the shift of labels and clean copies, the loss against plain passes, and each option."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspec.attention import masks
from dspec.errors import UserError
from dspec.jacobi_forcing import noise
from dspec.jacobi_forcing.packing import Trajectory, TrajectoryBatch, pack_trajectories, trajectory_batch
from dspec.jacobi_forcing.teachers import EMATeacher, FrozenTeacher, StopGradientTeacher
from dspec.method import Batch
from dspec.methods.jacobi_forcing import JacobiForcing, per_sample, per_token
from dspec.tuning import FullFineTuning

EXACT = {"rtol": 0, "atol": 1e-10}
CPU = torch.device("cpu")


def sample(rng: random.Random, *, n: int = 3, vocab: int = 11) -> Trajectory:
    """A sample whose last block may be short; states come nearer to the fixed point, some tokens right too early."""
    response = [rng.randrange(vocab) for _ in range(rng.randint(2, 4 * n))]
    blocks = []
    for begin in range(0, len(response), n):
        clean = response[begin : begin + n]
        states = [[*clean[:k], *(rng.randrange(vocab) for _ in clean[k:])] for k in range(len(clean))]
        blocks.append([*states, clean])
    return Trajectory.from_lists(
        [rng.randrange(vocab) for _ in range(rng.randint(1, 5))], response, blocks, block_size=n
    )


def samples(seed: int, count: int = 5) -> list[Trajectory]:
    rng = random.Random(seed)
    return [sample(rng) for _ in range(count)]


def chosen_states(batch: TrajectoryBatch, seed: int) -> Tensor:
    rng = random.Random(seed)
    return torch.tensor([rng.randrange(int(count)) for count in batch.count_N])


def method(of: Any, **changes: Any) -> JacobiForcing:
    settings: dict[str, Any] = {
        "schedule": noise.RandomSchedule(window=3), "distance": noise.divergent_suffix, "window": None,
        "teacher": StopGradientTeacher(),
        "tuning": FullFineTuning(interpolation=1.0), "normalisation": per_token, "consistency_weight": 1.0,
        "ar_weight": 1.0, "ar_on_prompt": False, "temperature": 1.0, "decay": None, "chunk_mb": 6e-4,
    }  # fmt: skip
    return JacobiForcing(target=of, **(settings | changes))


def generators(seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + row) for row in range(32)]


def hidden(of: Any, batch: TrajectoryBatch, ids: Tensor, window: int | None) -> Tensor:
    predicate = masks.noise_conditioned(batch.document_BL, batch.block_BL, batch.noisy_BL, window=window)
    return of(ids, positions_BL=batch.positions_BL, mask=predicate).hidden_BLD


def test_layout() -> None:
    one = Trajectory.from_lists([7, 8], [1, 2, 3, 4, 5], [[[9, 9, 9], [1, 2, 3]], [[4, 0], [4, 5]]], block_size=3)
    two = Trajectory.from_lists([6], [1, 2], [[[1, 2]]], block_size=3)
    batch = trajectory_batch([[one, two], [two]])
    assert batch.ids_BL[0].tolist() == [7, 8, 1, 2, 3, 1, 2, 3, 4, 5, 4, 5, 6, 1, 2, 1, 2]
    assert batch.positions_BL[0].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 5, 6, 0, 1, 2, 1, 2]
    assert batch.block_BL[0].tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, 0, 0, 0, 0]
    assert batch.noisy_BL[0].int().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert batch.supervised_BL[0].int().tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert batch.document_BL[0].tolist() == [0] * 12 + [1] * 5
    assert batch.document_BL[1].tolist() == [0] * 5 + [-1] * 12
    assert batch.clean_index_BL[0].tolist() == [0, 1, 5, 6, 7, 5, 6, 7, 10, 11, 10, 11, 12, 15, 16, 15, 16]
    assert batch.previous_index_BL[0].tolist() == [-1, 0, -1, -1, -1, 1, 5, 6, -1, -1, 7, 10, -1, -1, -1, 12, 15]
    assert batch.last_BL[0].nonzero()[:, 0].tolist() == [9, 11, 14, 16]
    assert batch.index_N.tolist() == [0, 1, 0, 0]
    assert batch.count_N.tolist() == [2, 2, 1, 1]
    assert batch.length_N.tolist() == [3, 2, 2, 2]
    noised = batch.with_states(torch.tensor([0, 0, 0, 0]))
    assert noised[0].tolist() == [7, 8, 9, 9, 9, 1, 2, 3, 4, 0, 4, 5, 6, 1, 2, 1, 2]
    assert torch.equal(batch.with_states(torch.tensor([1, 1, 0, 0])), batch.ids_BL)


def test_rows_are_filled_and_no_sample_is_cut() -> None:
    own = samples(0, 40)
    rows = pack_trajectories(own, row_length=40)
    assert sorted(map(id, own)) == sorted(id(s) for row in rows for s in row)
    lengths = [sum(s.packed_length for s in row) for row in rows]
    assert max(lengths) <= 40
    assert len(rows) < len(pack_trajectories(own, row_length=30))
    assert [len(row) for row in pack_trajectories(own, row_length=1)] == [1] * 40  # too long for a row: alone


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_clean_states_are_plain_ar_and_see_no_noise(toys: SimpleNamespace, seed: int, window: int | None) -> None:
    """Clean copies equal a plain causal pass over prompt and response, whatever the noisy copies show."""
    target = toys.target(toys.FAMILIES[seed], seed=seed)
    own = samples(seed, 4)
    batch = trajectory_batch(pack_trajectories(own, row_length=60))
    for draw in range(2):
        got = hidden(target, batch, batch.with_states(chosen_states(batch, draw)), window)
        checked = 0
        for row, members in enumerate(pack_trajectories(own, row_length=60)):
            for number, member in enumerate(members):
                mine = (batch.document_BL[row] == number) & ~batch.noisy_BL[row]
                plain = target(torch.tensor([[*member.prompt_P.tolist(), *member.response_R.tolist()]])).hidden_BLD[0]
                torch.testing.assert_close(got[row, mine], plain, **EXACT)
                checked += 1
        assert checked == 4


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_noisy_states_are_those_of_decoding(toys: SimpleNamespace, seed: int, window: int | None) -> None:
    """A noisy block equals a plain causal pass over what it may see: earlier blocks clean before its window, then
    noisy, then itself. Window 1 is one block in flight; no window is all of them in flight."""
    target = toys.target(toys.FAMILIES[seed], seed=seed)
    own = samples(seed + 10, 4)
    rows = pack_trajectories(own, row_length=60)
    batch = trajectory_batch(rows)
    chosen = chosen_states(batch, seed)
    got = hidden(target, batch, batch.with_states(chosen), window)
    for i, (k, j, row, place) in enumerate(
        zip(chosen.tolist(), batch.index_N.tolist(), batch.row_N.tolist(), batch.start_N.tolist(), strict=True)
    ):
        member = rows[row][int(batch.document_BL[row, place])]
        first = i - j  # the sample's block 0 among the batch's blocks
        begin = 0 if window is None else j // window * window
        text = [*member.prompt_P.tolist()]
        for b in range(j):
            text += member.blocks[b][int(chosen[first + b]) if b >= begin else -1]
        text += member.blocks[j][k]
        n = len(member.blocks[j][k])
        plain = target(torch.tensor([text])).hidden_BLD[0, -n:]
        torch.testing.assert_close(got[row, place : place + n], plain, **EXACT)


def naive(
    of: Any, own: list[Trajectory], chosen: list[list[int]], *, window: int | None, temperature: float, decay: float
) -> dict:
    """Sums over samples of KL and CE, sample by sample and token by token, from plain causal passes."""
    kl, kl_mean, ce, ce_prompt = (torch.zeros((), dtype=torch.float64) for _ in range(4))

    def logits_of(text: list[int]) -> Tensor:
        return of.logits(of(torch.tensor([text])).hidden_BLD[0])

    for member, states in zip(own, chosen, strict=True):
        clean = logits_of([*member.prompt_P.tolist(), *member.response_R.tolist()])
        P, T = len(member.prompt_P.tolist()), len(member.response_R.tolist())
        for t, token in enumerate([*member.prompt_P.tolist(), *member.response_R.tolist()]):
            if t:
                loss = F.cross_entropy(clean[t - 1], torch.tensor(token))
                ce_prompt = ce_prompt + loss
                ce = ce + (loss if t >= P else 0)
        at, sums = 0, torch.zeros((), dtype=torch.float64)
        for j, k in enumerate(states):
            begin = 0 if window is None else j // window * window
            text = list(member.prompt_P.tolist())
            for b in range(j):
                text += member.blocks[b][states[b] if b >= begin else -1]
            noisy = logits_of([*text, *member.blocks[j][k]])
            wrong = [a != b for a, b in zip(member.blocks[j][k], member.blocks[j][-1], strict=True)]
            for slot in range(len(member.blocks[j][k])):
                behind = max(0, slot - wrong.index(True)) if any(wrong) else 0
                if at < T - 1:  # behind a response's last token there is nothing to predict
                    p = (clean[P + at] / temperature).log_softmax(-1).detach()
                    q = (noisy[P + at] / temperature).log_softmax(-1)
                    sums = sums + math.exp(-behind / decay) * (p.exp() * (p - q)).sum()
                at += 1
        kl, kl_mean = kl + sums, kl_mean + sums / len(states)
    return {"kl": kl, "kl_mean": kl_mean, "ce": ce, "ce_prompt": ce_prompt}


@pytest.mark.parametrize("decay", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradient_equal_the_naive_ones(
    toys: SimpleNamespace, seed: int, window: int | None, decay: float | None
) -> None:
    """The shift included: place t of either copy predicts token t + 1, over block borders, up to the last token."""
    target = toys.target(toys.FAMILIES[seed], seed=seed)
    own = samples(seed + 20, 4)
    rows = pack_trajectories(own, row_length=60)
    batch, flat = trajectory_batch(rows), [s for row in rows for s in row]
    chosen = chosen_states(batch, seed)
    split = torch.split(chosen, [len(s.blocks) for s in flat])
    settings = {"window": window, "consistency_weight": 0.7, "ar_weight": 0.3, "temperature": 1.5, "decay": decay}
    own_method = method(target, **settings)
    result = own_method.loss_at(batch, chosen)
    states = [c.tolist() for c in split]
    expected = naive(target, flat, states, window=window, temperature=1.5, decay=decay or math.inf)
    parameters = list(target.model.parameters())
    total = 0.7 * expected["kl"] + 0.3 * expected["ce"]
    torch.testing.assert_close(result.loss_sum, total, rtol=0, atol=1e-9)
    assert int(result.weight) == sum(len(s.response_R) for s in own)
    for got, want in zip(
        torch.autograd.grad(result.loss_sum, parameters), torch.autograd.grad(total, parameters), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    paper = method(target, **settings, normalisation=per_sample, ar_on_prompt=True).loss_at(batch, chosen)
    total = 0.7 * expected["kl_mean"] + 0.3 * expected["ce_prompt"]
    torch.testing.assert_close(paper.loss_sum, total, rtol=0, atol=1e-9)
    assert int(paper.weight) == len(own)


def test_no_noise_no_consistency_loss(toys: SimpleNamespace) -> None:
    """With fixed points in the noisy copies the KL of the same pass is zero, in value and gradient."""
    target = toys.target(seed=3)
    batch = trajectory_batch(pack_trajectories(samples(3), row_length=60))
    result = method(target, ar_weight=0.0).loss_at(batch, batch.count_N - 1)
    assert abs(float(result.loss_sum.detach())) < 1e-12
    grads = torch.autograd.grad(result.loss_sum, list(target.model.parameters()))
    assert max(float(g.abs().max()) for g in grads) < 1e-12


def test_frozen_and_moving_teachers(toys: SimpleNamespace) -> None:
    """Bound, they give the student's loss; when the student moves, the frozen one stays and the mean follows."""
    batch = trajectory_batch(pack_trajectories(samples(4), row_length=60))
    chosen = chosen_states(batch, 0)

    def built(teacher: Any) -> JacobiForcing:
        return method(toys.target(seed=4, tie=True), teacher=teacher, ar_weight=0.0)

    same, frozen, moving = built(StopGradientTeacher()), built(FrozenTeacher()), built(EMATeacher(decay=0.75))
    first = [float(m.loss_at(batch, chosen).loss_sum.detach()) for m in (same, frozen, moving)]
    assert first[1] == pytest.approx(first[0], abs=1e-10)
    assert first[2] == pytest.approx(first[0], abs=1e-10)
    start = {name: p.detach().clone() for name, p in frozen.target.named_parameters()}
    for m in (same, frozen, moving):
        toys.randomise(m.target.model, seed=5, scale=0.5)
    base = toys.target(seed=4, tie=True)
    ids = batch.with_states(chosen)
    noisy = batch.noisy_BL & ~batch.last_BL
    clean_index = batch.clean_index_BL[noisy]
    row = noisy.nonzero()[:, 0]

    def expected(teacher: Any) -> float:
        student = frozen.target.logits(hidden(frozen.target, batch, ids, None)[noisy]).log_softmax(-1)
        log_probs = teacher.logits(hidden(teacher, batch, ids, None)[row, clean_index]).log_softmax(-1)
        return float((log_probs.exp() * (log_probs - student)).sum())

    assert float(frozen.loss_at(batch, chosen).loss_sum) == pytest.approx(expected(base), abs=1e-9)
    with torch.no_grad():  # the mean: three quarters of the start, one of the present
        for name, p in base.named_parameters():
            p.copy_(0.75 * start[name] + 0.25 * frozen.target.get_parameter(name))
    before = {name: b.clone() for name, b in moving.teacher.named_buffers()}
    moving.loss_at(batch, chosen)  # neither validation nor a micro-batch moves the mean, a step does
    assert all(torch.equal(before[name], b) for name, b in moving.teacher.named_buffers())
    moving.after_step()
    assert float(moving.loss_at(batch, chosen).loss_sum) == pytest.approx(expected(base), abs=1e-9)
    other = built(EMATeacher(decay=0.5))
    toys.randomise(other.target.model, seed=5, scale=0.5)
    other.after_step()
    assert float(other.loss_at(batch, chosen).loss_sum) != pytest.approx(expected(base), abs=1e-6)
    assert not frozen.state_dict().keys() & {f"teacher.{name}" for name, _ in frozen.teacher.named_buffers()}
    assert {f"teacher.{name}" for name, _ in moving.teacher.named_buffers()} <= moving.state_dict().keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": noise.Progressive(window=3)},
        {"schedule": noise.Reverse(window=3)},
        {"schedule": noise.AnyState()},
        {"schedule": noise.RandomSchedule(window=2)},
        {"distance": noise.hamming},
        {"window": 1},
        {"normalisation": per_sample},
        {"consistency_weight": 0.5},
        {"ar_weight": 0.5},
        {"ar_on_prompt": True},
        {"temperature": 2.0},
        {"decay": 1.0},
    ],
    ids=", ".join,
)
def test_every_option_changes_the_loss(toys: SimpleNamespace, changes: dict[str, Any]) -> None:
    batch = trajectory_batch(pack_trajectories(samples(6, 12), row_length=90))
    target = toys.target(seed=6)
    losses = [method(target, **c).loss(batch, generators=generators()) for c in ({}, {}, changes, {"chunk_mb": 1})]
    values = [float((x.loss_sum / x.weight).detach()) for x in losses]
    assert values[0] == values[1] != values[2]
    assert values[3] == pytest.approx(values[0], abs=1e-10)


def test_noise_metric_follows_the_schedule(toys: SimpleNamespace) -> None:
    batch = trajectory_batch(pack_trajectories(samples(6, 12), row_length=90))
    target = toys.target(seed=6)
    clean = method(target, schedule=noise.Progressive(window=1)).loss(batch, generators=generators())
    total, count = clean.metrics["noise"]
    assert (float(total), int(count)) == (0, len(batch.count_N))
    drawn = method(target).loss(batch, generators=generators()).metrics["noise"]
    assert 0.2 < float(drawn[0] / drawn[1]) < 0.6


def test_refusals(toys: SimpleNamespace) -> None:
    target = toys.target()
    for changes, message in (
        ({"window": 0}, "method.window"),
        ({"temperature": 0.0}, "method.temperature"),
        ({"decay": 0.0}, "method.decay"),
    ):
        with pytest.raises(UserError, match=message):
            method(target, **changes)
    plain = Batch(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(UserError, match="recipe=jacobi_forcing"):
        method(target).loss(plain, generators=generators())  # type: ignore[arg-type]
