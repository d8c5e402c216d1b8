"""The picture of several runs: what is pooled, which runs may stand in one picture."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from dspec.errors import UserError
from eval.reports.pareto import draw, pooled
from eval.reports.plots import plot_pareto
from eval.results import SCHEMA, load

COUNTS = {"prefill_tokens": 10, "nfe_prefill": 10, "positions_computed": 0, "branch_forwards": 0, "speedup": 1.0}


def row(method: str, name: str, benchmark: str, nfe: int, quality: float | None, temperature: float = 0.0) -> Any:
    decoder = {"name": name, "temperature": temperature}
    counts = {"n": 10, "tokens": 110, "nfe": nfe, "rounds": nfe - 10} | COUNTS
    return {"method": method, "target": "tiny", "benchmark": benchmark, "decoder": decoder, "quality": quality} | counts


def run(folder: Path, *rows: Any, sha: str = "abc", prompts: str = "p") -> Path:
    folder.mkdir()
    sources = {r["benchmark"]: {"sha256": prompts} for r in rows}
    about = {"seed": 0, "config": {}, "git": {"sha": sha}, "benchmarks": sources}
    (folder / "results.json").write_text(json.dumps({"schema": SCHEMA, "run": about, "rows": rows}))
    return folder


def both(tmp_path: Path) -> list[Path]:
    plain = [row("AR", "autoregressive", b, 110, 0.5) for b in ("x", "y")]
    a = run(tmp_path / "a", *plain, row("new", "speculative", "x", 60, 0.5), row("new", "speculative", "y", 35, 0.4))
    return [a, run(tmp_path / "b", plain[0], row("new", "speculative", "x", 20, 0.3))]


def test_runs_are_pooled_over_the_benchmarks_they_share(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    alone = pooled({a: load(a)}, temperature=0.0)
    assert {name: (r["tpf"], r["quality"]) for name, r in alone.items()} == {
        "AR": (1.0, 0.5),
        "new": (pytest.approx(200 / 75), pytest.approx(0.45)),
    }
    together = pooled({a: load(a), b: load(b)}, temperature=0.0)
    assert {name: (r["tpf"], r["benchmarks"]) for name, r in together.items()} == {
        "AR": (1.0, ["x"]),
        "new": (2.0, ["x"]),
        "new (b)": (10.0, ["x"]),
    }


def test_one_temperature_with_verdicts(tmp_path: Path) -> None:
    rows = [row("AR", "autoregressive", "x", 110, 0.5), row("AR", "autoregressive", "speed", 110, None)]
    a = run(tmp_path / "a", *rows, row("AR", "autoregressive", "x", 110, 0.1, temperature=1.0))
    assert pooled({a: load(a)}, temperature=0.0)["AR"]["quality"] == 0.5
    with pytest.raises(UserError, match=r"no benchmark .* temperature 0.5"):
        pooled({a: load(a)}, temperature=0.5)


def test_the_picture_is_written(tmp_path: Path) -> None:
    shown = draw(both(tmp_path), temperature=0.0, path=tmp_path / "p.png")
    assert shown.splitlines()[1:] == ["AR           50.0  1.00", "new          50.0  2.00", "new (b)      30.0 10.00"]
    assert imread(tmp_path / "p.png").std() > 0.02


def test_every_decoder_has_a_marker_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (figures.append(self), path.write_bytes(b"")))
    points = {"AR": (1.0, 0.6), **{f"d{i}": (2.0 + i, 0.5) for i in range(9)}}
    plot_pareto(points, reference=("AR", 0.6, 0.5, 0.7), title="t", path=tmp_path / "p.png")
    line, *drawn = figures[0].axes[0].get_lines()
    assert list(line.get_ydata()) == [0.6, 0.6]
    assert {str(p.get_label()): (p.get_xdata()[0], p.get_ydata()[0]) for p in drawn} == points
    assert len({(p.get_color(), p.get_marker(), p.get_markerfacecolor()) for p in drawn}) == len(points)


def test_runs_that_cannot_stand_in_one_picture(tmp_path: Path) -> None:
    a, _ = both(tmp_path)
    plain = row("AR", "autoregressive", "x", 110, 0.5)
    for name, odd, message in (
        ("c", run(tmp_path / "c", plain, sha="def"), "of one commit"),
        ("d", run(tmp_path / "d", plain, prompts="q"), "different prompts of x"),
        ("e", run(tmp_path / "e", row("other", "speculative", "z", 60, 0.5)), "in all of the runs"),
    ):
        with pytest.raises(UserError, match=message):
            draw([a, odd], temperature=0.0, path=tmp_path / f"{name}.png")
    lone = run(tmp_path / "lone", row("new", "speculative", "x", 60, 0.5))
    with pytest.raises(UserError, match="one token per pass"):
        draw([lone], temperature=0.0, path=tmp_path / "lone.png")
    assert not list(tmp_path.glob("*.png"))
