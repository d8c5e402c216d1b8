"""MATH: boxes, equivalence as math-verify has it, time limits, and the problems that must not count twice."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from data.rows import math500_rows, math_rows, same_problem
from dspec.errors import UserError
from eval.benchmarks import equivalence
from eval.benchmarks.competition import Math, Math500, last_boxed

SETTINGS: dict[str, Any] = {
    "shots": 0, "chat": True, "timeout_s": 20.0, "limit": None, "seed": None, "max_new_tokens": 8,
}  # fmt: skip
HANG = "10^{10^{10^{10}}}"


def write(path: Path, *rows: dict[str, str]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(problem: str, answer: str = "5") -> dict[str, str]:
    return {"problem": problem, "solution": f"so \\boxed{{{answer}}}.", "answer": answer}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    write(tmp_path / "math_train.jsonl", *(row(f"train {i}") for i in range(9)), row("both\n"), row("[asy] picture"))
    write(
        tmp_path / "math_test.jsonl", row("one", "\\frac{1}{2}"), row("both"), row("two  five"), row("three", "70\\%")
    )
    write(tmp_path / "math500.jsonl", row("two five"), row("three", "70\\%"))
    return tmp_path


@pytest.fixture(scope="module")
def same() -> equivalence.Equivalence:
    pytest.importorskip("math_verify")
    return equivalence.Equivalence(timeout_s=20.0)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("so \\boxed{5}.", "5"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\left\\{1, \\frac{2}{3}\\right\\}} done }", "\\left\\{1, \\frac{2}{3}\\right\\}"),
        ("\\boxed{\\}}", "\\}"),
        ("$\\boxed 2$", "2"),
        ("\\fbox{7}", "7"),
        ("\\boxed {8}", "8"),
        ("\\boxed{\\text{a}\nb}", "\\text{a}\nb"),
        ("\\boxed{1", None),
        ("\\boxed{", None),
        ("\\boxed", None),
        ("the answer is 5", None),
        ("", None),
        ("\\boxed{}", ""),
        ("\\boxed{a\\", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("70", "70\\%", True),
        ("70\\%", "70", True),
        ("70\\%", "70%", True),
        ("70\\%", "71", False),
        ("70\\%", "7000", False),
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac12", "\\dfrac{2}{4}", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)", True),
        ("(3,4)", "(4,3)", False),
        ("10,080", "10080", True),
        ("\\$5", "5", True),
        ("90^\\circ", "90", True),
        ("x=5", "5", True),
        ("\\text{Evelyn}", "\\text{Carla}", False),
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("-\\frac{1}{3}", "\\frac{1}{3}", False),
        ("5", "", False),
        ("5", "\\frac{", False),
        ("5", "} \\input{/etc/passwd}", False),
        ("5", "ｆｉｖｅ", False),
    ],
)
def test_equivalence(same: equivalence.Equivalence, gold: str, answer: str, equal: bool) -> None:
    assert same(gold, answer) == equal


@pytest.mark.slow
def test_a_comparison_without_end_is_undecided(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not equivalent then, and counted."""
    pytest.importorskip("math_verify")
    pause = "        if answer == 'hang':\n            __import__('time').sleep(600)\n"
    hanging = equivalence._SCRIPT.read_text().replace("        bare = [", pause + "        bare = [")
    assert "sleep" in hanging
    (tmp_path / "script.py").write_text(hanging)
    monkeypatch.setattr(equivalence, "_SCRIPT", tmp_path / "script.py")
    benchmark = Math(without_math500=False, **SETTINGS | {"timeout_s": 4.0})
    item = benchmark.items()[0]
    assert benchmark.score(item, "\\boxed{0.5}")["equivalent"]
    assert benchmark.score(item, "\\boxed{hang}") == {"equivalent": False, "exact match": False, "undecided": True}
    right = {"equivalent": True, "exact match": False, "undecided": False}
    assert benchmark.score(item, "\\boxed{\\frac{2}{4}}") == right


@pytest.mark.slow
def test_an_expression_that_grows_without_end_is_wrong_in_time(same: equivalence.Equivalence) -> None:
    start = time.monotonic()
    short = equivalence.Equivalence(timeout_s=8.0)
    short("\\frac12", "0.5")  # starting is not on the clock
    assert not short("5", HANG)
    assert time.monotonic() - start < 120
    assert short("\\frac12", "0.5")


def test_without_math_verify_the_mend_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"dspec\[math\]"):
        Math500(**SETTINGS)


def test_scores_read_the_last_box(folder: Path) -> None:
    pytest.importorskip("math_verify")
    benchmark = Math(without_math500=False, **SETTINGS)
    item = benchmark.items()[0]
    found = {
        answer: tuple(benchmark.score(item, answer).values())
        for answer in ("\\boxed{3}, no, \\boxed{0.5}", "\\boxed{\\frac{1}{2} }", "\\frac{1}{2}")
    }
    assert list(found.values()) == [(True, False, False), (True, True, False), (False, False, False)]


def test_what_is_in_math500_can_be_left_out(folder: Path) -> None:
    pytest.importorskip("math_verify")
    every, rest = (Math(without_math500=without, **SETTINGS) for without in (False, True))
    small = Math500(**SETTINGS)
    assert [item.prompt.split("\n")[0] for item in every.items()] == ["one", "both", "two  five", "three"]
    assert [item.prompt.split("\n")[0] for item in rest.items()] == ["one", "both"]
    digests = [{item.id.split("/")[-1] for item in b.items()} for b in (rest, small)]
    assert not digests[0] & digests[1]
    assert (rest.source()["rows"], small.source()["rows"]) == (2, 2)


def test_worked_examples_leave_out_the_double_and_drawings(folder: Path) -> None:
    pytest.importorskip("math_verify")
    benchmark = Math500(**SETTINGS | {"shots": 11, "chat": False})
    prompt = benchmark.items()[0].prompt
    assert prompt.count("Problem:\n") == 9 + 1
    assert "both" not in prompt
    assert "asy" not in prompt
    assert prompt.endswith("Problem:\ntwo five\n\nSolution:")
    assert "so \\boxed{5}.\n\nProblem:" in prompt
    assert benchmark.stop == ("Problem:",)


def test_a_solution_without_box_is_named(folder: Path) -> None:
    pytest.importorskip("math_verify")
    write(folder / "math_test.jsonl", {"problem": "odd one", "solution": "5"})
    with pytest.raises(UserError, match="odd one"):
        Math(without_math500=False, **SETTINGS)


@pytest.mark.usefixtures("real_data")
def test_real_math(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    rest, small = Math(without_math500=True, **SETTINGS), Math500(**SETTINGS | {"shots": 4})
    assert (len(rest.items()), len(small.items())) == (4500, 500)
    train = {same_problem(r["problem"]) for r in math_rows("train").rows}
    worked = {same_problem(p.split("\n\nSolution:")[0]) for p in small._worked.split("Problem:\n")[1:]}
    assert len(worked) == 4
    assert worked <= train
    assert not worked & {same_problem(r["problem"]) for r in math_rows("test").rows}
    solved = [last_boxed(r["solution"]) for r in math500_rows().rows]
    differing = sum(gold != box for gold, box in zip(small._gold.values(), solved, strict=True))
    assert differing < 25  # the field and the solution's box agree up to layout


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
def test_agrees_with_math_verify_on_real_references(
    monkeypatch: pytest.MonkeyPatch, same: equivalence.Equivalence
) -> None:
    from math_verify import parse, verify

    golds = [r["answer"] for r in math500_rows().rows[:120] if "%" not in r["answer"]]
    pairs = list(zip(golds, [*golds[1:], golds[0]], strict=True))
    pairs += [(gold, gold.replace("\\frac", "\\dfrac").replace("\\left", "")) for gold in golds]
    pairs += [(gold, f"{gold}+0") for gold in golds[:40]]
    for gold, answer in pairs:
        theirs = verify(*(parse(f"$\\boxed{{{text}}}$") for text in (gold, answer)))
        equal = "".join(gold.split()) == "".join(answer.split())
        assert same(gold, answer) == (theirs or equal), (gold, answer)
    assert len(pairs) >= 200
