"""The benchmarks' own solutions pass, in eval.run as in the judge, but for the failures that results.json names."""

import gzip
import json
import os
import re
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dspec.config.compose import composed, instantiate
from eval.sandbox.judge import Judge, function_under_test
from eval.sandbox.sandbox import Sandbox, available_layers

needs_landlock = pytest.mark.skipif("landlock" not in available_layers(), reason="no Landlock")
ROOT = Path(__file__).parent.parent.parent
FILES = {
    "humaneval": "humaneval",
    "mbpp": "mbpp",
    "humanevalplus": "humanevalplus_v0.1.10",
    "mbppplus": "mbppplus_v0.2.0",
}
Check = Callable[..., None]


def judge() -> Judge:
    limits = {"wall_seconds": 20, "cpu_seconds": 90, "memory_mb": 512, "output_bytes": 1 << 20, "processes": 1}
    return Judge(Sandbox(**limits, allow_unsafe_code=False))


def rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(Path(os.environ["DSPEC_DATA"]) / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _humaneval(j: Judge, row: dict[str, Any]) -> bool:
    test, name = f"{row['test']}\ncheck({row['entry_point']})\n", row["entry_point"]
    honest = j.passes(
        program=row["prompt"] + row["canonical_solution"], test=test, entry_point=name, trusted=row["prompt"]
    )
    return honest.passed


def _mbpp(j: Judge, row: dict[str, Any]) -> bool:
    test = "\n".join([row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]])
    return j.passes(program=row["code"], test=test, entry_point=function_under_test(row["code"], test)).passed


@pytest.fixture
def check(eval_run: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """`python -m eval.run benchmark=<name>` with a model that answers every prompt by its canonical solution, on each
    `every`-th task and those in `also`: the `failures` fail, and results.json names them."""

    def call(name: str, *, every: int, also: Collection[str], failures: set[str]) -> None:
        if name != "humaneval":
            pytest.importorskip("lm_eval" if name == "mbpp" else "evalplus")
        chosen = [
            row for i, row in enumerate(rows(FILES[name])) if i % every == every // 2 or str(row["task_id"]) in also
        ]
        shots = [row for row in rows("mbpp") if row["task_id"] in (2, 3, 4)] if name == "mbpp" else []
        with gzip.open(tmp_path / f"{FILES[name]}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in [*shots, *chosen])
        monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
        settings = [f"benchmark={name}", f"benchmark.{name}.max_new_tokens=9999"]
        made = instantiate(composed("eval", settings).benchmark[name])
        scripted({item.prompt: _solution(made._rows[item.id]) for item in made.items()})
        found = eval_run(*settings)
        failed = {s["id"] for s in found.samples if not s["verdicts"][made.quality]}
        assert failed == failures
        named = found.run["benchmarks"][name].get("known_failures", {})
        assert failed <= set(named)
        assert len(found.samples) == len(made.items()) > 3
        assert found.rows[0]["quality"] == pytest.approx(1 - len(failed) / len(found.samples))

    return call


def _solution(row: dict[str, Any]) -> str:
    return row["canonical_solution"] if "canonical_solution" in row else f"{row['code']}\n[DONE]"


@pytest.mark.slow
@needs_landlock
@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize(("name", "also"), [("humaneval", ["HumanEval/38"]), ("mbpp", ["126", "367"])])
def test_some_reference_solutions_pass(check: Check, name: str, also: list[str]) -> None:
    check(name, every=41, also=also, failures=set())


@needs_landlock
@pytest.mark.usefixtures("real_data")
def test_solutions_that_share_names_or_objects_with_their_test_pass() -> None:
    j = judge()
    chosen = [row for row in rows("humaneval") if re.search("/(32|38|50)$", row["task_id"])]
    assert [row["task_id"] for row in chosen if not _humaneval(j, row)] == []
    chosen = [row for row in rows("mbpp") if row["task_id"] in (126, 367, 533, 596, 601, 927)]
    assert (len(chosen), [row["task_id"] for row in chosen if not _mbpp(j, row)]) == (6, [])


@needs_landlock
@pytest.mark.usefixtures("real_data")
def test_reference_solutions_fail_each_others_tests() -> None:
    """And the judge says no when it should: neighbours' solutions, renamed."""
    j, tasks = judge(), rows("humaneval")[:6]
    for row, other in pairwise(tasks):
        program = f"{other['prompt']}{other['canonical_solution']}\n{row['entry_point']} = {other['entry_point']}\n"
        test = f"{row['test']}\ncheck({row['entry_point']})\n"
        assert not j.passes(program=program, test=test, entry_point=row["entry_point"], trusted=row["prompt"]).passed


@pytest.mark.slow
@needs_landlock
@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize(
    ("name", "every", "failures"),
    [
        ("humaneval", 2, set()),
        ("mbpp", 6, set()),
        ("humanevalplus", 13, {"HumanEval/32"}),
        ("mbppplus", 13, {"Mbpp/255", "Mbpp/630"}),
    ],
)
def test_many_reference_solutions_pass(check: Check, name: str, every: int, failures: set[str]) -> None:
    """Parts of the data sets, to keep the suite short; `every=1` is all of them."""
    check(name, every=every, also=failures, failures=failures)
