"""HumanEval, infilling and MBPP: prompts, the program in an answer, and canonical solutions that pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspec.errors import UserError
from eval.benchmarks import mbpp as mbpp_module
from eval.benchmarks.base import Item
from eval.benchmarks.code import code_block, cut
from eval.benchmarks.humaneval import HumanEval, Infilling
from eval.benchmarks.mbpp import Mbpp
from eval.benchmarks.mt_bench import MtBench

Write = Callable[..., None]
SETTINGS: dict[str, Any] = {"limit": None, "seed": None, "max_new_tokens": 8}
ADD = {
    "task_id": "HumanEval/0",
    "entry_point": "add",
    "prompt": 'from typing import List\n\n\ndef add(xs: List[int]) -> int:\n    """Sum."""\n',
    "canonical_solution": "    return sum(xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
FILL = ADD | {
    "task_id": "SingleLineInfilling/HumanEval/0/L0",
    "prompt": ADD["prompt"] + "    total = 0\n    for x in xs:\n",
    "canonical_solution": "        total += x\n",
    "suffix": "    return total\n",
}


def mbpp_row(number: int, **other: Any) -> dict[str, Any]:
    tests = [f"assert f({i}) == {i}+K" for i in range(3)]
    row = {"task_id": number, "text": f"Add K. #{number}#", "code": "def f(x):\r\n  return x+K", "test_list": tests}
    return row | {"test_setup_code": "K = 1"} | other


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("Sure:\n```\nx = 1\ny\n```\nand\n```python\nz\n```", "x = 1\ny"),
        ("```py\nx = 1", "x = 1"),
        ("```python\n```", None),
        ("- a\n  ```python\n  x\n  ```", "  x"),
        ("x = 1", None),
        ("inline ``` no", None),
    ],
)
def test_code_block(text: str, block: str | None) -> None:
    assert (code_block(text) or None) == block


def test_cut_takes_the_first_stop_string() -> None:
    assert cut("a\ndef b\nif c", ("\nif", "\ndef")) == "a"
    assert cut("abc", ("\nif",)) == "abc"
    assert cut("\nif", ("\nif",)) == ""
    assert cut("abc", ()) == "abc"


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("    return sum(xs)\n", True),
        ("    return sum(xs)\ndef other():\n    syntax error here", True),  # cut at the stop string
        ("    return sum(xs)\nprint(add([1]))", True),
        ("    return len(xs)\n", False),
        ("return sum(xs)", False),
        ("", False),
        ("    pass\n", False),
    ],
)
def test_humaneval_completes(folder: Path, write: Write, judge: Any, answer: str, passed: bool) -> None:
    write(folder / "humaneval.jsonl", ADD)
    benchmark = HumanEval(judge=judge, chat=False, **SETTINGS)
    (item,) = benchmark.items()
    assert item == Item("HumanEval/0", ADD["prompt"])
    assert benchmark.score(item, answer) == {"pass@1": passed}


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("Here:\n```python\ndef add(xs: List[int]) -> int:\n    return sum(xs)\n```\nprint this", True),
        ("```python\n    return sum(xs)\n```", True),  # the body alone
        ("def add(xs):\n    return sum(xs)", True),
        ("```python\ndef plus(xs):\n    return sum(xs)\n```", False),
        ("I cannot.", False),
        ("", False),
    ],
)
def test_humaneval_in_chat(folder: Path, write: Write, judge: Any, answer: str, passed: bool) -> None:
    write(folder / "humaneval.jsonl", ADD)
    benchmark = HumanEval(judge=judge, chat=True, **SETTINGS)
    (item,) = benchmark.items()
    assert ADD["prompt"].strip() in item.prompt
    assert benchmark.stop == ()
    assert benchmark.score(item, answer) == {"pass@1": passed}


@pytest.mark.parametrize(
    ("chat", "answer", "passed", "exact"),
    [
        (False, "        total += x\n    return 0", True, True),  # the first line is taken
        (False, "        total = total + x", True, False),
        (False, "        total -= x", False, False),
        (False, "total += x", False, False),
        (False, "", False, False),
        (True, "```python\n        total += x\n```", True, True),
        (True, "```python\ntotal += x\n```", True, True),  # gets the gap's indentation, which the prompt shows
        (True, "total = total + x", True, False),
        (True, "", False, False),
    ],
)
def test_infilling(folder: Path, write: Write, judge: Any, chat: bool, answer: str, passed: bool, exact: bool) -> None:
    write(folder / "humaneval_infilling_single_line.jsonl", FILL)
    benchmark = Infilling(judge=judge, chat=chat, **SETTINGS)
    (item,) = benchmark.items()
    assert (FILL["suffix"].strip() in item.prompt) == chat
    assert benchmark.score(item, answer) == {"pass@1": passed, "exact match": exact}


def test_mbpp_tests_only_the_test_split(folder: Path, write: Write, judge: Any) -> None:
    pytest.importorskip("lm_eval")
    write(folder / "mbpp.jsonl", *(mbpp_row(n) for n in (1, 2, 3, 4, 10, 11, 510, 511, 974)))
    benchmark = Mbpp(judge=judge, shots=3, chat=False, **SETTINGS)
    assert [item.id for item in benchmark.items()] == ["mbpp/011", "mbpp/510"]
    assert benchmark.stop == ("[DONE]",)
    prompt = benchmark.items()[0].prompt
    assert [prompt.count(f"#{n}#") for n in (1, 2, 3, 4, 10, 11)] == [0, 1, 1, 1, 0, 1]
    assert prompt.count("[DONE]") == 3
    assert prompt.endswith("assert f(2) == 2+K\n[BEGIN]\n")


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("def f(x):\r\n  return x+K\r\n[DONE]\nmore", True),
        ("```python\ndef f(x):\n  return x+K\n```", True),
        ("def f(x): return x+1\n", True),
        ("def f(x): return x", False),
        ("def g(x): return x+1", False),
        ("", False),
    ],
)
def test_mbpp_runs_code_then_set_up_then_tests(
    folder: Path, write: Write, judge: Any, answer: str, passed: bool
) -> None:
    pytest.importorskip("lm_eval")
    write(folder / "mbpp.jsonl", *(mbpp_row(n) for n in (2, 3, 4, 11)))
    benchmark = Mbpp(judge=judge, shots=3, chat=False, **SETTINGS)
    assert benchmark.score(benchmark.items()[0], answer) == {"pass@1": passed}


def test_mbpp_in_chat(folder: Path, write: Write, judge: Any) -> None:
    pytest.importorskip("lm_eval")
    write(folder / "mbpp.jsonl", *(mbpp_row(n) for n in (2, 3, 4, 11)))
    benchmark = Mbpp(judge=judge, shots=0, chat=True, **SETTINGS)
    (item,) = benchmark.items()
    assert (benchmark.chat, benchmark.stop) == (True, ())
    assert item.prompt.startswith("Add K. #11# Answer with the whole function")
    assert item.prompt.endswith("```python\nassert f(0) == 0+K\nassert f(1) == 1+K\nassert f(2) == 2+K\n```")
    assert "[BEGIN]" not in item.prompt
    assert benchmark.score(item, "Sure:\n```python\ndef f(x):\n    return x+K  # [DONE]\n```\nDone.")["pass@1"]
    assert not benchmark.score(item, "```python\ndef f(x):\n    return x\n```")["pass@1"]
    with pytest.raises(UserError, match=r"benchmark\.mbpp\.shots=0"):
        Mbpp(judge=judge, shots=3, chat=True, **SETTINGS)


def test_mbpp_prompt_is_lm_evals(real_data: Path, judge: Any) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.utils import apply_template

    benchmark, task = Mbpp(judge=judge, shots=3, chat=False, **SETTINGS), mbpp_module.lm_eval_task("mbpp")
    assert len(benchmark.items()) == 500
    row = benchmark._rows["mbpp/011"]
    own = apply_template(task["doc_to_text"], row)
    assert benchmark.items()[0].prompt.endswith(f"\n\n{own}")
    source = (Path(mbpp_module.importlib.util.find_spec("lm_eval").origin).parent / "tasks/mbpp/utils.py").read_text()  # type: ignore[union-attr, arg-type]
    scope: dict[str, Any] = {}
    exec(source[source.index("def list_fewshot_samples") :], scope)  # its module loads a metric from the Hub
    examples = scope["list_fewshot_samples"]()
    shown = [apply_template(task["doc_to_text"], e) + apply_template(task["doc_to_target"], e) for e in examples]
    assert benchmark._worked == "".join(f"{text}\n\n" for text in shown)


def test_bad_mbpp_settings_are_named(folder: Path, write: Write, judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "mbpp.jsonl", mbpp_row(11))
    with pytest.raises(UserError, match="shots=4"):
        Mbpp(judge=judge, shots=4, chat=False, **SETTINGS)
    if mbpp_module.importlib.util.find_spec("lm_eval"):
        with pytest.raises(UserError, match="no task 2"):
            Mbpp(judge=judge, shots=1, chat=False, **SETTINGS)
    monkeypatch.setattr(mbpp_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"dspec\[lm-eval\]"):
        Mbpp(judge=judge, shots=3, chat=False, **SETTINGS)


def test_mt_bench_asks_first_turns_and_judges_nothing(folder: Path, write: Write) -> None:
    rows = [{"question_id": 81, "turns": ["one", "two"]}, {"prompt_id": 82, "prompt": ["three", "four"]}]
    write(folder / "mt_bench.jsonl", *rows)
    benchmark = MtBench(**SETTINGS)
    assert benchmark.items() == [Item("mt_bench/81", "one"), Item("mt_bench/82", "three")]
    assert benchmark.score(benchmark.items()[0], "text") == {}
    write(folder / "mt_bench.jsonl", rows[0], {"question_id": 5})
    with pytest.raises(UserError, match="line 2"):
        MtBench(**SETTINGS)


def test_missing_field_names_file_and_line(folder: Path, write: Write, judge: Any) -> None:
    write(folder / "humaneval.jsonl", ADD, {k: v for k, v in ADD.items() if k != "test"})
    with pytest.raises(UserError, match=r'humaneval\.jsonl, line 2: no "test"'):
        HumanEval(judge=judge, chat=False, **SETTINGS)


@pytest.mark.slow
def test_real_canonical_solutions_pass_and_broken_ones_fail(real_data: Path, judge: Any) -> None:
    settings = SETTINGS | {"limit": 12, "seed": 1}
    for benchmark in (HumanEval(judge=judge, chat=False, **settings), Infilling(judge=judge, chat=False, **settings)):
        for item in benchmark.items():
            canonical = benchmark._rows[item.id]["canonical_solution"]
            assert all(benchmark.score(item, canonical).values())
            assert not benchmark.score(item, "        raise ValueError")["pass@1"]
        json.dumps(benchmark.source())
    assert len(HumanEval(judge=judge, chat=False, **SETTINGS).items()) == 164
    assert len(Infilling(judge=judge, chat=False, **SETTINGS).items()) == 1033
    assert len(MtBench(**SETTINGS).items()) == 80


@pytest.mark.slow
def test_real_mbpp_solutions_pass(real_data: Path, judge: Any) -> None:
    pytest.importorskip("lm_eval")
    benchmark = Mbpp(judge=judge, shots=3, chat=False, limit=60, seed=1, max_new_tokens=8)
    wanted = [*benchmark.items(), Item("mbpp/367", "")]  # 367 has set-up code
    benchmark._rows |= Mbpp(judge=judge, shots=0, chat=False, **SETTINGS)._rows
    for item in wanted:
        assert benchmark.score(item, benchmark._rows[item.id]["code"] + "\n[DONE]")["pass@1"], item.id
        assert not benchmark.score(item, "pass")["pass@1"]
