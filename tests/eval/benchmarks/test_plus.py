"""HumanEval+ and MBPP+: evalplus's data, sanitising and oracles, and its verdicts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspec.errors import UserError
from eval.benchmarks import plus
from eval.benchmarks.plus import HumanEvalPlus, MbppPlus

pytest.importorskip("evalplus")

Write = Callable[..., None]
SETTINGS: dict[str, Any] = {"timeout_s": 30.0, "limit": None, "seed": None, "max_new_tokens": 8}
ADD = {
    "task_id": "HumanEval/0",
    "entry_point": "add",
    "prompt": 'def add(x, y):\n    """Sum."""\n',
    "contract": "",
    "canonical_solution": "    return x + y\n",
    "base_input": [[1, 2], [3, 4]],
    "plus_input": [[-1, 1], [0.1, 0.2]],
    "atol": 0,
}
ORACLES = {
    "similar_elements": [("return list(set(a) & set(b))", True), ("return list(set(a) | set(b))", False)],
    "sum_div": [
        ("return 0", True),
        ("return 1 + sum(i for i in range(2, a) if a % i == 0)", True),
        ("return 7", False),
    ],
    "are_equivalent": [("return 'whatever'", True), ("raise ValueError", False)],
    "check_str": [("return True", False)],
}


def mbpp(number: int, name: str, arguments: str, body: str, *inputs: list[Any]) -> dict[str, Any]:
    code = f"def {name}({arguments}):\n    {body}\n"
    row = {
        "task_id": f"Mbpp/{number}",
        "entry_point": name,
        "prompt": f'"""\n{name}\n"""\n',
        "canonical_solution": code,
    }
    return ADD | row | {"base_input": list(inputs[:1]), "plus_input": list(inputs[1:])}


MBPP = [
    mbpp(1000, "similar_elements", "a, b", "return tuple(set(a) & set(b))", [[1, 2], [2, 3]], [[1], [1]], [[], [5]]),
    mbpp(1001, "sum_div", "a", "return 1 + sum(i for i in range(2, a) if a % i == 0)", [8], [12], [7]),
    mbpp(1002, "are_equivalent", "a, b", "return a == b", [1, 1], [1, 2]),
    mbpp(1003, "check_str", "a", "return a or None", ["x"], ["y"], [""]),
]


@pytest.mark.slow
def test_prompts_stops_and_source(folder: Path, write: Write, judge: Any) -> None:
    from evalplus.provider.utility import EOS

    write(folder / "humanevalplus_v0.1.10.jsonl", ADD)
    raw, chat = (HumanEvalPlus(judge=judge, chat=chat, **SETTINGS) for chat in (False, True))
    assert raw.items()[0].prompt == 'def add(x, y):\n    """Sum."""\n'
    assert set(EOS) < set(raw.stop)
    assert "\nclass " in raw.stop
    assert chat.stop == ()
    assert ADD["prompt"].strip() in chat.items()[0].prompt
    source = raw.source()
    assert source["origin"] == str(folder / "humanevalplus_v0.1.10.jsonl")
    assert "HumanEval/32" in source["known_failures"]
    assert len(source["sha256"]) == 64
    json.dumps(source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "base", "whole"),
    [
        ("    return x + y\n", True, True),
        ("    return y + x\n\nprint(add(1, 2))", True, True),
        ("    return abs(x) + abs(y)\n", True, False),
        ("    return x - y\n", False, False),
        ("    return x + y + 1e-9\n", False, False),  # floats for integers
        ("    return (x + y) * (1 + 1e-15 * (type(x) is float))\n", True, True),  # floats have a tolerance of 1e-6
        ("", False, False),
        ("syntax (", False, False),
    ],
)
def test_base_and_plus(folder: Path, write: Write, judge: Any, answer: str, base: bool, whole: bool) -> None:
    write(folder / "humanevalplus_v0.1.10.jsonl", ADD)
    benchmark = HumanEvalPlus(judge=judge, chat=False, **SETTINGS)
    verdicts = {"base": base, "plus": whole, "undecided": False}
    assert benchmark.score(benchmark.items()[0], answer) == verdicts


@pytest.mark.slow
def test_chat_answers_are_whole_functions(folder: Path, write: Write, judge: Any) -> None:
    write(folder / "humanevalplus_v0.1.10.jsonl", ADD)
    benchmark = HumanEvalPlus(judge=judge, chat=True, **SETTINGS)
    (item,) = benchmark.items()
    assert benchmark.score(item, "Sure:\n```python\ndef add(x, y):\n    return x + y\n```\nDone.")["plus"]
    assert not benchmark.score(item, "```python\ndef plus(x, y):\n    return x + y\n```")["base"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "body", "passed"), [(name, *case) for name, cases in ORACLES.items() for case in cases]
)
def test_special_oracles(folder: Path, write: Write, judge: Any, name: str, body: str, passed: bool) -> None:
    write(folder / "mbppplus_v0.2.0.jsonl", *MBPP)
    benchmark = MbppPlus(judge=judge, chat=True, **SETTINGS)
    item = next(i for i in benchmark.items() if f"{name}\n" in i.prompt)
    arguments = "a, b" if name in ("similar_elements", "are_equivalent") else "a"
    code = f"def {name}({arguments}):\n    if a is NotImplemented:\n        return None\n    {body}\n"
    assert benchmark.score(item, f"```python\n{code}```")["plus"] == passed


def test_bad_data_and_missing_evalplus(folder: Path, write: Write, judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"humanevalplus_v0\.1\.10\.jsonl"):
        HumanEvalPlus(judge=judge, chat=False, **SETTINGS)
    write(folder / "humanevalplus_v0.1.10.jsonl", ADD, {"task_id": "HumanEval/1"})
    with pytest.raises(UserError, match='line 2: no "prompt"'):
        HumanEvalPlus(judge=judge, chat=False, **SETTINGS)
    monkeypatch.setattr(plus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"dspec\[evalplus\]"):
        HumanEvalPlus(judge=judge, chat=False, **SETTINGS)


HOSTILE = ["-", ".a", "1+", "()", "[0]"]


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("part", HOSTILE)
def test_a_text_that_breaks_sanitize_is_no_program_and_ends_no_run(
    folder: Path, write: Write, judge: Any, part: str, chat: bool
) -> None:
    write(folder / "humanevalplus_v0.1.10.jsonl", ADD)
    benchmark = HumanEvalPlus(judge=judge, chat=chat, **SETTINGS)
    (item,) = benchmark.items()
    for text in (part * 1100, f"    return {part * 1100}1", f"    return x{part * 1100}", f"x = x{part * 1100}"):
        code = f"```python\n{ADD['prompt']}{text}\n```" if chat else text
        assert not any(benchmark.score(item, code).values())
    assert benchmark.program(item, f"x = x{HOSTILE[1] * 1100}").how == "raised"
    assert benchmark.score(item, f"{ADD['prompt'] if chat else ''}    return x + y\n")["plus"]


@pytest.mark.slow
def test_sanitising_without_end_is_no_program(folder: Path, write: Write, judge: Any) -> None:
    """It parses every range of lines: 700 of them take more than a minute."""
    write(folder / "humanevalplus_v0.1.10.jsonl", ADD)
    benchmark = HumanEvalPlus(judge=judge, chat=True, **SETTINGS | {"timeout_s": 1.5})
    (item,) = benchmark.items()
    text = "\n".join(f"x{i} = {i}" for i in range(700))
    assert benchmark.score(item, text) == {"base": False, "plus": False, "undecided": True}
    assert judge.programs == []
    assert benchmark.score(item, f"{ADD['prompt']}    return x + y\n")["plus"]


def _variants(prompt: str, solution: str) -> list[str]:
    """Answers to one problem: right, wrong, chatty, malformed."""
    whole = prompt + solution
    return [
        whole,
        f"```python\n{whole}\n```",
        f"Here you go:\n\n```python\n{whole}\n```\nIt runs in O(n).",
        f"{whole}\n\nprint('tested')\nassert True\n",
        f"{prompt}    return None\n",
        f"import os\n{whole}\n\nif __name__ == '__main__':\n    main()\n",
        whole[: len(whole) // 2],
        "I am sorry, I cannot do that… ½",
    ]


@pytest.mark.slow
def test_sanitising_is_evalplus_own(real_data: Path, judge: Any) -> None:
    from evalplus.sanitize import sanitize

    count = 0
    for benchmark in (HumanEvalPlus(judge=judge, chat=True, **SETTINGS), MbppPlus(judge=judge, chat=True, **SETTINGS)):
        for item in benchmark.items()[::30]:
            row = benchmark._rows[item.id]
            for answer in _variants(row["prompt"], row["canonical_solution"]):
                assert benchmark.program(item, answer).value == sanitize(answer, entrypoint=row["entry_point"])
                count += 1
    assert count > 100


@pytest.mark.slow
def test_real_data_is_whole(real_data: Path, judge: Any) -> None:
    human, basic = HumanEvalPlus(judge=judge, chat=False, **SETTINGS), MbppPlus(judge=judge, chat=False, **SETTINGS)
    assert (len(human.items()), len(basic.items())) == (164, 378)
    assert isinstance(basic._rows["Mbpp/2"]["base_input"][0][0], tuple)  # evalplus restores what JSON cannot hold


@pytest.mark.slow
def test_verdicts_agree_with_evalplus(real_data: Path, judge: Any) -> None:
    """Canonical solutions and broken ones, every problem with an oracle of its own among them."""
    from evalplus.eval import PASS, untrusted_check

    special = "HumanEval/32 Mbpp/2 Mbpp/7 Mbpp/88 Mbpp/164 Mbpp/295 Mbpp/558 Mbpp/581 Mbpp/590 Mbpp/794".split()
    count = {True: 0, False: 0}
    for kind in (HumanEvalPlus, MbppPlus):
        benchmark = kind(judge=judge, chat=True, **SETTINGS)
        for item in (item for i, item in enumerate(benchmark.items()) if i % 8 == 0 or item.id in special):
            row = benchmark._rows[item.id]
            name, inputs, right = row["entry_point"], row["base_input"], row["prompt"] + row["canonical_solution"]
            expected, limits = benchmark._reference(item, "base_input"), [1.0] * len(inputs)
            wrong = f"{right}\n\nfirst = {name}\ndef {name}(*args):\n    return [first(*args)]\n"
            for code in (right, wrong, f"def {name}(*args):\n    return 0\n"):
                theirs, _ = untrusted_check(kind.dataset, code, inputs, name, expected, row["atol"], limits)
                ours = benchmark._passes(item, code, "base_input")
                if item.id == "HumanEval/32":  # evalplus fails every answer to it
                    assert (theirs == PASS, ours) == (False, code == right)
                else:
                    assert ours == (theirs == PASS), (item.id, code[-60:])
                count[ours] += 1
    print(f"evalplus: {sum(count.values())} verdicts agree, {count[True]} passed")
    assert sum(count.values()) >= 200
    assert min(count.values()) > 60


@pytest.mark.slow
def test_known_failures_are_named_and_still_so(real_data: Path, judge: Any) -> None:
    benchmark = MbppPlus(judge=judge, chat=True, **SETTINGS)
    assert set(benchmark.source()["known_failures"]) == {"Mbpp/255", "Mbpp/630"}
    item, row = next((i, benchmark._rows[i.id]) for i in benchmark.items() if i.id == "Mbpp/630")
    assert not benchmark.score(item, row["canonical_solution"])["base"]  # a new evalplus may mend it
    assert benchmark._passes(item, row["prompt"] + row["canonical_solution"], "plus_input")


@pytest.mark.slow
def test_what_needs_too_much_memory_is_not_run(real_data: Path, judge: Any) -> None:
    benchmark = MbppPlus(judge=judge, chat=True, **SETTINGS)
    item = next(i for i in benchmark.items() if i.id == "Mbpp/255")
    row = benchmark._rows[item.id]
    assert benchmark.score(item, row["canonical_solution"]) == {"base": True, "plus": False, "undecided": False}
    assert len(judge.programs) == 1
