"""Honest programs pass, wrong ones fail, and what tests do with answers means what it means in one process."""

import subprocess
import sys
from typing import Any

import pytest

from dspec.errors import UserError
from eval.sandbox.judge import Judge, function_under_test
from eval.sandbox.sandbox import Sandbox, available_layers

needs_landlock = pytest.mark.skipif("landlock" not in available_layers(), reason="no Landlock")
TEST = "assert f(3) == 10\nassert f(0) == 1\nassert f(f(0)) == 2"
HONEST = "def f(x):\n    return x * x + 1\n"


def judge(*, wall_seconds: float = 20, memory_mb: int = 512, processes: int = 1) -> Judge:
    return Judge(
        Sandbox(
            wall_seconds=wall_seconds,
            cpu_seconds=20,
            memory_mb=memory_mb,
            output_bytes=1 << 20,
            processes=processes,
            allow_unsafe_code=False,
        )
    )


@needs_landlock
@pytest.mark.parametrize(
    "program",
    [
        HONEST,
        "print('PASSED')\nimport atexit, sys\natexit.register(print, 'bye')\n" + HONEST,
        "import functools\n@functools.lru_cache\ndef f(x): return x ** 2 + 1",
        "f = lambda x: x * x + 1",
        "class F:\n  def __call__(self, x): return x * x + 1\nf = F()",
        "from enum import IntEnum\nclass N(IntEnum):\n  a = 10\n  b = 1\n  c = 2\ndef f(x): return N(x * x + 1)",
        "from fractions import Fraction\ndef f(x): return Fraction(x * x + 1)",
        "def f(x): return float(x * x + 1)",
        "if __name__ == '__main__': raise SystemExit\n" + HONEST,
        "import sys\nsys.setrecursionlimit(5000)\ndef f(x, n=3000): return f(x, n - 1) if n else x * x + 1",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: 'int'\ndef f(x): return P(x).x ** 2 + 1",
    ],
)
def test_honest_programs_pass(program: str) -> None:
    assert judge().passes(program=program, test=TEST) == (True, "passed")


PAIRS = {  # what tests do with answers: (program, test that passes, test that fails)
    "generator": ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]", "assert f(3) == [0, 1, 2]"),
    "map": ("def f(n): return map(str, range(n))", "assert list(f(2)) == ['0', '1']", "assert list(f(2)) == [0, 1]"),
    "keys": ("def f(): return {1: 2}.keys()", "assert f() == {1}", "assert f() == [1]"),
    "counter": (
        "import collections\ndef f(s): return collections.Counter(s)",
        "assert f('aab')['a'] == 2",
        "assert f('ab')['z']",
    ),
    "match": ("import re\ndef f(s): return re.search('b+', s)", "assert f('abb').group() == 'bb'", "assert f('a')"),
    "error": (
        "def f(x): raise ValueError('no', x)",
        "try: f(1)\nexcept ValueError as e: assert e.args == ('no', 1)\nelse: assert False",
        "f(1)",
    ),
    "own error": ("class E(KeyError): pass\ndef f(): raise E('k')", "try: f()\nexcept KeyError: pass", "f()"),
    "class": (
        "class Node:\n  def __init__(self, v): self.v, self.left = v, None\ndef f(n): return n.v + n.left.v",
        "n = Node(1); n.left = Node(4); assert f(n) == 5 and n.left.v == 4",
        "n = Node(1); assert f(n) == 1",
    ),
    "closure": ("def f(a): return lambda b: a + b", "assert f(1)(2) == 3", "assert f(1)(2) == 4"),
    "length": (
        "class L:\n  def __len__(self): return 4\ndef f(): return L()",
        "assert len(f()) == 4",
        "assert len(f()) == 3",
    ),
    "module": (
        "import math\ndef f(x): return math.sqrt(x)",
        "assert math.isclose(f(4), 2)",
        "assert math.isclose(f(4), 3)",
    ),
    "type": ("def f(x): return type(x)", "assert f(1) is int", "assert f(1) is float"),
    "type as argument": ("def f(x, t): return isinstance(x, t)", "assert f(1, int)", "assert f(1, str)"),
    "constant": ("LIMIT = [1, 2]\ndef f(): return 1", "assert f() in LIMIT", "assert f() == LIMIT"),
    "nan": ("def f(): return float('nan')", "assert f() != f()", "assert f() == f()"),
    "negative zero": ("def f(): return -0.0", "assert str(f()) == '-0.0'", "assert str(f()) == '0.0'"),
    "big": ("def f(): return 7 ** 9999", "assert f() == 7 ** 9999", "assert f() == 7 ** 9998"),
    "surrogates": (
        "def f(): return '\\ud800\\udc00é'",
        "assert f() == '\\ud800\\udc00é'",
        "assert f() == '\\U00010000é'",
    ),
    "swallowing test": ("def f(): return 1", "try: f()\nexcept: pass", "try: f(1, 2, 3)\nfinally: pass"),
}  # fmt: skip


@needs_landlock
@pytest.mark.parametrize("name", PAIRS)
def test_answers_keep_their_meaning(name: str) -> None:
    program, right, wrong = PAIRS[name]
    assert judge().passes(program=program, test=right) == (True, "passed")
    assert not judge().passes(program=program, test=wrong).passed
    for test, passes in ((right, True), (wrong, False)):  # the same in one process
        done = subprocess.run([sys.executable, "-c", f"{program}\n{test}"], capture_output=True, timeout=20)
        assert (done.returncode == 0) == passes


@needs_landlock
def test_a_test_cannot_swallow_the_programs_end() -> None:
    program = "import os\ndef f(): os._exit(0)"
    assert not judge().passes(program=program, test="try: f()\nexcept BaseException: pass").passed


@needs_landlock
def test_names_that_are_pythons_come_from_the_program_only_as_the_entry_point() -> None:
    program = "def sum(a, b): return a + b\nclass math:\n  isclose = staticmethod(lambda a, b: True)"
    assert judge().passes(program=program, test="assert sum(1, 2) == 3", entry_point="sum").passed
    assert not judge().passes(program=program, test="assert sum(1, 2) == 3").passed
    assert not judge().passes(program=program, test="assert math.isclose(1, 2)").passed


@needs_landlock
def test_helpers_of_the_prompt_cannot_be_redefined() -> None:
    prompt = "def encode(s):\n    return s[::-1]\n\ndef decode(s):\n    '''Undo encode.'''\n"
    test = "assert decode(encode('abc')) == 'abc'"
    cheat = prompt + "    return s\ndef encode(s): return s\n"
    assert judge().passes(program=cheat, test=test).passed  # where the prompt is not given
    assert not judge().passes(program=cheat, test=test, entry_point="decode", trusted=prompt).passed
    honest = prompt + "    return s[::-1]\n"
    assert judge().passes(program=honest, test=test, entry_point="decode", trusted=prompt).passed


@pytest.mark.slow
@needs_landlock
def test_reasons_say_what_happened() -> None:
    def why(program: str, wall_seconds: float = 20) -> str:
        return judge(wall_seconds=wall_seconds).passes(program=program, test=TEST).reason

    assert why("def f(x): return 0") == "AssertionError: "
    assert why("def f(x): return 1 / 0").startswith("ZeroDivisionError")
    assert why("def f(x) return 0").startswith("SyntaxError")
    assert why("x = 1").startswith("NameError")
    assert why("def f(x):\n while 1: pass", 1) == "out of time"
    assert why("import os\ndef f(x): os._exit(3)") == "the program ended early (exit code 3)"


@needs_landlock
def test_agreement_with_a_reference() -> None:
    j, inputs = judge(), [[[3, 1, 2]], [[]], [[1.5, -1]]]
    expected = j.answers(program="def g(x): return sorted(x)", entry_point="g", inputs=inputs)
    assert expected == [[1, 2, 3], [], [-1, 1.5]]

    def agrees(program: str, **changes: Any) -> bool:
        job = {"inputs": inputs, "expected": expected, "atol": 0, "entry_point": "g"}
        return j.agrees(program=program, **{**job, **changes}).passed

    assert agrees("def g(x):\n  x.sort()\n  return x")
    assert not agrees("def g(x): return x")
    assert not agrees("def g(x): return tuple(sorted(x))")
    assert not agrees("def h(x): return sorted(x)")
    assert not agrees("class E(list):\n  def __eq__(s, o): return True\ndef g(x): return E()")
    assert not agrees("import os\ndef g(x): os._exit(0)")
    assert agrees("def g(x): return sum(x) + 1e-9", expected=[6.0, 0.0, 0.5])
    assert not agrees("def g(x): return sum(x) + 1e-3", expected=[6.0, 0.0, 0.5])
    with pytest.raises(ValueError, match="3 inputs but 1 expected"):
        agrees("", expected=[1])
    with pytest.raises(TypeError, match="object"):
        agrees("", expected=[object()] * 3)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        j.answers(program="def g(x): return 1 / 0", entry_point="g", inputs=inputs)


def test_function_under_test() -> None:
    reference = "def helper(x): return x\ndef sum(a, b): return helper(a) + b\nclass Node: pass"
    assert function_under_test(reference, "assert set(sum(10, 15)) == {25}") == "sum"
    assert function_under_test(reference, "assert other(1)") is None
