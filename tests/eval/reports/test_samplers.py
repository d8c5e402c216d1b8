"""The comparison of samplers: means, standard errors and paired tests against what scipy and a few lines say."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from dspec.decoding.generation import Generation, Pass
from dspec.errors import UserError
from eval.reports.samplers import _p, compare, measures, paired_tests, passes, report, show
from eval.reports.scores import scores_table
from eval.results import load
from eval.rows import mean_and_error, score_means
from eval.samples import Sample, read_samples

SELF = [Pass("prefill", 1), Pass("verify", 2, drafted=4, accepted=1), Pass("decode", 1), Pass("verify", 1, drafted=2)]
NGRAM = [Pass("auxiliary"), Pass("prefill", 2, drafted=4, accepted=1), Pass("auxiliary"), Pass("verify", 1, drafted=3)]
PPL = {"any_subset": [10.0, 14.0, 12.5, 20.0, 9.0], "assd": [11.0, 13.0, 12.0, 26.0, 9.5]}


SHOWN = """\
sampler                NFE draft oracle rows aux NFE %       seconds time %
b, T=1, 12 prompts
  any_subset 5.000 ± 0.000   5.0    0.0  5.0 0.0     – 6.500 ± 1.041      –
  assd       4.000 ± 0.000   3.0    1.0  4.0 0.0 -20.0 6.500 ± 1.041   +0.0
c, T=1, 5 prompts, gold length
  any_subset 5.000 ± 0.000   5.0    0.0  5.0 0.0     – 6.000 ± 1.414      –
  assd       4.000 ± 0.000   2.0    2.0  4.0 0.0 -20.0 4.500 ± 1.061  -25.0

sampler          mean ± se difference   t: p Wilcoxon: p
b, T=1, 12 prompts: ppl
  any_subset 55.50 ± 1.041          –      –           –
  assd       56.54 ± 1.052     +1.042 <0.001      <0.001
b, T=1, 12 prompts: rouge
  any_subset 0.500 ± 0.000          –      –           –
  assd       0.500 ± 0.000     +0.000  1.000       1.000
c, T=1, 5 prompts, gold length: ppl
  any_subset 13.10 ± 1.939          –      –           –
  assd       14.30 ± 2.982     +1.200  0.392       0.688

mean ± standard error over prompts (seconds: over batches); p: paired tests
against the baseline on the same prompts (Student's t, Wilcoxon's signed ranks)
NFE: passes of the model, those that test drafts (oracle) and others (draft);
rows: of all these passes (one per pass, but for samplers that test several
orders at once); aux: passes of another drafter, such as n-grams
~: not its baseline's distribution: biased, or lossy by a tolerance
gold length: samplers are told how many tokens of the reference are hidden"""


def sample(decoder: str, i: int, passes: Sequence[Pass], *, batch: int | None = None, **scores: float) -> Sample:
    return Sample(
        benchmark="b", temperature=1.0, decoder=decoder, batch=i if batch is None else batch, id=f"b/{i}",
        prompt_sha256="", text="", verdicts={}, generation=Generation([1, 2], passes=list(passes)),
        seconds=1.0 + i, scores=scores,
    )  # fmt: skip


def row(decoder: str, *, lossless: bool = True) -> dict[str, Any]:
    return {
        "method": decoder, "decoder": {"name": decoder, "temperature": 1.0}, "baseline": "any_subset", "benchmark": "b",
        "lossless": lossless, "n": 5,
    }  # fmt: skip


def samples() -> list[Sample]:
    made = [sample("any_subset", i, [Pass("prefill", 1), *[Pass("decode", 1)] * 4], ppl=p) for i, p in enumerate(
        PPL["any_subset"])]  # fmt: skip
    return made + [sample("assd", i, SELF, ppl=p) for i, p in enumerate(PPL["assd"])]


def test_passes_by_their_kind() -> None:
    assert passes(Generation(passes=SELF)) == {
        "nfe": 4, "nfe_draft": 2, "nfe_oracle": 2, "nfe_rows": 4, "nfe_aux": 0,
    }  # fmt: skip
    assert passes(Generation(passes=NGRAM)) == {
        "nfe": 2, "nfe_draft": 0, "nfe_oracle": 2, "nfe_rows": 2, "nfe_aux": 2,
    }  # fmt: skip
    orders = [Pass("prefill"), Pass("verify", 3, branches=5, drafted=4), Pass("decode"), Pass("verify", 1, branches=5)]
    assert passes(Generation(passes=orders))["nfe_rows"] == 12  # sigma-GPT's five orders are five rows of a pass


def test_prompts_of_a_batch_share_its_seconds() -> None:
    found = measures([sample("d", 3, SELF, batch=0), sample("d", 3, SELF, batch=1), sample("d", 3, NGRAM, batch=1)])
    assert found["seconds"] == {"batch 0": 4.0, "batch 1": 2.0}  # 4 seconds for one prompt, and for two


def test_means_errors_and_paired_tests() -> None:
    sequential, assd = compare([row("any_subset"), row("assd")], samples())
    got, a, b = assd["measures"]["ppl"], PPL["assd"], PPL["any_subset"]
    assert got["mean"] == statistics.fmean(a)
    assert got["se"] == pytest.approx(statistics.stdev(a) / 5**0.5)
    assert got["paired"] == {
        "difference": pytest.approx(statistics.fmean(a) - statistics.fmean(b)),
        "n": 5,
        "t_p": pytest.approx(stats.ttest_1samp([x - y for x, y in zip(a, b, strict=True)], 0).pvalue),
        "wilcoxon_p": pytest.approx(stats.wilcoxon(a, b).pvalue),
    }
    assert got["paired"]["t_p"] < stats.ttest_ind(a, b).pvalue  # not paired it would be
    assert assd["measures"]["nfe"]["paired"]["difference"] == -1
    assert "paired" not in sequential["measures"]["ppl"]


def test_pairs_go_by_prompt_not_by_place() -> None:
    shuffled = dict(zip("cab", (3.0, 1.0, 2.0), strict=True))
    assert paired_tests(shuffled, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 99.0}) == {
        "difference": 0, "n": 3, "t_p": 1, "wilcoxon_p": 1,
    }  # fmt: skip
    assert paired_tests({"b": 3.0, "a": 2.0}, {"a": 1.0, "b": 2.0})["t_p"] == 0  # type: ignore[index]
    assert paired_tests({"a": 2.0}, {"a": 1.0}) is None


def test_scores_are_averaged_over_the_answers_that_have_them() -> None:
    made = [sample("d", 0, SELF, x=1.0, y=5.0), sample("d", 1, SELF, x=4.0), sample("d", 2, SELF)]
    assert score_means(made) == {
        "x": {"mean": 2.5, "se": pytest.approx(1.5), "n": 2},
        "y": {"mean": 5.0, "se": None, "n": 1},
    }
    assert mean_and_error([1.0, 2.0, 3.0])["se"] == pytest.approx(1 / 3**0.5)


def test_biased_samplers_are_marked_and_lines_fit() -> None:
    entries = compare([row("any_subset"), row("assd", lossless=False)], samples())
    text = show(entries)
    assert "assd~" in text
    assert "any_subset~" not in text
    assert "b, T=1, 5 prompts: ppl" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "-20.0" in text  # 4 passes instead of 5


def test_the_tables_to_the_character() -> None:
    """Two benchmarks: one with several scores and clear differences, one with too few prompts to tell."""
    three_one = [Pass("prefill", 1), Pass("decode", 1), Pass("verify", 2, drafted=2, accepted=1), Pass("decode", 1)]
    one_each = [Pass("prefill", 1), *[Pass("decode", 1)] * 4]
    made = [
        one
        for i in range(12)
        for one in (sample("any_subset", i, one_each, ppl=50.0 + i, rouge=0.5),
                    sample("assd", i, three_one, ppl=51.0 + i + i * i / 1000, rouge=0.5))
    ]  # fmt: skip
    made += [
        replace(one, benchmark="c", seconds=(2 if one.decoder == "any_subset" else 1.5) * one.seconds)
        for one in samples()
    ]
    rows = [row(name) | {"benchmark": b, "n": n, "gold_length": b == "c"} for b, n in (("b", 12), ("c", 5))
            for name in ("any_subset", "assd")]  # fmt: skip
    assert show(compare(rows, made)) == SHOWN


def test_p_values() -> None:
    """A dash where a test is not defined, not the smallest value."""
    assert [_p(value) for value in (0.5, 0.05, 0.001, 0.00099, float("nan"))] == [
        "0.500",
        "0.050",
        "0.001",
        "<0.001",
        "–",
    ]


def test_the_report_reads_a_runs_folder(tmp_path: Path) -> None:
    counts = dict.fromkeys(("tokens", "prefill_tokens", "nfe", "nfe_prefill", "rounds", "positions_computed",
                            "branch_forwards"), 1)  # fmt: skip
    rows = [row(name) | counts for name in ("any_subset", "assd")]
    run = {"seed": 0, "config": {}, "ar_check": {"trusted": None}, "complete": True}
    (tmp_path / "results.json").write_text(json.dumps({"schema": 3, "run": run, "rows": rows, "calibration": None}))
    assert [r["scores"] for r in load(tmp_path)["rows"]] == [{}, {}]  # written before there were scores
    with pytest.raises(UserError, match=r"samples.jsonl is missing"):
        report(tmp_path)
    lines = [{"settings": {}}, *(s.to_row() for s in samples())]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "ppl" in report(tmp_path)
    written = json.loads((tmp_path / "samplers.json").read_text())["samplers"]
    assert [e["measures"]["nfe"]["mean"] for e in written] == [5, 4]
    kept = [line for line in lines if line.get("decoder") != "any_subset"]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    with pytest.raises(UserError, match="has no answers of any_subset to b: evaluate again"):
        report(tmp_path)
    (tmp_path / "samples.jsonl").write_bytes(b'{"settings": {}}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match="line 2 is malformed"):
        report(tmp_path)


def test_samples_keep_their_scores_and_old_ones_have_none(tmp_path: Path) -> None:
    one = sample("d", 0, SELF, ppl=2.5)
    assert Sample.from_row(json.loads(json.dumps(one.to_row()))).scores == {"ppl": 2.5}
    old = one.to_row()
    del old["scores"]
    (tmp_path / "samples.jsonl").write_text('{"settings": {}}\n' + json.dumps(old) + "\n")
    (found,) = read_samples(tmp_path / "samples.jsonl")
    assert found.scores == {}


def test_without_scipy_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(UserError, match=r"need scipy: pip install -e '.\[infill\]'"):
        paired_tests({"a": 1.0}, {"a": 1.0})


def test_scores_are_shown_beside_the_rows() -> None:
    found = {"gen_ppl": {"mean": 1234.4, "se": 2.25, "n": 5}, "entropy": {"mean": 5.5, "se": None, "n": 1}}
    rows = [{**row("assd"), "quality_name": None, "scores": found}, {**row("any_subset"), "scores": {}}]
    assert scores_table(rows).splitlines() == [
        "method      gen_ppl entropy",
        "b, T=1, 5 prompts",
        "  assd 1234 ± 2.250   5.500",
        "",
        "mean ± standard error over prompts",
    ]
    assert scores_table(rows[1:]) == ""
