"""Decoders of diffusion LMs through `python -m eval.run`, and what rows say of them."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dspec.decoding.generation import Generation, Pass
from eval.results import pool, reference
from eval.rows import filled_per_pass, prompt_counts


@pytest.mark.slow
def test_without_plain_ar(eval_run: Callable[..., SimpleNamespace]) -> None:
    """A diffusion LM has no AR to be compared with: its baseline is its own most confident token per pass."""
    small = ["benchmark=tiny", "benchmark.problems.count=2", "benchmark.functions.count=1", "decoder.d2f.block_size=8"]
    done = eval_run(
        "decoder=[diffusion,d2f,lopa_block_causal]", *small, "benchmark.problems.max_new_tokens=24", "benchmark.functions.max_new_tokens=16",
        "decoder.lopa_block_causal.block_size=8", "decoder.lopa_block_causal.branches=2",
    )  # fmt: skip
    assert [row["decoder"]["name"] for row in done.rows] == ["diffusion", "d2f", "lopa_block_causal"]
    assert {row["baseline"] for row in done.rows} == {row["reference"] for row in done.rows} == {"diffusion"}
    assert [row["lossless"] for row in done.rows] == [True, False, False]
    assert done.run["ar_check"]["trusted"] is None  # nothing to time against generate
    plain = done.rows[0]
    assert plain["slots_filled"] == plain["nfe"]
    assert plain["tpf_paper"] == 1.0
    for row in done.rows:
        assert row["tpf"] == row["tpf_with_prefill"] == row["tokens"] / row["nfe"] <= row["tpf_paper"]
        own = [s for s in done.samples if s["decoder"] == row["decoder"]["name"]]
        assert len(row["filled_per_pass"]) == max(len(s["passes"]) for s in own)
    lopa = done.rows[2]
    assert lopa["branch_forwards"] > lopa["nfe"]
    assert lopa["decoder"]["branches"] == 2


def test_what_papers_count() -> None:
    passes = [Pass("decode", 1, filled=2), Pass("decode", 0, filled=0, beyond=3), Pass("decode", 2, filled=1)]
    made = Generation(tokens=[1, 2, 3], stopped=True, passes=passes)
    found = pool([prompt_counts(made), prompt_counts(made)])
    assert (found["slots_filled"], found["tpf_paper"], found["tpf"]) == (12, 2.0, 1.0)
    old = {key: value for key, value in prompt_counts(made).items() if key != "slots_filled"}
    assert pool([old])["tpf_paper"] == 1.0
    ar = Generation(tokens=[1, 2], passes=[Pass("prefill", 1), Pass("decode", 1)])
    assert prompt_counts(ar)["slots_filled"] == 2
    assert filled_per_pass([ar]) is None
    assert filled_per_pass([made, Generation(tokens=[1], passes=[Pass("decode", 1, filled=1)])]) == [1.5, 0, 1]
    assert Pass(*passes[1].to_row()) == passes[1]


def test_the_teachers_diffusion_is_what_a_students_row_refers_to() -> None:
    assert reference(["d2f", "diffusion", "base_diffusion"]) == "base_diffusion"
    assert reference(["d2f", "diffusion"]) == "diffusion"
    assert reference(["autoregressive", "diffusion"]) == "autoregressive"
