"""Schedules: against brute force and the paper's Algorithm 1 as written, on curves of every shape."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspec.serving.scheduling import (
    Floats,
    Ints,
    admit,
    capacity,
    convex,
    drafting_pays,
    increasing,
    not_free,
    oracle,
    static,
    survival,
    synchronous,
    threshold,
    throughput,
)


def random_survival(rng: np.random.Generator, R: int, J: int) -> Floats:
    return survival(rng.beta(3, 1.5, (R, J)), rng.integers(0, J + 1, R))


def theta(survival_RJ: Floats, lengths: Sequence[int], seconds_K: Floats) -> float:
    gain = sum(survival_RJ[r, :n].sum() for r, n in enumerate(lengths))
    return float((len(lengths) + gain) / seconds_K[sum(lengths)])


def best(survival_RJ: Floats, seconds_K: Floats) -> float:
    """Over all length vectors that verify no draft which cannot be accepted."""
    useful = [range(np.count_nonzero(row) + 1) for row in survival_RJ]
    return max(theta(survival_RJ, n, seconds_K) for n in itertools.product(*useful))


def algorithm_1(survival_RJ: Floats, seconds_K: Floats) -> list[int]:
    """The paper's loop, line by line."""
    R, J = survival_RJ.shape
    candidates = sorted(
        ((r, j) for r in range(R) for j in range(J) if survival_RJ[r, j] > 0),
        key=lambda c: (-survival_RJ[c], c),
    )
    lengths, tau, batch = [0] * R, float(R), 0
    top = R / seconds_K[0]
    for r, j in candidates:
        lengths[r], batch, tau = j + 1, batch + 1, tau + survival_RJ[r, j]
        if tau / seconds_K[batch] > top:
            top = tau / seconds_K[batch]
        else:
            lengths[r] = j
            break
    return lengths


CURVES = {
    "linear": lambda K: 1 + 0.1 * K,
    "convex": lambda K: 1 + 0.01 * K**2,
    "knee": lambda K: np.maximum(1.0, 0.25 * K),
    "flat": lambda K: np.ones(len(K)),
    "staircase": lambda K: 1 + 0.6 * (K // 4),
    "concave": lambda K: 1 + 0.5 * np.sqrt(K),
    "falling": lambda K: 1 + 1 / (1 + 0.05 * K),
    "bump": lambda K: 1 + 0.05 * K + 0.5 * (K == 1),
}
UNIMODAL = ("linear", "convex", "knee", "flat", "falling")


def curve(name: str, R: int, J: int) -> Floats:
    return np.asarray(CURVES[name](np.arange(R * J + 1)), dtype=float)


@pytest.mark.parametrize("name", UNIMODAL)
def test_algorithm_1_is_optimal_on_unimodal_curves(name: str) -> None:
    """Brute force over all length vectors."""
    rng = np.random.default_rng(0)
    for R, J in [(1, 4), (2, 3), (3, 3), (4, 2)]:
        seconds = curve(name, R, J)
        for _ in range(6):
            a = random_survival(rng, R, J)
            lengths = synchronous(a, seconds)
            assert theta(a, lengths.tolist(), seconds) == pytest.approx(best(a, seconds), rel=1e-12)


@pytest.mark.parametrize("name", CURVES)
def test_the_global_search_is_optimal_on_any_curve(name: str) -> None:
    rng = np.random.default_rng(1)
    for R, J in [(1, 4), (2, 3), (3, 3), (4, 2)]:
        seconds = curve(name, R, J) * rng.uniform(0.97, 1.03, R * J + 1)
        for _ in range(6):
            a = random_survival(rng, R, J)
            lengths = admit(a, capacity(a, seconds))
            assert theta(a, lengths.tolist(), seconds) == pytest.approx(best(a, seconds), rel=1e-12)


@pytest.mark.parametrize("name", CURVES)
def test_synchronous_is_algorithm_1_as_written(name: str) -> None:
    rng = np.random.default_rng(2)
    for R, J in [(1, 7), (3, 4), (8, 7), (40, 7)]:
        noisy = curve(name, R, J) * rng.uniform(0.98, 1.02, R * J + 1)
        for a in (random_survival(rng, R, J), random_survival(rng, R, J).round(1)):  # rounded: with ties
            for seconds in (curve(name, R, J), noisy):
                assert synchronous(a, seconds).tolist() == algorithm_1(a, seconds)


confidences = st.integers(1, 5).flatmap(
    lambda R: st.integers(1, 5).flatmap(
        lambda J: st.lists(
            st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0, float("nan")]), min_size=J, max_size=J),
            min_size=R,
            max_size=R,
        )
    )
)


@settings(max_examples=80, deadline=None)
@given(confidences, st.data())
def test_what_holds_of_every_schedule(rows: list[list[float]], data: st.DataObject) -> None:
    """Prefixes of what was drafted, the K largest, the same for requests in another order; NaN is never verified."""
    c = np.array(rows)
    R, J = c.shape
    count = np.array(data.draw(st.lists(st.integers(0, J), min_size=R, max_size=R)))
    a = survival(c, count)
    assert (np.diff(a, axis=1) <= 0).all()
    usable = np.count_nonzero(a)
    seconds = np.array(
        data.draw(st.lists(st.sampled_from([1.0, 1.1, 1.5, 2.0]), min_size=R * J + 1, max_size=R * J + 1))
    )
    order = np.array(data.draw(st.permutations(range(R))))
    for K in range(R * J + 2):
        lengths = admit(a, K)
        assert lengths.sum() == min(K, usable)
        assert (lengths <= count).all()
        chosen = np.arange(J) < lengths[:, None]
        assert a[chosen].sum() == pytest.approx(np.sort(a, axis=None)[::-1][:K].sum())
        assert not np.isnan(np.where(chosen, c, 0)).any()
    assert capacity(a, seconds) == capacity(a[order], seconds) <= usable
    assert synchronous(a, seconds).sum() == synchronous(a[order], seconds).sum() <= usable
    distinct = a + np.linspace(0, 1e-6, R)[:, None] * (a > 0)  # without ties between requests
    assert (synchronous(distinct, seconds)[order] == synchronous(distinct[order], seconds)).all()


def test_ties_keep_the_order_of_slots() -> None:
    """Sure drafts (c = 1) tie within their request: a later one before an earlier one would not be a prefix."""
    a = survival(np.array([[0.5, 1.0, 1.0], [0.5, 1.0, 0.2]]), np.array([3, 3]))
    assert [admit(a, K).tolist() for K in range(7)] == [
        [0, 0], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2], [3, 3],
    ]  # fmt: skip


def test_a_draft_that_changes_nothing_is_not_verified() -> None:
    """Equal throughput: the fewer tokens."""
    seconds = np.array([1.0, 1.5, 1.75])
    a = np.array([[0.5, 0.25]])
    assert throughput(a[0], 1, seconds).tolist() == [1.0, 1.0, 1.0]
    assert synchronous(a, seconds).tolist() == [0]
    assert capacity(a, seconds) == 0


def test_static_and_threshold() -> None:
    c, count = np.array([[0.9, 0.2, 0.9], [0.5, 0.6, 0.7]]), np.array([3, 2])
    assert static(count, 2).tolist() == [2, 2]
    assert static(count, 5).tolist() == [3, 2]
    assert threshold(c, count, 0.5).tolist() == [1, 2]
    assert threshold(np.array([[np.nan, 0.9]]), np.array([2]), 0.5).tolist() == [0]


@pytest.mark.parametrize("name", CURVES)
def test_no_schedule_beats_the_oracle(name: str) -> None:
    rng = np.random.default_rng(3)
    for R, J in [(1, 4), (3, 3)]:
        seconds = curve(name, R, J)
        for _ in range(5):
            accepted = rng.integers(0, J + 1, R)

            def emitted(lengths: Ints | tuple[int, ...], accepted: Ints = accepted) -> float:
                return float(len(accepted) + np.minimum(lengths, accepted).sum())

            lengths = oracle(accepted, J, seconds)
            assert (lengths <= accepted).all()
            got = emitted(lengths) / seconds[lengths.sum()]
            every = itertools.product(*(range(n + 1) for n in accepted))
            assert got == pytest.approx(max(emitted(n) / seconds[sum(n)] for n in every))


# ---- curves as they are measured


def test_increasing_is_the_nearest_that_never_falls() -> None:
    rng = np.random.default_rng(4)
    for _ in range(12):
        raw = rng.uniform(0, 1, 5).round(1)
        fit = increasing(raw)
        assert (np.diff(fit) >= 0).all()
        grid = np.linspace(0, 1, 11)
        least = min(((np.array(c) - raw) ** 2).sum() for c in itertools.combinations_with_replacement(grid, 5))
        assert ((fit - raw) ** 2).sum() <= least + 1e-12
        assert fit.sum() == pytest.approx(raw.sum())
    steps = curve("staircase", 3, 4)
    assert (increasing(steps) == steps).all()


def test_convex_is_the_greatest_below() -> None:
    rng = np.random.default_rng(5)
    for n in (1, 2, 3, 9, 30):
        raw = rng.uniform(1, 2, n)
        hull = convex(raw)
        assert (np.diff(hull, 2) >= -1e-12).all()
        assert (hull <= raw + 1e-12).all()
        assert (hull[0], hull[-1]) == (raw[0], raw[-1])
        for k in range(n):  # by definition: the lowest chord over k
            chords = [raw[i] + (raw[j] - raw[i]) * (k - i) / max(j - i, 1) for i in range(k + 1) for j in range(k, n)]
            assert hull[k] == pytest.approx(min(chords))


def planned(raw: Floats, R: int) -> tuple[Floats, Floats]:
    """As the synchronous scheduler reads a measured curve."""
    never_free = not_free(increasing(raw), R, 0.05)
    return never_free, convex(never_free)


@pytest.mark.parametrize("R", [1, 4, 16])
def test_a_flat_curve_does_not_verify_everything(R: int) -> None:
    """Every draft above 0 pays on it; those that almost surely fail are left out, those likely to pass are not."""
    a = survival(np.tile([0.95, 0.9, 0.9, 0.01, 0.9, 0.9, 0.9], (R, 1)), np.full(R, 7))
    raw = np.ones(7 * R + 1)
    assert capacity(a, raw) == 7 * R  # what pins SGLang at verify-all
    assert admit(a, capacity(a, not_free(raw, R, 0.05))).tolist() == [3] * R
    assert synchronous(a, *planned(raw, R)).tolist() == [3] * R


@pytest.mark.parametrize("R", [1, 4, 16])
def test_a_bump_or_a_first_expensive_token_does_not_pin_it_to_nothing(R: int) -> None:
    """As from one row per pass to several: the break alone stops before the first draft."""
    a = survival(np.full((R, 7), 0.8), np.full(R, 7))
    K = np.arange(7 * R + 1)
    for raw in (1 + 0.9 * (K > 0) + 0.01 * K / R, 1 + 0.02 * K / R + 0.9 * (K == 1)):
        assert synchronous(a, raw).sum() == 0
        got = theta(a, synchronous(a, *planned(raw, R)).tolist(), raw)
        assert got > 2 * R / raw[0]
        assert got > 0.99 * theta(a, admit(a, capacity(a, raw)).tolist(), raw)


def test_a_tile_that_is_paid_for_is_filled() -> None:
    """Time by tiles of four tokens: the convex curve alone stops inside one."""
    a = survival(np.array([[0.95, 0.9, 0.9, 0.9, 0.8, 0.7, 0.05]]), np.array([7]))
    raw = np.array([1.0, 1.0, 1.0, 1.0, 1.6, 1.6, 1.6, 1.6])
    real, hull = planned(raw, 1)
    assert synchronous(a, hull).tolist() == [5]
    assert synchronous(a, real, hull).tolist() == [6]  # the seventh would be free, but hardly ever passes


@pytest.mark.parametrize("slope", [0.01, 0.2, 1.5])
def test_noise_in_the_table_costs_little(slope: float) -> None:
    """5 % of noise per probe; throughput is counted on the true curve."""
    rng = np.random.default_rng(6)
    lost: dict[str, list[float]] = {"synchronous": [], "asynchronous": [], "raw break": []}
    for R in (1, 8, 32):
        K = np.arange(7 * R + 1)
        true = 1 + slope * K / R
        for _ in range(20):
            a = survival(rng.beta(4, 1, (R, 7)), np.full(R, 7))
            raw = true * rng.uniform(0.95, 1.05, len(K))
            top = theta(a, admit(a, capacity(a, true)).tolist(), true)
            plans = {
                "synchronous": synchronous(a, *planned(raw, R)),
                "asynchronous": admit(a, capacity(a, not_free(increasing(raw), R, 0.05))),
                "raw break": synchronous(a, raw),
            }
            for name, lengths in plans.items():
                lost[name].append(1 - theta(a, lengths.tolist(), true) / top)
    means = {name: float(np.mean(values)) for name, values in lost.items()}
    print(slope, means)
    assert means["synchronous"] < 0.02
    assert means["asynchronous"] < 0.02
    assert slope > 1 or means["raw break"] > 0.15


def test_not_free_changes_nothing_that_costs_enough() -> None:
    raw = 1 + 0.1 * np.arange(29)
    assert not_free(raw, 4, 0.05) == pytest.approx(raw)
    flat = not_free(np.full(29, 2.0), 4, 0.05)
    assert flat == pytest.approx(2 * (np.arange(4, 33) / 4) ** 0.05)


def test_whether_drafting_pays() -> None:
    """It counts what drafting costs: a step without it is cheaper than one that verifies nothing of it."""
    recent, K = np.array([[0.5, 0.25]]), np.arange(2 * 8 + 1)
    seconds = 1.0 + 0.2 + 0.01 * K  # 0.2 of it drafting
    assert drafting_pays(recent, 8, seconds, 1.0)  # 8 * 1.75 / 1.36 = 10.3 against 8
    assert not drafting_pays(recent, 8, 1.0 + 0.8 + 0.01 * K, 1.0)  # 14 / 1.96 = 7.1
    assert not drafting_pays(np.zeros((1, 2)), 8, seconds, 1.0)
    assert not drafting_pays(np.zeros((1, 2)), 8, np.ones(len(K)), 1.0)  # a tie does not pay


def test_drafts_that_differ_pay_where_their_mean_does_not() -> None:
    """Of two requests one has sure drafts, one has none: 2 of 4 tokens are verified for 2 more of the step's time."""
    seconds = 1.0 + 0.45 * np.arange(2 * 2 + 1)
    assert drafting_pays(np.array([[1.0, 1.0], [0.0, 0.0]]), 2, seconds, 1.05)  # 4 / 1.9 = 2.1 against 1.9
    assert not drafting_pays(np.array([[0.5, 0.5]]), 2, seconds, 1.05)  # at best 2 / 1


def test_recent_drafts_are_scaled_to_the_requests_in_flight() -> None:
    """It turns exactly at the best theta of as many requests, however many rows tell of their drafts."""
    rows_NJ = random_survival(np.random.default_rng(3), 16, 3)
    seconds = 1.0 + 0.02 * np.arange(16 * 3 + 1)
    gains = np.concatenate([[0.0], np.sort(rows_NJ, axis=None)[::-1].cumsum()])
    theta = ((16 + gains) / seconds)[1:].max()
    assert theta > 16
    for rows in (rows_NJ, np.tile(rows_NJ, (4, 1))):
        assert drafting_pays(rows, 16, seconds, 16 / theta * 1.001)
        assert not drafting_pays(rows, 16, seconds, 16 / theta * 0.999)


def test_256_requests_are_scheduled_as_fast_as_they_are_sorted() -> None:
    """No loop over candidates: calls of numpy, however many requests."""
    import sys

    calls = []
    a = random_survival(np.random.default_rng(7), 256, 7)
    seconds = curve("linear", 256, 7)
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        synchronous(a, seconds)
    finally:
        sys.setprofile(None)
    assert len(calls) < 200
