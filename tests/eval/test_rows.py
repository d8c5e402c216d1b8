"""Counting, acceptance, paired speedups and their intervals."""

import math
import random
import statistics
from collections.abc import Sequence

from dspec.decoding.base import Generation, Pass
from eval.rows import acceptance, bootstrap, counts, paired_speedups, row, wilson
from eval.samples import Sample


def Round(drafted: int, accepted: int, valid: int) -> Pass:  # noqa: N802  the tests' shorthand
    return Pass("verify", drafted=drafted, accepted=accepted, valid=valid)


PREFILL = Pass("prefill", 1)


def generation(tokens: int, rounds: Sequence[Pass]) -> Generation:
    return Generation(list(range(tokens)), passes=[PREFILL, *rounds])


def test_counts_follow_the_definitions() -> None:
    first = generation(8, [Round(3, 3, 3), Round(3, 2, 3)])  # 1 + 4 + 3
    second = generation(3, [Round(3, 0, 3), Round(3, 0, 3)])
    got = counts([first, second])
    assert got["tau"] == got["tpf"] == (7 + 2) / 4
    assert got["tau_prompt_mean"] == (7 / 2 + 2 / 2) / 2
    assert got["tpf_with_prefill"] == 11 / 6
    assert (got["nfe"], got["nfe_prefill"], got["tokens"]) == (6, 2, 11)


def test_plain_ar_is_exactly_one() -> None:
    plain = Generation([1, 2, 3], passes=[PREFILL, *[Pass("decode", 1)] * 2])
    assert counts([plain]) | {"tau": None} == counts([plain])
    assert counts([plain])["tpf"] == 1
    assert acceptance([plain]) is None


def test_acceptance_leaves_cut_slots_out() -> None:
    rounds = [Round(3, 3, 3), Round(3, 1, 3), Round(3, 1, 1), Round(3, 0, 2)]
    got = acceptance([generation(9, rounds)])
    assert got == {"conditional": [3 / 4, 1 / 2, 1.0], "prefix_survival": [3 / 4, 1 / 3, 1 / 2]} | {
        "counted": [4, 3, 2],
        "reached": [4, 2, 1],
    }


def sample(tokens: int, seconds: float, *, batch: int, right: bool = True, rounds: int = 1) -> Sample:
    return Sample(
        benchmark="b", temperature=0.0, decoder="d", batch=batch, id=str(batch), prompt_sha256="", text="",
        verdicts={"right": right},
        generation=generation(tokens, [Round(3, 1, 3)] * rounds), seconds=seconds,
    )  # fmt: skip


def test_speeds_are_paired_by_batch() -> None:
    """A batch's seconds are shared: its tokens are pooled, and its seconds count once."""
    base = [sample(10, 2.0, batch=0), sample(30, 2.0, batch=0), sample(10, 1.0, batch=1)]
    fast = [sample(10, 1.0, batch=0), sample(30, 1.0, batch=0), sample(10, 0.2, batch=1)]
    assert paired_speedups(fast, base) == [2.0, 5.0]
    got = row(fast, base, base, quality="right", greedy=True, seed=0)
    assert got["speedup"] == 3.5
    assert math.isclose(got["tokens_per_second"], 50 / 1.2)


def test_two_speedups_where_a_method_trains_the_targets_own_weights() -> None:
    own, base = [sample(20, 2.0, batch=0)], [sample(10, 2.0, batch=0)]
    got = row([sample(20, 1.0, batch=0)], own, base, quality="right", greedy=True, seed=0)
    assert (got["speedup"], got["speedup_vs_base_ar"]) == (2.0, 4.0)


def test_branches_are_counted_beside_passes() -> None:
    branched = Generation([1, 2, 3], passes=[PREFILL, Pass("verify", 1, branches=4), Pass("verify", 1, branches=3)])
    got = counts([branched])
    assert (got["nfe"], got["branch_forwards"], got["tpf"]) == (3, 7, 1)


def test_quality_and_mismatches() -> None:
    base = [sample(4, 1.0, batch=i) for i in range(4)]
    own = [sample(4 if i else 5, 1.0, batch=i, right=i < 3) for i in range(4)]
    got = row(own, base, base, quality="right", greedy=True, seed=0)
    assert (got["quality"], got["mismatches"], got["verdicts"]) == (0.75, 1, {"right": 0.75})
    low, high = got["interval_95"]["quality"]
    assert 0 <= low < 0.75 < high <= 1
    sampled = row(own, base, base, quality="", greedy=False, seed=0)
    assert (sampled["quality"], sampled["mismatches"]) == (None, None)


def test_wilson_by_hand() -> None:
    """Ends as tables of Wilson's interval have them; 0 of n has a width."""
    for right, n, low, high in ((0, 30, 0.0, 0.11351), (4, 30, 0.05314, 0.29681), (45, 50, 0.78641, 0.95652)):
        got = wilson(right, n)
        assert got is not None
        assert math.isclose(got[0], low, abs_tol=1e-4)
        assert math.isclose(got[1], high, abs_tol=1e-4)
        mirrored = wilson(n - right, n)
        assert mirrored is not None
        assert math.isclose(1 - mirrored[1], got[0], abs_tol=1e-12)
    assert wilson(0, 0) is None
    none = [sample(4, 1.0, batch=i, right=False) for i in range(10)]
    assert row(none, none, none, quality="right", greedy=True, seed=0)["interval_95"]["quality"][1] > 0.2


def test_bootstrap_covers_the_mean_about_95_times_in_100() -> None:
    rng, covered = random.Random(1), 0
    for trial in range(200):
        values = [rng.gauss(3.0, 1.0) for _ in range(40)]
        interval = bootstrap(lambda at, v=values: statistics.fmean(v[i] for i in at), 40, seed=trial)  # type: ignore[misc]
        assert interval is not None
        covered += interval[0] <= 3.0 <= interval[1]
    assert 178 <= covered <= 198
    assert bootstrap(lambda at: 1.0, 0, seed=0) is None
