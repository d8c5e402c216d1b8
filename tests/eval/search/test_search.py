"""The configuration search: the grid, the points' arithmetic, and the job from the command line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.errors import UserError
from dspec.models.language_model import embedded_target
from eval.benchmarks.base import Item
from eval.search.__main__ import main
from eval.search.grid import Search, left_to_right, left_to_right_model, point
from eval.search.roofline import Roofline, measure_roofline, pass_cost
from eval.search.settings import SearchSettings
from eval.search.tables import name, show, verdict

ROOF = Roofline(bandwidth=2e9, flops=1e10)


def grid(**changes: Any) -> Search:
    settings: dict[str, Any] = {
        "block_sizes": [4, 8], "candidates": [0, 2], "blocks": [1, 2], "activations": [0.85, 0.5], "pool_size": 4,
        "warmup": 1, "stream_mb": 1, "matrix": 16,
    }  # fmt: skip
    return Search(SearchSettings(**(settings | changes)))


def test_the_grid_has_each_configuration_once() -> None:
    names = [name(vars(config)) for config in grid().configs]
    assert len(names) == len(set(names)) == 2 * 2 * (1 + 2)
    assert "n=8 K=2 r=0.5 c=2" in names
    assert "n=4 K=1 c=0" in names
    for change in ({"block_sizes": [4]}, {"candidates": [0]}, {"blocks": [1]}, {"activations": [0.5]}):
        assert len(grid(**change).configs) < 12
    assert grid(pool_size=9).configs[0].pool_size == 9
    with pytest.raises(UserError, match="at least one value"):
        grid(blocks=[])


def test_roofline() -> None:
    assert ROOF.ridge_point == 5
    assert [ROOF.attainable(x) for x in (1, 5, 50)] == [2e9, 1e10, 1e10]
    got = measure_roofline(torch.device("cpu"), torch.float32, stream_mb=4, matrix=128)
    assert 1e8 < got.bandwidth < 1e13
    assert 1e8 < got.flops < 1e15


def test_cost_of_a_pass(toys: SimpleNamespace) -> None:
    """Against the products of a real pass, counted at the linear layers, head included."""
    for tie in (False, True):
        target = toys.target(seed=0, vocab=13, tie=tie)
        counted = 0

        def hook(module: torch.nn.Linear, args: Any, output: Any) -> None:
            nonlocal counted
            counted += 2 * module.weight.numel() * args[0].shape[:-1].numel()

        handles = [m.register_forward_hook(hook) for m in target.modules() if isinstance(m, torch.nn.Linear)]
        target.logits(target(torch.ones(2, 5, dtype=torch.long)).hidden_BLD)
        for handle in handles:
            handle.remove()
        flops, read = pass_cost(target, positions=10, context=7)
        assert flops == counted
        keys = 2 * 3 * 1 * 8 * 7  # keys and values, layers, heads, width, context
        assert read == (counted / 20 + keys) * 8  # each weight once


def test_points(toys: SimpleNamespace) -> None:
    target = toys.target(seed=2, vocab=9)
    options = {"max_new_tokens": 12, "stop_ids": (), "seeds": [0]}
    config = JacobiConfig(block_size=4, blocks=2, activation=0.5, pool_size=4, candidates=2)
    (baseline,) = toys.autoregressive(target=target, sampling=toys.GREEDY).decode([[1, 2]], **options)
    (own,) = toys.jacobi(target=target, sampling=toys.GREEDY, config=config).decode([[1, 2]], **options)
    points = [
        point(target, p, [(g, s)], [(baseline, 2.0)], [True, False], context=8, roofline=ROOF)
        for p, g, s in ((None, baseline, 2.0), (config, own, 1.0))
    ]
    assert points[0]["tpf"] == points[0]["positions_per_pass"] == points[0]["rows_per_pass"] == 1
    assert (points[0]["tokens_per_second"], points[1]["tokens_per_second"]) == (6, 12)
    assert points[1]["tpf"] == 11 / own.forwards
    assert points[1]["positions_per_pass"] == own.positions_computed / own.forwards
    assert points[1]["intensity"] > points[0]["intensity"]
    assert (points[1]["mismatches"], points[1]["quality"]) == (0, 0.5)
    lines = show(points, ROOF).splitlines()
    assert max(map(len, lines)) <= 80
    fastest = lines[3].split()
    assert fastest[:5] == ["n=4", "K=2", "r=0.5", "c=2", "50.0"]
    assert fastest[7] == "2.00*"  # over an AR that nobody timed against generate
    text = verdict(points, ROOF)
    assert "n=4 K=2 r=0.5 c=2" in text
    assert "2.00* x AR" in text


def test_answers_that_end_in_the_prefill_have_nothing_to_measure(toys: SimpleNamespace) -> None:
    target = toys.target(seed=2, vocab=9)
    options = {"max_new_tokens": 1, "stop_ids": (), "seeds": [0]}
    (only,) = toys.autoregressive(target=target, sampling=toys.GREEDY).decode([[1, 2]], **options)
    assert only.forwards == 0
    with pytest.raises(UserError, match="ended with its first token"):
        point(target, None, [(only, 1.0)], [(only, 1.0)], [], context=2, roofline=ROOF)


def test_holes_are_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["recipe=sweeps/jacobi_config", "target=tiny", "benchmark=tiny_infilling", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["eval.search", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "it fills no holes" in capsys.readouterr().err


def test_diffusion_lms_are_not_searched(toys: SimpleNamespace) -> None:
    target = toys.target(seed=0, vocab=9)
    assert left_to_right_model(target) is target
    for trained in ("bidirectional", "block_causal"):
        target.model.config.dspec_attention = trained
        with pytest.raises(UserError, match="is a diffusion LM, the search is for Jacobi decoding"):
            left_to_right_model(target)


def test_a_gap_between_given_texts_is_a_hole() -> None:
    """Such items have no response, but parts: they would be decoded with the gap cut out of the prompt."""
    gap = Item("code/0", "Fill in.", parts=(("def f():\n", False), ("    return 1\n", True), ("f()\n", False)))
    plain = Item("plain/0", "Write.")
    benchmarks: Any = {"code": SimpleNamespace(items=lambda: [plain, gap])}
    with pytest.raises(UserError, match="it fills no holes"):
        left_to_right(benchmarks, limit=None)
    assert left_to_right(benchmarks, limit=1) == [(benchmarks["code"], plain)]


def test_each_configuration_is_warmed_up_judged_and_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    target, order = embedded_target(dtype="float32", device="cpu"), []
    for cls in (Autoregressive, Jacobi):

        def start(self: Any, requests: Any, whole: Any = cls.start) -> Any:
            order.append((type(self).__name__, requests[0].should_stop is not None))
            return whole(self, requests)

        monkeypatch.setattr(cls, "start", start)

    class Stops:
        quality, chat, stop, max_new_tokens = "short", False, ("e",), 16

        def score(self, item: Item, answer: str) -> dict[str, bool]:
            assert "e" not in answer
            return {"short": item.id == "0"}

    bench = Stops()
    prompts = [(bench, Item(str(i), ""), [5 + i, 6]) for i in range(2)]
    search = grid(block_sizes=[4], candidates=[0], blocks=[1])
    points, _ = search(target, prompts, seed=0)  # type: ignore[arg-type]
    names = [name for name, _ in order]
    assert names == ["Autoregressive", "Jacobi"] * 2 + ["Jacobi", "Autoregressive"]
    assert all(ends for _, ends in order)
    assert [p["quality"] for p in points] == [0.5, 0.5]


def test_verdict_near_the_ridge_point() -> None:
    """The ridge point of ROOF is at 5 FLOP/byte: 2.5 to 10 is near."""

    def made(candidates: int, speed: float, intensity: float) -> dict[str, Any]:
        config = {"block_size": 4, "blocks": 1, "activation": 1.0, "candidates": candidates}
        return {"config": config, "tokens_per_second": speed, "tpf": 2.0, "intensity": intensity}

    baseline = made(0, 10, 0.5) | {"config": None}
    points = [baseline, made(1, 30, 2.4), made(2, 15, 9.9), made(3, 20, 2.6), made(4, 25, 10.1)]
    first, _, second, numbers = verdict(points, ROOF).splitlines()
    assert first.startswith("fastest: n=4 K=1 c=1")
    assert second.startswith("fastest near the ridge point: n=4 K=1 c=3")
    assert "2.00* x AR" in numbers
    assert "0.52 of the ridge point" in numbers
    _, _, second, _ = verdict([baseline, points[1], points[4]], ROOF).splitlines()
    assert second.startswith("none is near the ridge point; the nearest: n=4 K=1 c=4")


@pytest.mark.slow
def test_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["search.block_sizes=[8]", "search.candidates=[0,2]", "search.blocks=[1]", "search.stream_mb=4"]
    args = ["recipe=sweeps/jacobi_config", "target=tiny", "limit=1", "search.matrix=64", *small]
    monkeypatch.setattr(sys, "argv", ["eval.search", *args, f"hydra.run.dir={tmp_path}"])
    main()
    found = json.loads((tmp_path / "search.json").read_text())
    assert [p["config"] and p["config"]["candidates"] for p in found["points"]] == [None, 0, 2]
    assert found["run"]["config"]["search"]["block_sizes"] == [8]
    assert found["roofline"]["ridge_point"] > 0
    assert (tmp_path / "plots" / "roofline.png").is_file()
    assert "fastest: n=8" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["eval.search", "target=tiny", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit):
        main()
    assert "recipe=sweeps/jacobi_config" in capsys.readouterr().err
