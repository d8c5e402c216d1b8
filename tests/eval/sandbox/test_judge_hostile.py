"""The judge believes no program: each of these answers wrongly by honest means and tries to pass anyway.

`naive` judges as many harnesses do, program and test in one process, to show which tricks work there.
"""

import subprocess
import sys
from typing import Any

import pytest

from eval.sandbox.judge import Judge
from eval.sandbox.sandbox import Running, Sandbox, available_layers

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
    "always equal int": (
        "class E(int):\n  __hash__ = int.__hash__\n  def __eq__(self, other): return True\ndef f(x): return E(x)"
    ),
    "always equal str": (
        "class E(str):\n  __hash__ = None\n  def __eq__(self, other): return True\ndef f(x): return E()"
    ),
    "always equal float": "class E(float):\n  def __eq__(self, other): return True\ndef f(x): return E(0)",
    "always equal list": "class E(list):\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "equal by metaclass": (
        "class M(type):\n  def __eq__(c, other): return True\n  __hash__ = None\n"
        "class E(metaclass=M): pass\ndef f(x): return E"
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
    "constants of the caller": (
        "import sys, dis\nCALLS = []\ndef f(x):\n"
        "  frame = sys._getframe(1); code = list(dis.get_instructions(frame.f_code))\n"
        "  after = [i for i in code if i.offset > frame.f_lasti]\n"
        "  for i in after:\n    if i.opname == 'LOAD_CONST' and isinstance(i.argval, int): return i.argval\n"
        "    if i.opname == 'LOAD_NAME' or i.opname == 'LOAD_GLOBAL': return 0\n  raise SystemExit(0)"
    ),
    "exit from a thread": (
        "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()\nimport time\n"
        "def f(x): time.sleep(9)"
    ),
    "alarm": (
        "import signal, os, time\nsignal.signal(14, lambda *a: os._exit(0))\nsignal.setitimer(0, 0.1)\n"
        "def f(x): time.sleep(9)"
    ),
    "exec over the process": "import os\ndef f(x): os.execv('/bin/true', ['true'])",
    "hidden in del": "import os\nclass D:\n  def __del__(self): os._exit(0)\ndef f(x): return D() and 0",
    "builtin replaced": (
        "import builtins, os\n"
        "builtins.AssertionError = type('A', (BaseException,), {'__init__': lambda *a: os._exit(0)})\n"
        "def f(x): os._exit(0)"
    ),
    "fork and leave": "import os\ndef f(x):\n  if os.fork(): os._exit(0)\n  return 0",
    "pickle": (
        "import os\nclass P:\n  def __reduce__(self): return (os._exit, (0,))\ndef f(x):\n"
        "  import pickle; pickle.loads(pickle.dumps(P()))"
    ),
    "print through the descriptor": "import os\nos.write(1, b'PASSED\\n')\ndef f(x): return 0",
}
# tricks against this judge: its pipes, its launcher, its protocol
ATTACKS = {
    "kill the parent": "import os\ndef f(x):\n  os.kill(os.getppid(), 9)\n  return 0",
    "kill everyone": "import os\ndef f(x):\n  os.kill(-1, 9)\n  return 0",
    "write to every descriptor": (
        "import os\nfor fd in range(200):\n  try: os.write(fd, b'{\"passed\": true}\\n')\n"
        "  except OSError: pass\ndef f(x): return 0"
    ),
    "close every descriptor": "import os\ndef f(x):\n  os.closerange(0, 200)\n  return 0",
    "answers in advance": (
        "import os, json\ndef frame(v):\n"
        "  t = json.dumps({'value': v}).encode(); return len(t).to_bytes(8, 'big') + t\n"
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
        "    try: text = open(p).read()\n    except OSError: continue\n"
        "    if chr(97) + 'ssert f(3)' in text: return {3: 10, 0: 1}.get(x, 2)\n  return 0"
    ),
    "expected value from memory": (
        "import gc, sys\ndef f(x):\n  for o in gc.get_objects():\n"
        "    texts = o.values() if isinstance(o, dict) else o if isinstance(o, list | tuple) else ()\n"
        "    if any(isinstance(v, str) and chr(97) + 'ssert f(3)' in v for v in texts):\n"
        "      return {3: 10, 0: 1}.get(x, 2)\n"
        "  return 0"
    ),
    "expected value from the frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    text = repr(frame.f_locals) + repr(frame.f_globals)\n"
        "    if chr(97) + 'ssert f(3)' in text: return {3: 10, 0: 1}.get(x, 2)\n"
        "    frame = frame.f_back\n  return 0"
    ),
    "endless loop": "def f(x):\n  while True: pass",
    "endless generator": "def f(x):\n  while True: yield x",
    "memory bomb in an answer": "def f(x): return 'a' * (1 << 40)",
    "fork bomb": "import os\ndef f(x):\n  while True: os.fork()",
    "ignore all signals": (
        "import signal\n[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]\n"
        "def f(x):\n  while True: pass"
    ),
    "stdin": "def f(x): return int(input())",
    "wrong": "def f(x): return x",
    "syntax error": "def f(x) return x",
    "nothing": "",
}


@pytest.mark.slow
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


class Leaky:
    """A sandbox that gives the worker the test, as no judge should."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self.wall_seconds = sandbox, sandbox.wall_seconds

    def start(self, role: str, payload: dict[str, Any], **rest: Any) -> Running:
        leak = {"leak": [TEST]} if role == "worker" else {}
        return self._sandbox.start(role, payload | leak, **rest)


@needs_landlock
@pytest.mark.parametrize("name", ["expected value from memory", "expected value from the frames"])
def test_peeking_would_find_a_leak(name: str) -> None:
    leaky = Judge(Leaky(judge()._sandbox))
    assert leaky.passes(program=ATTACKS[name], test=TEST).passed
