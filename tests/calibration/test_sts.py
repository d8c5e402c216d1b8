"""Sequential Temperature Scaling on synthetic rounds whose true temperatures are known."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspec.calibration.sts import (
    Traces,
    calibration_report,
    cross_validated_gain,
    expected_calibration_error,
    fit_sts,
    temperature_grid,
)
from dspec.models.temperatures import calibrated_confidence, read_sts

BINS = 20
TRUE = torch.tensor([1.5, 0.5, 2.5, 0.8, 1.25, 2.0, 0.6], dtype=torch.float64)
GRID = temperature_grid(low=0.125, high=8.0, points=101)  # neighbours differ by 4.2 %


def simulate(seed: int, true_T: torch.Tensor, rounds: int = 50_000) -> Traces:
    """Rounds with P(token k accepted | the first k - 1 were) = sigmoid(z_k / T*_k).

    z / T* has one spread at every slot: with z itself of one spread, a slot with T* = 0.5 has almost all its
    probabilities at 0 or 1, where no temperature is visible. The shared part (hard and easy rounds) keeps
    survivors at late slots (0.37 at slot 7).
    """
    rng = torch.Generator().manual_seed(seed)
    shared, own = (torch.randn(rounds, n, generator=rng, dtype=torch.float64) for n in (1, len(true_T)))
    true_logits = 2.0 + shared + 0.7 * own
    draws = torch.rand(rounds, len(true_T), generator=rng, dtype=torch.float64)
    accepted = (draws < true_logits.sigmoid()).long().cumprod(1).sum(1)
    return Traces(true_logits * true_T, accepted, torch.full((rounds,), len(true_T)))


def naive_ece(probabilities: list[float], outcomes: list[float], bins: int) -> float:
    total, pairs = 0.0, list(zip(probabilities, outcomes, strict=True))
    for b in range(bins):
        inside = [(p, y) for p, y in pairs if b / bins <= p < (b + 1) / bins or p == 1.0 == (b + 1) / bins]
        total += abs(sum(p - y for p, y in inside)) / len(pairs)
    return total


def naive_fit(traces: Traces, grid: list[float], bins: int) -> list[float]:
    def product(row: int, temperatures: list[float]) -> float:
        logits = traces.logits_NK[row, : len(temperatures)].tolist()
        return math.prod(1 / (1 + math.exp(-z / t)) for z, t in zip(logits, temperatures, strict=True))

    fitted: list[float] = []
    for k in range(traces.logits_NK.shape[1]):
        rows = [i for i in range(len(traces.valid_N)) if traces.valid_N[i] > k]
        outcomes = [float(traces.accepted_N[i] > k) for i in rows]
        errors = {t: naive_ece([product(i, [*fitted, t]) for i in rows], outcomes, bins) for t in grid}
        fitted.append(min(grid, key=lambda t: (round(errors[t], 12), abs(math.log(t)))))
    return fitted


def naive_auc(score: torch.Tensor, outcome: torch.Tensor) -> float:
    pairs = list(itertools.product(score[outcome == 1].tolist(), score[outcome == 0].tolist()))
    return float(sum((high > low) + 0.5 * (high == low) for high, low in pairs) / len(pairs))


def tiny(seed: int = 0, rounds: int = 40, slots: int = 3) -> Traces:
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rounds, slots, generator=rng, dtype=torch.float64) + 1
    accepted, valid = (torch.randint(0, slots + 1, (rounds,), generator=rng) for _ in range(2))
    return Traces(logits, accepted, valid)


@pytest.mark.parametrize("seed", range(5))
def test_recovers_every_temperature(seed: int) -> None:
    true_T = TRUE[torch.randperm(len(TRUE), generator=torch.Generator().manual_seed(100 + seed))]
    fitted = fit_sts(simulate(seed, true_T), grid=GRID, bins=BINS)
    assert (fitted / true_T - 1).abs().max() < 0.10, (fitted, true_T)


def test_fit_is_sglangs_to_the_last_digit() -> None:
    """Its grid, bins and traces; the temperatures that its own fit wrote."""
    golden = Path(__file__).parent.parent / "golden" / "sts"
    shards, written = load_file(golden / "traces.safetensors"), json.loads((golden / "sts.json").read_text())
    accepted = shards["prefix_mask"].long().sum(1)
    logits = shards["logits"].double()
    traces = Traces(logits, accepted, torch.full_like(accepted, logits.shape[1]))
    fitted = fit_sts(traces, grid=torch.logspace(-1, 1, 41).double(), bins=15)
    assert fitted.tolist() == written["temperatures"] == list(read_sts(golden / "sts.json").temperatures)
    slots = calibration_report(traces, fitted, bins=15)["slots"]
    for when in ("before", "after"):
        assert [slot[f"ece_{when}"] for slot in slots] == pytest.approx(written[f"ece_{when}"], abs=1e-6)


def test_report_on_held_out_rounds() -> None:
    fit, held_out = simulate(11, TRUE).split(fractions=[0.5, 0.5], seed=0)
    report = calibration_report(held_out, fit_sts(fit, grid=GRID, bins=BINS), bins=BINS)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["mean_ece_after"] < 0.012 < 0.035 < report["mean_ece_before"]
    for k, slot in enumerate(report["slots"]):
        assert (slot["slot"], slot["valid"]) == (k + 1, 25_000)
        assert slot["ece_after"] < 0.6 * slot["ece_before"]
        assert slot["auc_slot_after"] == slot["auc_slot_before"]
        assert (slot["auc_cumulative_after"] == slot["auc_cumulative_before"]) == (k == 0)


def test_report_agrees_with_naive_numbers() -> None:
    traces, temperatures = tiny(seed=4), torch.tensor([0.5, 2.0, 3.0])
    report = calibration_report(traces, temperatures, bins=5)
    confidence = calibrated_confidence(traces.logits_NK, temperatures.double())
    for k, slot in enumerate(report["slots"]):
        rows = traces.valid_N > k
        product, outcome = confidence[rows, : k + 1].prod(1), (traces.accepted_N[rows] > k).double()
        reached = traces.accepted_N[rows] >= k
        assert slot["valid"] == int(rows.sum())
        assert slot["ece_after"] == pytest.approx(naive_ece(product.tolist(), outcome.tolist(), 5))
        assert slot["auc_cumulative_after"] == pytest.approx(naive_auc(product, outcome))
        assert slot["auc_slot_after"] == pytest.approx(naive_auc(confidence[rows, k][reached], outcome[reached]))
        curve = slot["curve_after"]
        for b, count in enumerate(curve["count"]):
            inside = (product >= b / 5) & (product < (b + 1) / 5)
            assert (count, curve["centre"][b]) == (int(inside.sum()), pytest.approx(0.2 * b + 0.1))
            for name, values in (("predicted", product), ("observed", outcome)):
                assert curve[name][b] == (pytest.approx(values[inside].mean().item()) if count else None)


def test_auc_survives_saturated_scores() -> None:
    """sigmoid(z / T) rounds to exactly 1 from z / T = 37 on; the ranking must not."""
    logits = torch.tensor([[50.0], [60.0], [70.0], [80.0]])
    traces = Traces(logits, torch.tensor([0, 0, 1, 1]), torch.ones(4).long())
    slot = calibration_report(traces, torch.tensor([0.25]), bins=BINS)["slots"][0]
    assert slot["auc_slot_before"] == slot["auc_slot_after"] == 1.0


@pytest.mark.parametrize("accepted", [0, 2])
def test_degenerate_slots_have_no_auc(accepted: int) -> None:
    traces = Traces(torch.randn(3, 2), torch.full((3,), accepted), torch.tensor([1, 1, 1]))
    report = calibration_report(traces, torch.ones(2), bins=BINS)
    first, second = report["slots"]
    assert first["auc_slot_after"] is first["auc_cumulative_after"] is None
    assert (second["valid"], second["ece_after"], second["auc_slot_after"]) == (0, None, None)
    assert set(second["curve_after"]["observed"]) == {None}
    assert report["mean_ece_after"] == first["ece_after"] > 0


@pytest.mark.parametrize("rounds", [1, 50, 3000])
@pytest.mark.parametrize("bins", [1, 7, 20])
def test_ece_equals_naive(rounds: int, bins: int) -> None:
    rng = torch.Generator().manual_seed(rounds + bins)
    p, y = torch.rand(rounds, generator=rng, dtype=torch.float64), torch.rand(rounds, generator=rng) < 0.3
    p[0] = 1.0
    expected = naive_ece(p.tolist(), y.double().tolist(), bins)
    assert expected_calibration_error(p, y, bins=bins) == pytest.approx(expected, abs=1e-12)


def test_ece_by_hand() -> None:
    p, y = torch.tensor([0.1, 0.2, 0.9, 1.0]), torch.tensor([0, 1, 1, 1])
    assert expected_calibration_error(p, y, bins=2) == pytest.approx(0.5 * 0.35 + 0.5 * 0.05)


@pytest.mark.parametrize("seed", range(6))
def test_fit_equals_exhaustive_search(seed: int) -> None:
    traces, grid = tiny(seed), temperature_grid(low=0.2, high=5.0, points=15)
    assert fit_sts(traces, grid=grid, bins=5).tolist() == naive_fit(traces, grid.tolist(), 5)


def test_fit_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = simulate(2, TRUE, rounds=1000)
    whole = fit_sts(traces, grid=GRID, bins=BINS)
    monkeypatch.setattr("dspec.calibration.sts._CHUNK", 37)
    assert torch.equal(fit_sts(traces, grid=GRID, bins=BINS), whole)


def test_masked_slots_are_never_read() -> None:
    full = simulate(3, TRUE, rounds=4000)
    valid = torch.randint(0, 8, (4000,), generator=torch.Generator().manual_seed(0))
    masked = Traces(full.logits_NK, full.accepted_N, valid)
    fitted = fit_sts(masked, grid=GRID, bins=BINS)
    garbage = full.logits_NK.masked_fill(torch.arange(7) >= valid[:, None], math.nan)
    accepted = torch.where(full.accepted_N >= valid, 7 - (7 - valid) // 2, full.accepted_N)  # differs behind only
    assert not torch.equal(accepted, full.accepted_N)
    perturbed = Traces(garbage, accepted, valid)
    assert torch.equal(fit_sts(perturbed, grid=GRID, bins=BINS), fitted)
    assert calibration_report(perturbed, fitted, bins=BINS) == calibration_report(masked, fitted, bins=BINS)
    assert not torch.equal(fit_sts(full, grid=GRID, bins=BINS), fitted)


def test_ties_go_to_the_temperature_nearest_one() -> None:
    """At z = 0 every temperature predicts 0.5: the ECE is flat."""
    traces = Traces(torch.zeros(10, 2), torch.tensor([0, 1, 2] * 3 + [1]), torch.full((10,), 2))
    assert fit_sts(traces, grid=torch.tensor([4.0, 0.25, 1.0, 1.5]), bins=BINS).tolist() == [1.0, 1.0]


def test_grid_is_log_spaced_and_holds_one() -> None:
    assert len(GRID) == 101
    assert (GRID == 1.0).sum() == 1
    assert GRID.log().tolist() == pytest.approx([math.log(8) * (i / 50 - 1) for i in range(101)])
    assert temperature_grid(low=0.99, high=20.0, points=3).tolist() == pytest.approx([0.99, 1.0, 20.0])


def test_split_is_disjoint_complete_and_keeps_groups() -> None:
    rounds = torch.arange(1000)
    traces = Traces(rounds[:, None].double(), torch.zeros(1000).long(), torch.ones(1000).long())
    parts = traces.split(fractions=[0.2, 0.3, 0.5], seed=1, group_N=rounds // 10)
    ids = [part.logits_NK[:, 0].long() for part in parts]
    assert [len(i) for i in ids] == [200, 300, 500]
    assert torch.equal(torch.cat(ids).sort().values, rounds)
    assert sum(len(set((i // 10).tolist())) for i in ids) == 100  # no group in two parts
    assert torch.equal(Traces.cat(parts).logits_NK[:, 0].long().sort().values, rounds)
    for seed in (1, 2):
        again = traces.split(fractions=[0.2, 0.3, 0.5], seed=seed, group_N=rounds // 10)
        assert torch.equal(again[0].logits_NK, parts[0].logits_NK) == (seed == 1)
    assert [len(part.valid_N) for part in traces.split(fractions=[0.25, 0.75], seed=0)] == [250, 750]


ZERO = torch.zeros(2).long()
Z = torch.zeros(2, 3)
SHORT = Traces(torch.zeros(1, 3), torch.tensor([0]), torch.tensor([1]))
ERRORS: list[tuple[str, Callable[[], object]]] = [
    (r"float \[N, K\]", lambda: Traces(Z[0], ZERO, ZERO)),
    (r"float \[N, K\]", lambda: Traces(Z.long(), ZERO, ZERO)),
    ("accepted_N must be an int", lambda: Traces(Z, ZERO[:1], ZERO)),
    (r"accepted_N must lie in 0\.\.3", lambda: Traces(Z, ZERO + 4, ZERO)),
    ("valid_N must be an int", lambda: Traces(Z, ZERO, ZERO.float())),
    (r"valid_N must lie in 0\.\.3", lambda: Traces(Z, ZERO, ZERO - 1)),
    ("NaN or inf at a valid", lambda: Traces(Z / 0, ZERO, ZERO + 1)),
    ("the same K", lambda: Traces.cat([tiny(slots=2), tiny(slots=3)])),
    ("sum to 1", lambda: tiny().split(fractions=[0.5, 0.6], seed=0)),
    ("group_N", lambda: tiny().split(fractions=[0.5, 0.5], seed=0, group_N=torch.arange(3))),
    ("low < 1 < high", lambda: temperature_grid(low=1.0, high=2.0, points=10)),
    (r"contains 1\.0", lambda: fit_sts(tiny(), grid=torch.tensor([0.5, 2.0]), bins=BINS)),
    (r"contains 1\.0", lambda: fit_sts(tiny(), grid=torch.tensor([-1.0, 1.0]), bins=BINS)),
    (r"slots \[2, 3\]", lambda: fit_sts(SHORT, grid=GRID, bins=BINS)),
    ("3 positive temperatures", lambda: calibration_report(tiny(), torch.ones(2), bins=BINS)),
    ("non-empty", lambda: expected_calibration_error(Z[0, :0], Z[0, :0], bins=BINS)),
    (r"\[0, 1\]", lambda: expected_calibration_error(Z[0] + 1.5, Z[0], bins=BINS)),
]


@pytest.mark.parametrize(("message", "call"), ERRORS)
def test_errors_name_the_fix(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def folds_of(traces: Traces) -> list[Traces]:
    return traces.split(fractions=[0.2] * 5, seed=0)


def test_cross_validation_tells_miscalibration_from_noise() -> None:
    ones = torch.ones(len(TRUE), dtype=torch.float64)
    wrong = cross_validated_gain(folds_of(simulate(3, TRUE, 10_000)), grid=GRID, bins=BINS)
    right = [cross_validated_gain(folds_of(simulate(s, ones, 10_000)), grid=GRID, bins=BINS) for s in range(4)]
    print(wrong, right)
    assert wrong > 0.01
    assert max(right) < 0.001
    with pytest.raises(ValueError, match="2 folds"):
        cross_validated_gain([tiny()], grid=GRID, bins=BINS)
