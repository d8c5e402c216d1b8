"""The judge believes no program: hostile ones fail, honest ones pass, and so do the benchmarks' own solutions.

Every hostile program answers wrongly by honest means and tries to pass anyway. `naive` judges as many harnesses do,
program and test in one process, to show which tricks work there.
"""

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from dspec.errors import UserError
from eval.contain.codec import pack, unpack
from eval.contain.oracles import Comparison
from eval.judge import Judge, function_under_test
from eval.sandbox import Sandbox, available_layers

needs_landlock = pytest.mark.skipif("landlock" not in available_layers(), reason="no Landlock")
ROOT = Path(__file__).parent.parent.parent
DATA = Path(os.environ.get("DSPEC_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no ../shared")
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


def naive(program: str) -> bool:
    """In one process, with the pass marker on stdout or exit code 0."""
    source = f"{program}\n{TEST}\nprint('PASSED')"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30)
    return done.returncode == 0 or "PASSED" in done.stdout


# tricks that pass where program and test share a process
CHEATS = {
    "exit before the asserts": "import os\ndef f(x): os._exit(0)",
    "exit at import": "import os\nos._exit(0)",
    "system exit": "import sys\ndef f(x): sys.exit(0)",
    "system exit at import": "import sys\nsys.exit(0)",
    "pass marker": "print('PASSED', flush=True)\ndef f(x): return 0",
    "pass marker at exit": "import atexit\natexit.register(print, 'PASSED')\ndef f(x): return 0",
    "exit code at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "always equal": "class E:\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "always equal int": "class E(int):\n  __hash__ = int.__hash__\n  def __eq__(self, other): return True\ndef f(x): return E(x)",
    "always equal str": "class E(str):\n  __hash__ = None\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "always equal float": "class E(float):\n  def __eq__(self, other): return True\ndef f(x): return E(0)",
    "always equal list": "class E(list):\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "equal by metaclass": (
        "class M(type):\n  def __eq__(c, other): return True\n  __hash__ = None\nclass E(metaclass=M): pass\ndef f(x): return E"
    ),
    "reflected operators": (
        "class E:\n  def __getattr__(self, name): return lambda *a: True\n"
        "  def __eq__(self, other): return True\n  def __ne__(self, other): return False\ndef f(x): return E()"
    ),
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef f(x): return 0",
    "trace of the caller": (
        "import sys\ndef trace(frame, event, arg):\n  import os; os._exit(0)\nsys.settrace(trace)\ndef f(x): return 0"
    ),
    "profile": "import sys, os\nsys.setprofile(lambda *a: os._exit(0) if a[1] == 'call' else None)\ndef f(x): return 0",
    "expected value from the frame": (
        "import sys\ndef f(x):\n  code = sys._getframe(1).f_code\n  return 10 if x == 3 else 1 if x == 0 else 2\n"
        "import types\ndef g(x):\n  raise SystemExit(0)\nf = g"
    ),
    "constants of the caller": (
        "import sys, dis\nCALLS = []\ndef f(x):\n"
        "  frame = sys._getframe(1); code = list(dis.get_instructions(frame.f_code))\n"
        "  after = [i for i in code if i.offset > frame.f_lasti]\n"
        "  for i in after:\n    if i.opname == 'LOAD_CONST' and isinstance(i.argval, int): return i.argval\n"
        "    if i.opname == 'LOAD_NAME' or i.opname == 'LOAD_GLOBAL': return 0\n  raise SystemExit(0)"
    ),
    "integers that compare wrongly by ctypes": (
        "import ctypes\nclass E(int): pass\ndef f(x):\n  import os; os._exit(0)"
    ),
    "exit from a thread": "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()\nimport time\ndef f(x): time.sleep(9)",
    "alarm": "import signal, os, time\nsignal.signal(14, lambda *a: os._exit(0))\nsignal.setitimer(0, 0.1)\ndef f(x): time.sleep(9)",
    "exec over the process": "import os\ndef f(x): os.execv('/bin/true', ['true'])",
    "garbage collector": (
        "import gc, os\ndef f(x):\n  gc.collect()\n  [d for d in gc.get_objects() if isinstance(d, dict) and '__file__' in d]\n  os._exit(0)"
    ),
    "hidden in del": "import os\nclass D:\n  def __del__(self): os._exit(0)\ndef f(x): return D() and 0",
    "builtin replaced": "import builtins, os\nbuiltins.AssertionError = type('A', (BaseException,), {'__init__': lambda *a: os._exit(0)})\ndef f(x): os._exit(0)",
    "fork and leave": "import os\ndef f(x):\n  if os.fork(): os._exit(0)\n  return 0",
    "pickle": "import os\nclass P:\n  def __reduce__(self): return (os._exit, (0,))\ndef f(x):\n  import pickle; pickle.loads(pickle.dumps(P()))",
    "print through the descriptor": "import os\nos.write(1, b'PASSED\\n')\ndef f(x): return 0",
}
# tricks against this judge: its pipes, its launcher, its protocol
ATTACKS = {
    "kill the parent": "import os\ndef f(x):\n  os.kill(os.getppid(), 9)\n  return 0",
    "kill everyone": "import os\ndef f(x):\n  os.kill(-1, 9)\n  return 0",
    "write to every descriptor": (
        "import os\nfor fd in range(200):\n  try: os.write(fd, b'{\"passed\": true}\\n')\n  except OSError: pass\ndef f(x): return 0"
    ),
    "close every descriptor": "import os\ndef f(x):\n  os.closerange(0, 200)\n  return 0",
    "answers in advance": (
        "import os, json\ndef frame(v):\n  t = json.dumps({'value': v}).encode(); return len(t).to_bytes(8, 'big') + t\n"
        "for fd in range(3, 64):\n  try: os.write(fd, b''.join(map(frame, [None, True, True, True])))\n"
        "  except OSError: pass\ndef f(x): return 0"
    ),
    "malformed answer": (
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, (9).to_bytes(8, 'big') + b'not json!')\n"
        "  except OSError: pass\ndef f(x): return 0"
    ),
    "answer of endless length": (
        "import os\nfor fd in range(3, 64):\n  try:\n    os.write(fd, (1 << 60).to_bytes(8, 'big'))\n"
        "    while True: os.write(fd, bytes(1 << 16))\n  except OSError: pass\ndef f(x): return 0"
    ),
    "deep answer": "def f(x):\n  v = []\n  for _ in range(900): v = [v]\n  return v",
    "handles that do not exist": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    for v in frame.f_locals.values():\n"
        "      if type(v).__name__ == '_Objects': v.keep = lambda value: {'handle': 10 ** 9}\n"
        "    frame = frame.f_back\n  return object()"
    ),
    "replace the codec": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    if 'pack' in frame.f_globals: frame.f_globals['pack'] = lambda v, o: {'tuple': 5}\n"
        "    frame = frame.f_back\n  return 0"
    ),
    "raise what is no exception": "def f(x): raise KeyboardInterrupt",
    "raise generator exit": "def f(x): raise GeneratorExit",
    "builtins of the test": "def abs(x): return 10\ndef all(x): return True\ndef f(x): return 0",
    "read the test": (
        "import os, glob\ndef f(x):\n  for p in glob.glob('/proc/*/fd/*') + glob.glob('/tmp/**', recursive=True):\n"
        "    try: text = open(p).read()\n    except OSError: continue\n    if 'assert f(3)' in text: return 10\n  return 0"
    ),
    "expected value from memory": (
        "import gc, sys\ndef f(x):\n  for o in gc.get_objects():\n"
        "    if isinstance(o, dict) and any(isinstance(v, str) and 'assert f(3) ==' in v for v in o.values()): return {3: 10, 0: 1}.get(x, 2)\n"
        "  return 0"
    ),
    "expected value from the frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    text = repr(frame.f_locals) + repr(frame.f_globals)\n"
        "    if 'assert ' + 'f(3)' in text: return {3: 10, 0: 1}.get(x, 2)\n"
        "    frame = frame.f_back\n  return 0"
    ),
    "endless loop": "def f(x):\n  while True: pass",
    "endless generator": "def f(x):\n  while True: yield x",
    "memory bomb in an answer": "def f(x): return 'a' * (1 << 40)",
    "fork bomb": "import os\ndef f(x):\n  while True: os.fork()",
    "ignore all signals": "import signal\n[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]\ndef f(x):\n  while True: pass",
    "stdin": "def f(x): return int(input())",
    "wrong": "def f(x): return x",
    "syntax error": "def f(x) return x",
    "nothing": "",
}


@needs_landlock
@pytest.mark.parametrize("name", [*CHEATS, *ATTACKS])
def test_hostile_programs_fail(name: str) -> None:
    slow = name.startswith("endless") or "signals" in name or "thread" in name or name == "alarm"
    judged = judge(wall_seconds=1.5 if slow else 20, processes=2 if "thread" in name else 1)
    verdict = judged.passes(program={**CHEATS, **ATTACKS}[name], test=TEST)
    assert not verdict.passed
    assert verdict.reason != "passed"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_a_naive_harness_is_cheated(name: str) -> None:
    """So the tricks are real."""
    assert naive(CHEATS[name])


def test_the_naive_harness_can_fail() -> None:
    assert naive(HONEST)
    assert not naive("def f(x): return 0")


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
    "counter": ("import collections\ndef f(s): return collections.Counter(s)", "assert f('aab')['a'] == 2", "assert f('ab')['z']"),
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
    "length": ("class L:\n  def __len__(self): return 4\ndef f(): return L()", "assert len(f()) == 4", "assert len(f()) == 3"),
    "module": ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(4), 2)", "assert math.isclose(f(4), 3)"),
    "type": ("def f(x): return type(x)", "assert f(1) is int", "assert f(1) is float"),
    "type as argument": ("def f(x, t): return isinstance(x, t)", "assert f(1, int)", "assert f(1, str)"),
    "constant": ("LIMIT = [1, 2]\ndef f(): return 1", "assert f() in LIMIT", "assert f() == LIMIT"),
    "nan": ("def f(): return float('nan')", "assert f() != f()", "assert f() == f()"),
    "negative zero": ("def f(): return -0.0", "assert str(f()) == '-0.0'", "assert str(f()) == '0.0'"),
    "big": ("def f(): return 7 ** 9999", "assert f() == 7 ** 9999", "assert f() == 7 ** 9998"),
    "surrogates": ("def f(): return '\\ud800\\udc00é'", "assert f() == '\\ud800\\udc00é'", "assert f() == '\\U00010000é'"),
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


@needs_landlock
def test_reasons_say_what_happened() -> None:
    def why(program: str, wall_seconds: float = 20) -> str:
        return judge(wall_seconds=wall_seconds).passes(program=program, test=TEST).reason

    assert why("def f(x): return 0") == "AssertionError: "
    assert why("def f(x): return 1 / 0").startswith("ZeroDivisionError")
    assert why("def f(x) return 0").startswith("SyntaxError")
    assert why("x = 1").startswith("NameError")
    assert why("def f(x):\n while 1: pass", 1) == "the program was killed: wall time"
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


@pytest.mark.parametrize(
    ("dataset", "name", "atol", "answer", "right", "arguments", "holds"),
    [
        (None, "f", 0, 1, 1, (), True),
        (None, "f", 0, 1, True, (), True),
        (None, "f", 0, 1 + 1e-7, 1.0, (), True),
        (None, "f", 0, 1, 1.0, (), True),
        (None, "f", 0, 2, 1.0, (), False),
        (None, "f", 1e-4, 1, 1.00001, (), False),  # not of one type
        (None, "f", 1e-4, [1.0, 2.00001], [1.0, 2.0], (), True),
        (None, "f", 1e-4, (1.0, 2.0), [1.0, 2.0], (), False),
        (None, "f", 1e-4, [1.0], [1.0, 2.0], (), False),
        (None, "f", 1e-4, "a", "b", (), False),
        (None, "f", 0, float("nan"), float("nan"), (), False),
        (None, "f", 0, float("inf"), float("inf"), (), True),
        (None, "f", 0, 1e300, float("inf"), (), False),
        (None, "f", 0, 1 + 1e-9j, 1 + 0j, (), False),  # complex is not float: no tolerance of its own
        (None, "f", 1e-4, 1 + 1e-9j, 1 + 0j, (), True),
        ("mbpp", "are_equivalent", 0, 1, 2, (), True),
        ("mbpp", "sum_div", 0, 0, 7, (), True),
        ("mbpp", "sum_div", 0, 1, 7, (), False),
        ("mbpp", "Diff", 0, [2, 1, 1], [1, 2], (), True),
        ("mbpp", "Diff", 0, [2], [1, 2], (), False),
        (None, "Diff", 0, [2, 1], [1, 2], (), False),
        ("mbpp", "check_str", 0, "match", True, (), True),
        ("mbpp", "check_str", 0, None, True, (), False),
        ("mbpp", "check_str", 0, False, True, (), False),
        ("mbpp", "surface_Area", 0, 33, 0, (3, 4), False),
        ("mbpp", "surface_Area", 0, round(9 + 6 * (1.5**2 + 16) ** 0.5), 0, (3, 4), True),
        ("mbpp", "digit_distance_nums", 0, 2 + 2 + 3, 0, (23, 256), False),
        ("mbpp", "digit_distance_nums", 0, 2 + 3 + 3, 0, (23, 256), True),
        ("humaneval", "find_zero", 1e-4, -0.5, None, ([1, 2],), True),
        ("humaneval", "find_zero", 1e-4, 0.5, -0.5, ([1, 2],), False),
    ],
)
def test_comparison(
    dataset: str | None, name: str, atol: float, answer: Any, right: Any, arguments: Any, holds: bool
) -> None:
    assert Comparison(dataset, name, atol).holds(answer, right, arguments) is holds


VALUES = [
    *(None, True, 0, -1, 2**63 - 1, 2**63, -(2**70), 1.5, -0.0, float("inf"), 1j, "", "a\n\0é\U0001f600", "\ud800"),
    *(b"\0\xff", bytearray(b"x"), (), (1,), [], [[1, "a"], (2,)], {1, 2}, frozenset({1}), {}, {1: {2: [3]}}, {(1, 2): None}),
    *(range(0, 10, 3), Counter("aab"), OrderedDict(b=1, a=2), deque([1, (2,)]), ..., int, Fraction(1, 3), Decimal("1.50")),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_survive_the_crossing(value: Any) -> None:
    back = unpack(json.loads(json.dumps(pack(value, None))), None)
    assert type(back) is type(value)
    assert (back, repr(back)) == (value, repr(value))


def test_subclasses_arrive_as_builtins() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    for kind, value in ((int, Liar(3)), (list, type("L", (list,), {})([1])), (str, type("S", (str,), {})("s"))):
        assert type(unpack(pack(value, None), None)) is kind
    assert unpack(pack(defaultdict(list, a=1), None), None) == {"a": 1}


@pytest.mark.parametrize(
    "data",
    [{}, {"tuple": 5}, {"int": "x"}, {"no": 1}, {"a": 1, "b": 2}, {"set": [[1]]}, {"type": "print"}, {"bytes": 3}],
)
def test_malformed_data_raise(data: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011: of whatever kind; the checker takes each as a failure
        unpack(data, None)


def test_function_under_test() -> None:
    reference = "def helper(x): return x\ndef sum(a, b): return helper(a) + b\nclass Node: pass"
    assert function_under_test(reference, "assert set(sum(10, 15)) == {25}") == "sum"
    assert function_under_test(reference, "assert other(1)") is None


# ---- the benchmarks' own solutions ----------------------------------------------------------------------------------


def rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
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


def _plus(j: Judge, row: dict[str, Any], dataset: str) -> bool:
    job = {"program": row["prompt"] + row["canonical_solution"], "entry_point": row["entry_point"], "dataset": dataset}
    inputs = row["base_input"] + row["plus_input"]
    if dataset == "mbpp":
        inputs = _retyped(int(row["task_id"].split("/")[1]), inputs)
    expected = j.answers(inputs=inputs, **job)
    return j.agrees(inputs=inputs, expected=expected, atol=row["atol"], **job).passed


def _deep(value: Any) -> Any:
    return tuple(map(_deep, value)) if isinstance(value, list) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rows(value: Any) -> Any:
    return [_tuple(item) for item in value]


# MBPP+ keeps tuples, sets and complex numbers as JSON; which inputs they are is a fact of the data set
_EACH_A_TUPLE = {2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809}  # fmt: skip
_EACH_ROWS = {63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780}
_FIRST_A_TUPLE, _FIRST_ROWS = {250, 405, 446, 617, 720, 763, 808, 307}, {75, 413, 444, 753}
_EACH_A_TUPLE_OF_TUPLES, _DEEP = {259, 401, 445, 278}, {580, 615, 791}


def _retype(task: int, args: list[Any]) -> list[Any]:
    first, *rest = args
    if task in _EACH_A_TUPLE:
        return [tuple(arg) for arg in args]
    if task in _EACH_ROWS:
        return [_rows(arg) for arg in args]
    if task in _EACH_A_TUPLE_OF_TUPLES:
        return [tuple(_rows(arg)) for arg in args]
    if task in _DEEP:
        return [_deep(arg) for arg in args]
    if task in _FIRST_A_TUPLE | _FIRST_ROWS:
        return [tuple(first) if task in _FIRST_A_TUPLE else _rows(first), *rest]
    rare = {
        106: lambda: [first, tuple(rest[0])],
        750: lambda: [first, tuple(rest[0])],
        115: lambda: [[set(item) if isinstance(item, list) and item else {} for item in first]],
        124: lambda: [float(first), complex(rest[0])],
        252: lambda: [complex(first)],
        722: lambda: [{key: tuple(value) for key, value in first.items()}, *rest],
    }
    return rare[task]() if task in rare else args


def _retyped(task: int, inputs: list[list[Any]]) -> list[list[Any]]:
    return [_retype(task, args) if args else args for args in inputs]


def failing(name: str, *, every: int = 1) -> set[str]:
    """Ids of the tasks whose own solution does not pass."""
    j = judge(wall_seconds=60, memory_mb=4096)
    checks = {
        "humaneval": _humaneval,
        "mbpp": _mbpp,
        "humanevalplus_v0.1.10": lambda j, row: _plus(j, row, "humaneval"),
        "mbppplus_v0.2.0": lambda j, row: _plus(j, row, "mbpp"),
    }
    return {str(row["task_id"]) for row in rows(name)[::every] if not checks[name](j, row)}


@needs_landlock
@needs_data
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_some_reference_solutions_pass(name: str) -> None:
    assert failing(name, every=41) == set()


@needs_landlock
@needs_data
def test_solutions_that_share_names_or_objects_with_their_test_pass() -> None:
    j = judge()
    chosen = [row for row in rows("humaneval") if re.search("/(32|38|50)$", row["task_id"])]
    assert [row["task_id"] for row in chosen if not _humaneval(j, row)] == []
    chosen = [row for row in rows("mbpp") if row["task_id"] in (126, 367, 533, 596, 601, 927)]
    assert (len(chosen), [row["task_id"] for row in chosen if not _mbpp(j, row)]) == (6, [])


@needs_landlock
@needs_data
def test_reference_solutions_fail_each_others_tests() -> None:
    """And the judge says no when it should: neighbours' solutions, renamed."""
    j, tasks = judge(), rows("humaneval")[:6]
    for row, other in zip(tasks, tasks[1:], strict=False):
        program = f"{other['prompt']}{other['canonical_solution']}\n{row['entry_point']} = {other['entry_point']}\n"
        test = f"{row['test']}\ncheck({row['entry_point']})\n"
        assert not j.passes(program=program, test=test, entry_point=row["entry_point"], trusted=row["prompt"]).passed


@pytest.mark.slow
@needs_landlock
@needs_data
@pytest.mark.parametrize(
    ("name", "exceptions"),
    [
        ("humaneval", set()),
        ("mbpp", set()),
        ("humanevalplus_v0.1.10", {"HumanEval/32"}),  # fails its own plus inputs at the task's tolerance
        ("mbppplus_v0.2.0", set()),
    ],
)
def test_all_reference_solutions_pass(name: str, exceptions: set[str]) -> None:
    assert failing(name) == exceptions
