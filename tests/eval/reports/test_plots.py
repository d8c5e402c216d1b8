"""Plots: a valid PNG is written for every shape of input, and a failed write leaves nothing behind."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from dspec.calibration.sts import Traces, calibration_report
from dspec.errors import UserError
from eval.reports.plots import (
    plot_acceptance,
    plot_filled,
    plot_frontier,
    plot_loss,
    plot_reliability,
    plot_roofline,
    plot_scaling,
)


def report(slots: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(slots)
    logits = torch.randn(200, slots, generator=rng)
    accepted = torch.randint(0, slots + 1, (200,), generator=rng)
    valid = torch.full((200,), max(1, slots - 1))  # the last slot of several is empty
    return calibration_report(Traces(logits, accepted, valid), torch.full((slots,), 2.0), bins=10)


STEPS = list(range(500))
NOISY = [5 / (1 + i / 50) + 0.1 * (-1) ** i for i in STEPS]
SPARSE = [5.0 if i % 100 == 0 else math.nan for i in STEPS]
POINT = {"tpf": 2.0, "quality": 0.5, "tpf_interval": [1.5, 2.5], "quality_interval": [0.4, 0.6], "optimal": False}
CURVES = {"a": [POINT | {"at": None}], "b": [POINT | {"at": 0}, POINT | {"at": 4, "tpf": 3.0, "optimal": True}]}
PLOTS: dict[str, Callable[[Path], None]] = {
    "loss_long": lambda path: plot_loss(STEPS, {"train": NOISY, "validation": SPARSE}, path),
    "loss_one_point": lambda path: plot_loss([1], {"train": [2.0]}, path),
    "acceptance": lambda path: plot_acceptance({"a": [0.9, 0.8, math.nan], "b": [0.7]}, path),
    "roofline": lambda path: plot_roofline(
        {"a": [(1.0, 1e9), (2.0, 2e9)], "b": [(40.0, 2e10)]},
        notes={"best": (2.0, 2e9)},
        bandwidth=5e9,
        flops=5e10,
        path=path,
    ),
    "filled": lambda path: plot_filled({"x": {"a": [3.0, 1.0], "b": [1.0]}, "y": {"a": [2.0]}}, path),
    "frontier": lambda path: plot_frontier(CURVES, reference=("a", 0.5, 0.4, 0.6), title="t", path=path),
    "scaling": lambda path: plot_scaling(
        CURVES, setting="branches", reference=("a", 0.5, 0.4, 0.6), title="t", path=path
    ),
    "reliability_1": lambda path: plot_reliability(report(1), path),
    "reliability_3": lambda path: plot_reliability(report(3), path),
    "reliability_7": lambda path: plot_reliability(report(7), path),
}


@pytest.mark.parametrize("name", PLOTS)
def test_writes_one_valid_png(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.png"
    path.write_text("an older file")
    PLOTS[name](path)
    assert list(tmp_path.iterdir()) == [path]
    height, width, _ = imread(path, format="png").shape
    assert height > 300
    assert width > 300
    assert imread(path).std() > 0.02  # something is drawn


@pytest.mark.parametrize("name", PLOTS)
def test_failed_write_leaves_only_the_old_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_file(self: Figure, target: Path, **_: object) -> None:
        target.write_bytes(b"\x89PNG half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", half_a_file)
    path = tmp_path / "plot.png"
    path.write_text("old")
    with pytest.raises(UserError, match="disk full"):
        PLOTS[name](path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plot.png"]
    assert path.read_text() == "old"


def data(line: Any, axis: str) -> list[float]:
    return [float(v) for v in getattr(line, f"get_{axis}data")()]


def drawn(monkeypatch: pytest.MonkeyPatch, plot: Callable[[Path], None], path: Path) -> Figure:
    figures: list[Figure] = []
    original = Figure.savefig

    def keep(self: Figure, target: Path, **options: Any) -> None:
        figures.append(self)
        original(self, target, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot(path)
    return figures[0]


def test_reliability_shows_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = report(3)
    figure = drawn(monkeypatch, lambda path: plot_reliability(shown, path), tmp_path / "r.png")
    panels = figure.axes
    assert len(panels) == 3
    slot = shown["slots"][0]
    assert f"{100 * slot['ece_before']:.1f} → {100 * slot['ece_after']:.1f} %" in panels[0].get_title()
    assert "– → – %" in panels[2].get_title()
    for line, when in zip(panels[0].get_lines()[1:], ("before", "after"), strict=True):
        known = [v for v in slot[f"curve_{when}"]["observed"] if v is not None]
        assert [y for y in data(line, "y") if not math.isnan(y)] == known
    heights = [bar.get_height() for bar in panels[0].patches if isinstance(bar, Rectangle)]
    counts = slot["curve_before"]["count"] + slot["curve_after"]["count"]
    assert heights == pytest.approx([0.25 * count / max(counts) for count in counts])


def test_panels_without_a_slot_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, PLOTS["reliability_7"], tmp_path / "r.png")
    assert [axes.get_visible() for axes in figure.axes] == [True] * 7 + [False]


def test_loss_draws_the_running_mean_of_finite_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, PLOTS["loss_long"], tmp_path / "l.png")
    raw, mean, validation = figure.axes[0].get_lines()
    assert data(raw, "y") == NOISY
    reach = 500 // 60
    assert data(mean, "y")[250] == pytest.approx(sum(NOISY[250 - reach : 251 + reach]) / (2 * reach + 1))
    assert data(validation, "x") == [0, 100, 200, 300, 400]


def test_acceptance_covers_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(monkeypatch, PLOTS["acceptance"], tmp_path / "a.png").axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["a", "b"]
    assert data(axes.get_lines()[0], "x") == [1, 2, 3]
    assert axes.get_ylim()[0] < 0.7
    assert axes.get_ylim()[1] >= 1.0


def test_errors_name_the_series(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train: 1 values for 2 steps"):
        plot_loss([1, 2], {"train": [1.0]}, tmp_path / "x.png")
    with pytest.raises(ValueError, match="no finite value"):
        plot_acceptance({"a": [math.nan]}, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["acceptance", "loss_long", "frontier"])
def test_legends_stand_beside_the_panel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, PLOTS[name], tmp_path / "p.png")
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_legend() is None
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
