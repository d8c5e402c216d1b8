"""What the report asks of engine and simulator: whose turn it is, what is warm-up, whose costs and seeds are whose."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from dspec.config.compose import composed
from dspec.models.temperatures import Calibration
from dspec.serving.simulator import Outcome
from dspec.serving.step_table import AdditiveSteps
from dspec.serving.traces import Round, Trace
from eval.serving import load_report, variants
from eval.serving.costs import EVEN, PLAIN, RAGGED, EngineCosts, MeasuredSteps, Prefill
from eval.serving.lanes import Counts
from eval.serving.load_report import LoadReport
from eval.serving.settings import ServingSettings

DEFAULTS: dict[str, Any] = {
    key: value for key, value in composed("serving", ["recipe=sweeps/serving_load"]).serving.items() if key[0] != "_"
}
TABLE = AdditiveSteps(
    bias_seconds=1.0, requests=(1, 4), alpha_seconds=(0.1, 0.2), tokens=(1, 32), theta_seconds=(0.0, 0.5)
)
COSTS = EngineCosts(
    {
        kind: MeasuredSteps(grid={(2, 0): 1.0 + i, (2, 1): 2.0 + i}, fitted=None)
        for i, kind in enumerate((PLAIN, EVEN, RAGGED))
    },
    {kind: Prefill(float(i), 0.0) for i, kind in enumerate((PLAIN, EVEN, RAGGED))},
)
NAMES = ["AR", "static 3", "threshold", "synchronous", "asynchronous"]


def serving(**change: Any) -> ServingSettings:
    return ServingSettings(**DEFAULTS | {"static": [3]} | change)


class Lane:
    """A decoder's turns without a model; a scheduler works long in the warm-up, and 2 us in each slice."""

    order: ClassVar[list[str]] = []

    def __init__(self, decoder: Any, prompts: Any, seats: int, now: Any) -> None:
        policy = getattr(decoder, "policy", None)
        self.timed = None if policy is None else policy.scheduler
        inner = "AR" if self.timed is None else self.timed.settings()
        self.name = inner if inner == "AR" else f"{inner['scheduler']}{inner.get('length', '')}"
        self.rates, self.answers, self.seats = [(0, 99.0)], {0: [7]}, seats

    def warm_up(self, finished: int) -> None:
        assert finished == self.seats == 2
        if self.timed is not None:
            self.timed.seconds, self.timed.rounds = 5.0, 5

    def advance(self, tokens: int) -> Counts:
        self.order.append(self.name)
        self.rates.append((1, 4.0))
        if self.timed is not None:
            self.timed.seconds, self.timed.rounds = self.timed.seconds + 2e-6, self.timed.rounds + 1
        return Counts(seconds=1.0, steps=1, tokens=tokens)


def test_variants_take_turns_after_their_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order rotates; nothing of the warm-up is left; steps are timed in every repeat."""
    monkeypatch.setattr(Lane, "order", [])
    monkeypatch.setattr(variants, "Lane", Lane)
    monkeypatch.setattr(variants, "DraftProposer", lambda draft: None)

    def time(samples: Any) -> None:
        Lane.order.append("timer")
        for kind in (PLAIN, EVEN, RAGGED):
            samples[kind, 2, 0].append((0, 1.0))

    monkeypatch.setattr(variants, "StepTimer", lambda *args, **options: SimpleNamespace(time=time))
    results, costs = variants.measure(
        *(None, None, []),  # type: ignore[arg-type]
        serving(repeats=3, profile_repeats=4),
        TABLE,
        concurrency=2,
        tokens=50,
        calibration=None,
        now=lambda: 0.0,
        advance=lambda count: None,
    )
    given = ["AR", "static3", "threshold", "synchronous", "asynchronous"]
    turns = [["timer", "timer", *given[k:], *given[:k]] for k in range(3)]
    assert Lane.order == [name for turn in turns for name in turn]
    assert list(results) == NAMES
    for name, one in results.items():
        assert [s.tokens for s in one.slices] == [50] * 3
        assert one.users == [4.0] * 3
        assert one.answers == {0: [7]}
        assert one.scheduler_microseconds == (None if name == "AR" else pytest.approx(2.0))
    assert costs.steps[PLAIN].grid == pytest.approx({(2, 0): 1.0})


def test_each_variant_is_predicted_with_its_own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static lengths with those of even steps, what reads confidences with ragged ones; warmed up as the engine is."""
    calls: dict[int, Any] = {}

    def simulate(source: Any, scheduler: Any, table: Any, load: Any, **options: Any) -> Outcome:
        calls[len(calls)] = (scheduler.settings(), table, load.max_in_flight, options)
        return Outcome()

    monkeypatch.setattr(variants, "simulate", simulate)
    given: dict[str, Any] = {"concurrency": 2, "seed": 5}
    outcomes = variants.predict(None, serving(simulated_requests=3), TABLE, COSTS, **given)  # type: ignore[arg-type]
    assert list(outcomes) == NAMES
    kinds = [PLAIN, EVEN, RAGGED, RAGGED, RAGGED]
    for kind, (_, table, seats, options) in zip(kinds, calls.values(), strict=True):
        assert table is COSTS.steps[kind]
        assert options["prefill_seconds"] is COSTS.prefill[kind]
        assert (seats, options["warmup"], options["requests"], options["seed"]) == (2, 2, 8, 5)
    assert calls[0][0] == {"scheduler": "static", "length": 0}


def report(monkeypatch: pytest.MonkeyPatch, settings: ServingSettings) -> LoadReport:
    """Without a model. The drafter is calibrated for temperature 1."""

    def prompts(items: Any, *, use: str, sampling: Any, **options: Any) -> Any:
        return [SimpleNamespace(use=use, request=SimpleNamespace(sampling=sampling))]

    monkeypatch.setattr(load_report, "served_prompts", prompts)
    fitted = SimpleNamespace(calibration=Calibration((2.0,) * 3, temperature=1.0, top_p=1.0))
    target, draft = SimpleNamespace(device=SimpleNamespace(type="cpu")), SimpleNamespace(metadata=fitted)
    made: Any = {"seed": 0}
    return LoadReport(target, draft, [], None, settings, made=made, drafter="toy")  # type: ignore[arg-type]


def test_what_is_recorded_is_not_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = report(monkeypatch, serving())
    assert [prompt.use for prompt in (*one.served, *one.recorded)] == ["served", "recorded"]  # type: ignore[attr-defined]
    assert one.calibration is not None
    assert report(monkeypatch, serving(temperature=0.5)).calibration is None


def test_slices_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant's slices are its answers' tokens together; replayed confidences are calibrated as the engine's."""
    asked: dict[str, Any] = {}

    def measure(*args: Any, tokens: int, **options: Any) -> Any:
        asked["tokens"] = tokens
        return {}, COSTS

    def predict(source: Any, *args: Any, **options: Any) -> Any:
        asked["confidence"] = source.answer(np.random.default_rng(0)).draft(1)[0]
        return {}

    monkeypatch.setattr(load_report, "measure", measure)
    monkeypatch.setattr(load_report, "predict", predict)
    one = report(monkeypatch, serving(concurrency=[2], requests=10, turnovers=0.0, repeats=4))
    traces = [Trace((Round((1.0, 1.0, 1.0), 0, 1, 3),) * n) for n in (7, 23)]  # 16 tokens on average
    recording: Any = SimpleNamespace(traces=traces, about=SimpleNamespace(slots=3))
    meter: Any = SimpleNamespace(expect=lambda *a, **o: None, phase=lambda *a: None, advance=lambda n: None)
    one._cells(meter, recording, TABLE)
    assert asked["tokens"] == 40
    assert asked["confidence"] == pytest.approx(1 / (1 + np.exp(-0.5)))


def test_schedulers_read_the_table_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the one measured here, which is written either way."""
    named = tmp_path / "named.json"
    named.write_text(json.dumps(TABLE.to_dict()))
    for steps in (None, str(named)):
        one, read = report(monkeypatch, serving(steps=steps, overhead_repeats=1)), []
        measured = AdditiveSteps(
            bias_seconds=7.0, requests=(1,), alpha_seconds=(0.0,), tokens=(1, 2), theta_seconds=(0.0, 0.1)
        )
        monkeypatch.setattr(one, "_record", lambda: SimpleNamespace(write=lambda path: None))
        monkeypatch.setattr(one, "_costs", lambda made=measured: SimpleNamespace(table=lambda: made, to_dict=dict))

        def cells(meter: Any, recording: Any, table: Any, read: list[Any] = read) -> Any:
            read.append(table.bias_seconds)
            return [], {}, {}

        monkeypatch.setattr(one, "_cells", cells)
        meter: Any = SimpleNamespace(phase=lambda *a: None)
        one(meter, tmp_path)
        assert read == [7.0 if steps is None else 1.0]
        assert json.loads((tmp_path / "sps.json").read_text())["bias_seconds"] == 7.0
