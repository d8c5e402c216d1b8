"""Curves of one run: the numbers of their points, which points make a curve, what is drawn, and the command."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dspec.decoding.generation import Generation, Pass
from dspec.errors import UserError
from eval.intervals import student, wilson
from eval.reports.curves import CurveReport, curves, draw, main, points, report, show
from eval.results import SCHEMA, ResultRow
from eval.rows import result_row
from eval.samples import Sample

CHECK = {"trusted": None, "ar_over_generate": None, "interval_95": None, "batches": 0, "batch_size": 1, "floor": 0.9}


def answers(
    decoder: str, verdicts: Sequence[bool], passes: Sequence[int], *, temperature: float = 0.0, **one_pass: int
) -> list[Sample]:
    """Four tokens to each prompt, in so many passes."""
    return [
        Sample(
            benchmark="x", temperature=temperature, decoder=decoder, batch=i, id=str(i), prompt_sha256="", text="",
            verdicts={"ok": verdict},
            generation=Generation([1, 2, 3, 4], passes=[Pass("decode", filled=4 // n, **one_pass)] * n),
            seconds=1.0,
        )
        for i, (verdict, n) in enumerate(zip(verdicts, passes, strict=True))
    ]  # fmt: skip


BASE = answers("diffusion", [True, True, False, False], [4] * 4, positions=9)
RUN = {  # decoder -> label, settings, answers
    "diffusion": ("diffusion", {"threshold": 1.0, "block": 8}, BASE),
    "d2f_90": ("D2F, > 0.9", {"threshold": 0.9, "block": 8}, answers("d2f_90", [True] * 2 + [False] * 2, [2] * 4)),
    "d2f_50": (
        "D2F, > 0.5",
        {"threshold": 0.5, "block": 8},
        answers("d2f_50", [True, False, False, True], [1, 1, 1, 2], branches=3, positions=6),
    ),
    "other": ("D2F, block 4, > 0.5", {"threshold": 0.5, "block": 4}, answers("other", [False] * 4, [2, 2, 2, 1])),
    "none": ("AR", {}, answers("none", [True, True, False, False], [4] * 4)),
}  # fmt: skip


def rows(run: dict[str, Any] = RUN, *, temperature: float = 0.0, quality: str = "ok") -> list[ResultRow]:
    return [
        {"method": label, "target": "tiny", "benchmark": "x", "baseline": "diffusion", "reference": "diffusion",
         "lossless": False, "decoder": {"name": name, "temperature": temperature, **settings}}
        | result_row(given, run["diffusion"][2], run["diffusion"][2], quality=quality, greedy=True, seed=0)
        for name, (label, settings, given) in run.items()
    ]  # fmt: skip


def results(made: list[ResultRow]) -> dict[str, Any]:
    about = {"seed": 0, "config": {}, "git": {"sha": "abc"}, "ar_check": CHECK}
    return {"schema": SCHEMA, "run": about, "rows": made, "calibration": None}


def samples(run: dict[str, Any] = RUN) -> list[Sample]:
    return [s for _, _, given in run.values() for s in given]


def made(along: str | None = "threshold", run: dict[str, Any] = RUN) -> dict[str, Any]:
    return {p["decoder"]: p for p in points(results(rows(run)), samples(run), temperature=0.0, along=along)}


def folder(path: Path, content: dict[str, Any], given: Sequence[Sample]) -> Path:
    path.mkdir()
    (path / "results.json").write_text(json.dumps(content))
    lines = [{"settings": {}}, *(s.to_row() for s in given)]
    (path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_numbers_of_a_point() -> None:
    point = made()["d2f_50"]
    assert (point["n"], point["quality"], point["tpf"], point["tpf_paper"]) == (4, 0.5, 16 / 5, 16 / 5)
    assert point["quality_interval"] == wilson(2, 4)
    assert (point["won"], point["lost"], point["difference"]) == (1, 1, 0.0)
    assert point["difference_interval"] == list(student([0, -100, 0, 100])[1:])
    assert (point["branches_per_pass"], point["positions_per_pass"]) == (3.0, 6.0)
    low, high = point["tpf_interval"]
    assert 2 <= low < 16 / 5 < high == 4
    other = made()["other"]
    assert (other["difference"], other["won"], other["lost"]) == (-50.0, 0, 2)
    same = made()["d2f_90"]
    assert (same["difference"], same["difference_interval"], same["tpf_interval"]) == (0.0, None, [2, 2])
    assert [name for name, p in made().items() if p["reference"]] == ["diffusion"]


def test_slots_after_the_end_count_as_papers_do() -> None:
    beyond = answers("d2f_90", [True] * 4, [2] * 4, beyond=1)
    point = made(run=RUN | {"d2f_90": (*RUN["d2f_90"][:2], beyond)})["d2f_90"]
    assert (point["tpf"], point["tpf_paper"]) == (2.0, 3.0)


def test_all_benchmarks_with_verdicts_are_pooled() -> None:
    """A prompt of one benchmark is no prompt of another, whatever its id."""
    both = {}
    for name, (label, settings, given) in RUN.items():
        copies = [Sample(**(vars(s) | {"benchmark": "y", "verdicts": {"right": name == "other"}})) for s in given]
        both[name] = (label, settings, copies)
    second = [r | {"benchmark": "y"} for r in rows(both, quality="right")]
    speed = [r | {"benchmark": "z", "quality": None, "quality_name": None} for r in rows()]
    unjudged = [Sample(**(vars(s) | {"benchmark": "z", "verdicts": {}})) for s in samples()]
    given = [*samples(), *samples(both), *unjudged]
    every = points(results([*rows(), *second, *speed]), given, temperature=0.0, along="threshold")
    found = {p["decoder"]: p for p in every}
    other = found["other"]
    assert (other["n"], other["quality"], other["won"], other["lost"], other["difference"]) == (8, 0.5, 4, 2, 25.0)
    assert found["diffusion"]["quality"] == 0.25


def test_a_temperature_has_points_of_its_own() -> None:
    warm = {
        name: (label, settings, [Sample(**(vars(s) | {"temperature": 1.0, "verdicts": {"ok": True}})) for s in given])
        for name, (label, settings, given) in RUN.items()
    }
    content = results([*rows(), *rows(warm, temperature=1.0)])
    qualities = [
        {p["quality"] for p in points(content, [*samples(), *samples(warm)], temperature=t, along=None)} for t in (0, 1)
    ]
    assert qualities == [{0.5, 0.0}, {1.0}]
    cold = points(content, [*samples(), *samples(warm)], temperature=0.0, along=None)
    assert cold[0]["quality_interval"] == wilson(2, 4)


def test_decoders_that_differ_in_the_setting_alone_are_a_curve() -> None:
    """In its order; what others are measured against, and what has no such setting, stand alone."""
    found = curves(list(made().values()))
    assert {name: [(p["decoder"], p["at"]) for p in same] for name, same in found.items()} == {
        "diffusion": [("diffusion", None)],
        "D2F": [("d2f_50", 0.5), ("d2f_90", 0.9)],
        "D2F, block 4, > 0.5": [("other", 0.5)],
        "AR": [("none", None)],
    }
    assert set(curves(list(made(None).values()))) == {label for label, _, _ in RUN.values()}
    assert {p["curve"] for p in made("block").values()} == {"diffusion", "D2F, > 0.9", "D2F, > 0.5", "AR"}


def test_curves_of_one_name_stay_apart() -> None:
    """Labels that do not tell what differs."""
    run = RUN | {"other": ("D2F, > 0.7", *RUN["other"][1:]), "d2f_90": ("D2F, sure", *RUN["d2f_90"][1:])}
    run["fourth"] = ("D2F, > 0.6", {"threshold": 0.6, "block": 4}, answers("fourth", [True] * 4, [2] * 4))
    assert {p["decoder"]: p["curve"] for p in made(run=run).values()} == {
        "diffusion": "diffusion", "d2f_90": "D2F", "d2f_50": "D2F", "other": "D2F (other)", "fourth": "D2F (other)",
        "none": "AR",
    }  # fmt: skip


def test_weights_stay_apart() -> None:
    """The base's decoders with the same settings are a curve of their own."""
    content = results(rows())
    for name in ("d2f_50", "other"):
        (one,) = [r for r in content["rows"] if r["decoder"]["name"] == name]
        one["decoder"]["block"] = 8
    one["baseline"] = "base_diffusion"
    found = {p["decoder"]: p for p in points(content, samples(), temperature=0.0, along="threshold")}
    assert found["other"]["curve"] != found["d2f_50"]["curve"] == found["d2f_90"]["curve"]


def test_one_decoder_is_the_reference() -> None:
    """Of the teacher's and the student's baseline the teacher's."""
    content = results(
        rows(RUN | {"base_diffusion": ("base, diffusion", {}, answers("base_diffusion", [True] * 4, [4] * 4))})
    )
    content["rows"][-1]["baseline"] = "base_diffusion"
    given = [*samples(), *answers("base_diffusion", [True] * 4, [4] * 4)]
    found = points(content, given, temperature=0.0, along="threshold")
    assert [p["decoder"] for p in found if p["reference"]] == ["base_diffusion"]
    assert {p["decoder"]: p["lost"] for p in found}["diffusion"] == 2


def test_the_pareto_frontier() -> None:
    """diffusion and AR: the same quality as d2f_90 in more passes; other: fewer right than d2f_50 and slower."""
    assert [name for name, p in made().items() if p["optimal"]] == ["d2f_50"]
    run = RUN | {"d2f_50": (*RUN["d2f_50"][:2], answers("d2f_50", [True, False, False, False], [1] * 4))}
    assert [name for name, p in made(run=run).items() if p["optimal"]] == ["d2f_90", "d2f_50"]
    twins = RUN | {"d2f_90": (*RUN["d2f_90"][:2], answers("d2f_90", [True, True, False, False], [1, 1, 1, 2]))}
    assert [name for name, p in made(run=twins).items() if p["optimal"]] == ["d2f_90", "d2f_50"]  # none is better


def test_the_table() -> None:
    text = show(list(made().values()))
    assert max(map(len, text.splitlines())) <= 80
    header, *found = [" ".join(line.split()) for line in text.splitlines()]
    assert header == "decoder quality % − diffusion won lost tpf"
    low, high = made()["d2f_50"]["tpf_interval"]
    assert found[:6] == [
        "diffusion 50.0 (15-85) – 0 0 1.00 (1.00-1.00)",
        "D2F, > 0.9 50.0 (15-85) +0.0 each time 0 0 2.00 (2.00-2.00)",
        f"D2F, > 0.5 50.0 (15-85) +0.0 (-129.9 to +129.9) 1 1 3.20 ({low:.2f}-{high:.2f})^",
        "D2F, block 4, > 0.5",
        f"0.0 (0-49) -50.0 (-141.9 to +41.9) 0 2 {_tpf_of(made()['other'])}",
        "AR 50.0 (15-85) +0.0 each time 0 0 1.00 (1.00-1.00)",
    ]
    assert found[7:10:2] == ["decoder tpf tpf_paper branches positions", "D2F, > 0.9 2.00 2.00 1.0 0.0"]
    assert found[10] == "D2F, > 0.5 3.20 3.20 3.0 6.0"


def _tpf_of(point: dict[str, Any]) -> str:
    return f"{point['tpf']:.2f} ({point['tpf_interval'][0]:.2f}-{point['tpf_interval'][1]:.2f})"


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in named}


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Figure] = {}
    monkeypatch.setattr("eval.reports.plots.save", lambda figure, path: seen.update({path.name: figure}))
    found = list(made().values())
    draw(found, along="threshold", title="t", folder=tmp_path, suffix="_T0")
    assert set(seen) == {"frontier_T0.png", "threshold_T0.png"}
    (axes,) = seen["frontier_T0.png"].axes
    assert lines(axes) == {
        "diffusion": ([1.0], [0.5]),
        "D2F": ([3.2, 2.0], [0.5, 0.5]),
        "D2F, block 4, > 0.5": ([16 / 7], [0.0]),
        "AR": ([1.0], [0.5]),
        "Pareto-optimal": ([3.2], [0.5]),
    }
    bars = [segment.tolist() for c in axes.collections for segment in c.get_segments()]
    (point,) = [p for p in found if p["decoder"] == "d2f_50"]
    (low, high), (left, right) = point["quality_interval"], point["tpf_interval"]
    assert [[pytest.approx(left), 0.5], [pytest.approx(right), 0.5]] in bars
    assert [[3.2, pytest.approx(low)], [3.2, pytest.approx(high)]] in bars
    assert sorted(text.get_text() for text in axes.texts) == ["0.5", "0.5", "0.9"]
    assert list(axes.get_lines()[0].get_ydata()) == [0.5, 0.5]  # the reference
    speed, quality = seen["threshold_T0.png"].axes
    assert lines(speed) == {"D2F": ([0.5, 0.9], [3.2, 2.0]), "D2F, block 4, > 0.5": ([0.5], [16 / 7])}
    assert lines(quality) == {"D2F": ([0.5, 0.9], [0.5, 0.5]), "D2F, block 4, > 0.5": ([0.5], [0.0])}
    assert list(speed.get_xticks()) == [0.5, 0.9]
    bars = [segment.tolist() for c in speed.collections for segment in c.get_segments()]
    assert [[0.5, pytest.approx(left)], [0.5, pytest.approx(right)]] in bars
    assert len(bars) == 3
    looks = [{str(line.get_label()): line.get_color() for line in panel.get_lines()} for panel in (axes, speed)]
    assert looks[0]["D2F"] == looks[1]["D2F"]  # the same in both pictures


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder(tmp_path / "run", results(rows()), samples())
    monkeypatch.setattr(sys, "argv", ["eval.curves", str(run), "--along", "threshold"])
    main()
    out = capsys.readouterr().out
    assert "tiny, T=0, 4 prompts (x)\ndecoder" in out
    assert "^: Pareto-optimal" in out
    assert max(map(len, out.splitlines())) <= 80
    assert {path.name for path in (run / "plots").iterdir()} == {"frontier_T0.png", "threshold_T0.png"}
    written = json.loads((run / "curves.json").read_text())
    assert written["along"] == "threshold"
    assert [p["decoder"] for p in written["points"]["tiny, T=0, 4 prompts (x)"]] == list(RUN)


def test_a_report_ends_with_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = results(rows())
    run = folder(tmp_path / "run", content, samples())
    CurveReport(along=None)(results=content, history=[], run_dir=run)
    assert {p.name for p in (run / "plots").iterdir()} == {"frontier_T0.png", "filled_per_pass_T0.png"}
    assert {p.name for p in run.iterdir()} >= {"table.csv", "table.md", "results.json", "curves.json"}
    out = capsys.readouterr().out
    assert out.index("results, tables and plots") < out.index("− diffusion")


def test_runs_without_curves(tmp_path: Path) -> None:
    for setting in ("nothing", "name"):
        with pytest.raises(UserError, match=f"no decoder of the run has a number for {setting}"):
            made(setting)
    with pytest.raises(UserError, match=r"no benchmark has verdicts at temperature 0\.5"):
        points(results(rows()), samples(), temperature=0.5, along=None)
    first = [Sample(**(vars(s) | {"generation": Generation([1], passes=[Pass("prefill", 1)])})) for s in BASE]
    with pytest.raises(UserError, match="there is no pass to measure"):
        made(None, run={"diffusion": ("diffusion", {}, first)})
    run = folder(tmp_path / "run", results(rows()), samples())
    (run / "samples.jsonl").unlink()
    with pytest.raises(UserError, match=r"samples\.jsonl is missing"):
        report(run, along=None)
