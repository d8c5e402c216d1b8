"""The embedded benchmarks: verdicts on problems and functions, contained or under limits alone, and settings."""

import re
from typing import Any

import pytest

from data.embedded.corpus import generate
from data.embedded.function_templates import TEMPLATES
from dspec.config.compose import composed, instantiate
from dspec.errors import UserError
from eval.benchmarks.embedded import Functions, Problems, passes, solves
from eval.sandbox import sandbox
from eval.sandbox.judge import Judge

PROMPT = 'def double(xs):\n    """Return xs doubled."""'
TESTS = ("assert double([1, 2]) == [2, 4]", "assert double([]) == []")
RIGHT = "    return [x * 2 for x in xs]"
LIMITS_ALONE = "limits alone (allow_unsafe_code)"


def shipped_judge(**changes: Any) -> Judge:
    """That of conf/benchmark/tiny.yaml."""
    cfg = composed(
        "eval", ["benchmark=tiny", *(f"benchmark.functions.judge.sandbox.{k}={v}" for k, v in changes.items())]
    )
    judge: Judge = instantiate(cfg.benchmark.functions.judge)
    return judge


@pytest.fixture
def uncontained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing contains a program."""
    monkeypatch.setattr(sandbox, "available_layers", lambda: ())


def changed(body: str) -> str:
    """Raise the last whole number by one, or lengthen the last string where there is none."""
    *_, last = re.finditer(r'\d+|"[^"]*"', body)
    new = str(int(last[0]) + 1) if last[0].isdigit() else last[0][:-1] + 'q"'
    return body[: last.start()] + new + body[last.end() :]


def test_problem_references_solve_and_corrupted_ones_do_not() -> None:
    for example in generate(task="problems", split="test", count=500, seed=3):
        assert solves(example.response, example.answer)
        assert not solves(f"{example.response}1", example.answer)
        assert not solves(example.response.replace("####", "##"), example.answer)
        for total, value in re.findall(r"(\d+(?: [-+*/] \d+)+) = (\d+)", example.response):
            assert eval(total) == int(value)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("#### 7\n#### 1,234", "1234", True),
        ("#### -5", "-5", True),
        ("#### 007", "7", True),
        ("#### " + "9" * 5000, "9", False),  # int() refuses so many digits
        ("####", "0", False),
        ("", "0", False),
    ],
)
def test_problems_are_solved_by_the_last_answer(text: str, answer: str, right: bool) -> None:
    assert solves(text, answer) == right


@pytest.mark.slow
def test_every_function_template_passes_and_a_wrong_body_fails(judge: Judge) -> None:
    examples = {e.template: e for e in generate(task="functions", split="test", count=400, seed=0)}
    assert set(examples) == {template.name for template in TEMPLATES}
    for e in examples.values():
        assert passes(judge, e.prompt, e.response, e.tests)
        assert not passes(judge, e.prompt, changed(e.response), e.tests)


@pytest.mark.parametrize(
    "body",
    [
        "    import os\n    return [2, 4]",
        "    return [x * 2 for x in xs] + [].__class__()",
        "    return open('/etc/passwd')",
        "    return xs and open or [x * 2 for x in xs]",
        "    return eval('[2, 4]')",
        "    return getattr(xs, 'copy')()",
        "    return __builtins__",
        "    print('ok')\n    return [x * 2 for x in xs]",
        "    return '{0.__class__}'.format(xs)",
        "    global double\n    return [x * 2 for x in xs]",
        "    yield 1",
        "    try:\n        return 1 / 0\n    except ZeroDivisionError:\n        return [2, 4]",
        RIGHT + "\n\ndef double(xs):\n    return [2, 4]",
        RIGHT + "\n\nassert False",
        "    def __eq__(a, b):\n        return True\n    return __eq__",
        "    return (" + "-" * 3000 + "1)",
        "return [x * 2 for x in xs]",
        "    return [x * 2 for x in xs\x00]",
    ],
)
def test_a_body_off_the_whitelist_is_never_run(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = shipped_judge()
    monkeypatch.setattr(Judge, "passes", lambda *_, **__: pytest.fail("was run"))
    assert not passes(judge, PROMPT, body, TESTS)


@pytest.mark.slow
@pytest.mark.usefixtures("uncontained")
@pytest.mark.parametrize(
    "body",
    [
        "    while True:\n        pass",
        "    return 9 ** 9 ** 9",
        '    return "a" * 10 ** 12',
        "    return [0] * 10 ** 11",
        '    return f"{1:>{10 ** 9}}"',
        "    return double(xs)",
        "    return list(range(10 ** 12))",
    ],
)
def test_a_body_that_eats_time_or_memory_fails_even_where_nothing_contains_it(body: str) -> None:
    judge = shipped_judge(cpu_seconds=1)
    assert judge.level == LIMITS_ALONE
    assert not passes(judge, PROMPT, body, TESTS)


@pytest.mark.parametrize("contained", [True, False])
def test_functions_are_judged_in_the_best_that_there_is_and_the_results_say_which(
    contained: bool, judge: Judge, request: pytest.FixtureRequest
) -> None:
    level = judge.level
    if not contained:
        request.getfixturevalue("uncontained")
        level = LIMITS_ALONE
    benchmark = Functions(judge=shipped_judge(), split="test", count=1, max_new_tokens=8, seed=0)
    assert benchmark.source()["sandbox"] == f"whitelist of syntax+{level}"
    (item,), (example,) = benchmark.items(), generate(task="functions", split="test", count=1, seed=0)
    assert benchmark.score(item, example.response) == {"pass@1": True}
    assert benchmark.score(item, changed(example.response)) == {"pass@1": False}
    assert benchmark.score(item, "") == {"pass@1": False}


def test_functions_run_in_the_judge_and_each_text_once(judge: Any) -> None:
    benchmark = Functions(judge=judge, split="test", count=2, max_new_tokens=8, seed=0)
    one, two = benchmark.items()
    for item, answer in ((one, RIGHT), (one, RIGHT), (two, RIGHT), (one, RIGHT + " "), (two, RIGHT)):
        benchmark.score(item, answer)
    assert len(judge.programs) == 3
    verdicts = benchmark.score(one, RIGHT)
    verdicts["pass@1"] = "spoilt"
    assert benchmark.score(one, RIGHT) != verdicts


def test_no_tests_prove_nothing(judge: Judge) -> None:
    assert passes(judge, PROMPT, RIGHT, TESTS)
    assert not passes(judge, PROMPT, RIGHT, ())


def test_source_changes_with_the_data() -> None:
    problems = [
        Problems(split="test", count=3, unseen=unseen, max_new_tokens=8, seed=seed)
        for unseen in (True, False)
        for seed in (0, 1)
    ]
    assert len({p.source()["sha256"] for p in problems}) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 0}, "count=0"),
        ({"count": "abc"}, "count=abc"),
        ({"seed": "x"}, "seed=x"),
        ({"unseen": "no"}, "unseen=no"),
        ({"split": "train"}, "split=train has no held-out prompts; use one of test, calibration"),
        ({"split": "calibration", "unseen": True}, "unseen templates are in split=test only"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Problems(**({"split": "test", "count": 1, "unseen": False, "max_new_tokens": 8, "seed": 0} | change))


def test_prompts_that_choose_settings_are_in_no_reported_figure() -> None:
    """None of benchmark=tiny_tuning is a prompt of benchmark=tiny, whatever the seeds."""
    tuning = composed("eval", ["benchmark=tiny_tuning"]).benchmark
    assert {name: (node.split, node.seed) for name, node in tuning.items()} == {
        "tuning_problems": ("calibration", 0), "tuning_functions": ("calibration", 0),
    }  # fmt: skip
    assert tuning.tuning_functions.judge == composed("eval", ["benchmark=tiny"]).benchmark.functions.judge
    for node, name in ((tuning.tuning_problems, "problems"), (tuning.tuning_functions, "functions")):
        reported = composed("eval", ["benchmark=tiny"]).benchmark[name]
        assert (reported.split, reported.max_new_tokens) == ("test", node.max_new_tokens)
        chosen = {item.prompt for item in instantiate(node, count=150).items()}
        assert len(chosen) == 150
        for seed in (0, 1):
            other = instantiate(reported, count=500, seed=seed)
            assert not chosen & {item.prompt for item in other.items()}
            assert {example.split("/")[1] for example in (item.id for item in other.items())} == {"test"}
