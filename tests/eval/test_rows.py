"""Counting, acceptance, paired speedups and their intervals."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dspec.decoding.generation import Generation, Pass
from eval.intervals import bootstrap, wilson
from eval.results import pool
from eval.rows import acceptance, batch_speedups, counts, median_over_prompts, result_row
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
    assert (got["n"], got["prefill_tokens"], got["rounds"]) == (2, 2, 4)


def test_passes_that_are_no_rounds_and_prefills_that_emit_nothing() -> None:
    """What a diffusion or any-order decoder does: several passes per round, no token from the prompt's own pass."""
    rounds = [Round(4, 3, 4), Round(4, 1, 4)]
    done = Generation(list(range(6)), passes=[Pass("prefill"), *[Pass("decode")] * 3, *rounds])
    got = counts([done])
    assert (got["tau"], got["tpf"], got["tpf_with_prefill"]) == (6 / 2, 6 / 5, 6 / 6)
    assert pool([got, got])["tau"] == 3
    again = pool([got, counts([generation(8, [Round(3, 3, 3), Round(3, 2, 3)])])])  # 7 tokens in 2 rounds
    assert (again["tau"], again["tpf"]) == (13 / 4, 13 / 7)


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
    assert batch_speedups(fast, base) == [(2.0, 2), (5.0, 1)]
    got = result_row(fast, base, base, quality="right", greedy=True, seed=0)
    assert got["speedup"] == 2.0  # a batch that is not full weighs less
    assert median_over_prompts([(2.0, 1), (5.0, 1)]) == 3.5
    assert math.isclose(got["tokens_per_second"], 50 / 1.2)


def test_two_speedups_where_a_method_trains_the_targets_own_weights() -> None:
    own, base = [sample(20, 2.0, batch=0)], [sample(10, 2.0, batch=0)]
    got = result_row([sample(20, 1.0, batch=0)], own, base, quality="right", greedy=True, seed=0)
    assert (got["speedup"], got["speedup_vs_base_ar"]) == (2.0, 4.0)


def test_branches_are_counted_beside_passes() -> None:
    branched = Generation([1, 2, 3], passes=[PREFILL, Pass("verify", 1, branches=4), Pass("verify", 1, branches=3)])
    got = counts([branched])
    assert (got["nfe"], got["branch_forwards"], got["tpf"]) == (3, 7, 1)


def test_quality_and_mismatches() -> None:
    base = [sample(4, 1.0, batch=i) for i in range(4)]
    own = [sample(4 if i else 5, 1.0, batch=i, right=i < 3) for i in range(4)]
    got = result_row(own, base, base, quality="right", greedy=True, seed=0)
    assert (got["quality"], got["mismatches"], got["verdicts"]) == (0.75, 1, {"right": 0.75})
    low, high = got["interval_95"]["quality"]
    assert 0 <= low < 0.75 < high <= 1
    sampled = result_row(own, base, base, quality="", greedy=False, seed=0)
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
    assert result_row(none, none, none, quality="right", greedy=True, seed=0)["interval_95"]["quality"][1] > 0.2


@pytest.mark.slow
def test_bootstrap_covers_the_mean_about_95_times_in_100() -> None:
    rng, covered = random.Random(1), 0
    for trial in range(200):
        values = [rng.gauss(3.0, 1.0) for _ in range(40)]
        interval = bootstrap(lambda at, v=values: statistics.fmean(v[i] for i in at), 40, seed=trial)  # type: ignore[misc]
        assert interval is not None
        covered += interval[0] <= 3.0 <= interval[1]
    assert 178 <= covered <= 198
    assert bootstrap(lambda at: 1.0, 0, seed=0) is None


def test_each_interval_is_of_its_own_statistic() -> None:
    """Prompts that are all alike leave no spread, so that an interval is the headline number itself."""
    rounds = [Round(3, 2, 3), Round(3, 2, 3)]
    alike = Generation(list(range(7)), passes=[PREFILL, Pass("decode"), *rounds])
    base = [sample(4, 4.0, batch=i) for i in range(5)]
    fast = [replace(s, generation=alike) for s in base]
    got = result_row(fast, base, base, quality="right", greedy=True, seed=0)
    assert got["interval_95"]["tau"] == [got["tau"]] * 2 == [3, 3]
    assert got["interval_95"]["tpf"] == [got["tpf"]] * 2 == [2, 2]
    # of 15 prompts one is 100 times as fast: no median of a resample sees it, a mean does wherever it is drawn
    wide = [sample(4, 4.0, batch=i) for i in range(15)]
    many = [replace(s, seconds=4 / (100 if i == 0 else 1)) for i, s in enumerate(wide)]
    assert result_row(many, wide, wide, quality="right", greedy=True, seed=0)["interval_95"]["speedup"] == [1, 1]
