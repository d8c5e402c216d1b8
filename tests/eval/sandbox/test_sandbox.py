"""The sandbox contains: each hostile program proves outside that it would work, and inside that it does not.

A program prints REACHED where it got what it must not have.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template

import pytest

from dspec.errors import UserError
from eval.sandbox import sandbox as sandbox_module
from eval.sandbox.contain import landlock
from eval.sandbox.sandbox import Outcome, Sandbox, available_layers

LAYERS = available_layers()
pytestmark = pytest.mark.skipif("landlock" not in LAYERS, reason="no Landlock")
WRAPPED = ("bubblewrap", "landlock", "seccomp") if shutil.which("bwrap") else LAYERS
LEVELS = {levels for levels in (LAYERS, ("landlock", "seccomp"), WRAPPED) if {*levels} <= {*LAYERS, *WRAPPED}}
LIMITS = {"wall_seconds": 20, "cpu_seconds": 2, "memory_mb": 256, "output_bytes": 1 << 16, "processes": 1}


def make(**changes: object) -> Sandbox:
    return Sandbox(**{**LIMITS, "allow_unsafe_code": False, **changes})


@pytest.fixture(params=sorted(LEVELS), ids="+".join)
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The full sandbox, and those where user namespaces are blocked, with and without bubblewrap."""
    monkeypatch.setattr(sandbox_module, "available_layers", lambda: request.param)
    return make()


def bare(program: str) -> str:
    """The same program uncontained."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, env={"DSPEC_SECRET": "s3cret"}
    )
    return done.stdout


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("s3cret")
    return tmp_path / "secret"


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """TCP and UDP ports on this machine that answer."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        yield tcp.getsockname()[1], udp.getsockname()[1]


READS = {
    "passwd": "print('REACHED', open('/etc/passwd').read()[:0])",
    "secret in a file": "print('REACHED' if open('$secret').read() == 's3cret' else '')",
    "home": "import os; os.listdir(os.path.expanduser('~root' if os.getuid() == 0 else '~')); print('REACHED')",
    "list the root": "import os; print('REACHED', os.listdir('/')[:0])",
    "symlink to a file": "import os; os.symlink('$secret', '$link'); print('REACHED', open('$link').read()[:0])",
    "symlink to a folder": "import os; os.symlink('/etc', '$link'); print('REACHED', open('$link/passwd').read()[:0])",
    "hard link": "import os; os.link('$secret', '$link'); print('REACHED', open('$link').read()[:0])",
    "dots": "print('REACHED', open('../../../../../../../etc/passwd').read()[:0])",
    "environment": "import os; print('REACHED' if os.environ.get('DSPEC_SECRET') else '')",
    "own environment in proc": "print('REACHED' if b'SECRET' in open('/proc/self/environ', 'rb').read() else '')",
    "parent in proc": "import os; print('REACHED', open(f'/proc/{os.getppid()}/cmdline').read()[:0])",
    "processes in proc": "import os; print('REACHED' if [n for n in os.listdir('/proc') if n.isdigit()] else '')",
}
WRITES = {
    "write outside": "open('$link', 'w').write('x'); print('REACHED')",
    "write the secret": "open('$secret', 'a').write(''); print('REACHED')",
    "remove": "import os; os.remove('$secret'); print('REACHED')",
    "rename": "import os; os.rename('$secret', '$link'); print('REACHED')",
    "truncate": "import os; os.truncate('$secret', 0); print('REACHED')",
    "chmod": "import os; os.chmod('$secret', 0o777); print('REACHED')",
    "chown": "import os; os.chown('$secret', os.getuid(), os.getgid()); print('REACHED')",
    "touch": "import os; os.utime('$secret'); print('REACHED')",
    "make a folder": "import os; os.mkdir('$link'); print('REACHED')",
}
SOCKETS = {
    "tcp": "import socket; socket.create_connection(('127.0.0.1', $tcp), 2); print('REACHED')",
    "tcp listen": "import socket; socket.create_server(('127.0.0.1', 0)); print('REACHED')",
    "udp": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', $udp)); print('REACHED')",
    "unix": "import socket; socket.socket(socket.AF_UNIX); print('REACHED')",
    "unix datagram pair": "import socket; socket.socketpair(1, socket.SOCK_DGRAM); print('REACHED')",
    "netlink": "import socket; socket.socket(16, 3, 0); print('REACHED')",
}
PROCESSES = {
    "fork": "import os\nif os.fork() == 0: os._exit(0)\nprint('REACHED')",
    "shell": "import subprocess; subprocess.run(['/bin/sh', '-c', 'true'], check=True); print('REACHED')",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'REACHED'])",
    "spawn": "import os; os.posix_spawn('/bin/true', ['true'], {}); print('REACHED')",
    "thread beyond the limit": "import threading; threading.Thread(target=lambda: print('REACHED')).start()",
    "signal the parent": "import os; os.kill(os.getppid(), 0); print('REACHED')",
    "signal the group": "import os; os.killpg(0, 0); print('REACHED')",
    "ptrace": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.ptrace.restype = ctypes.c_long\n"
        "print('REACHED' if libc.ptrace(0, 0, 0, 0) == 0 else '')"
    ),
    "pidfd": "import os; os.pidfd_open(os.getppid()); print('REACHED')",
    "raise a limit": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (70, 70)); print('REACHED')",
    "memory file": "import os; os.memfd_create('x'); print('REACHED')",
    "outlive the launcher": "import ctypes; print('REACHED' if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0 else '')",
}
ALL = {**READS, **WRITES, **SOCKETS, **PROCESSES}


def fill(name: str, secret: Path, server: tuple[int, int]) -> str:
    return Template(ALL[name]).substitute(secret=secret, link=secret.parent / "link", tcp=server[0], udp=server[1])


@pytest.mark.parametrize("name", ALL)
def test_hostile_programs_reach_nothing(name: str, box: Sandbox, secret: Path, server: tuple[int, int]) -> None:
    outcome = box.run(fill(name, secret, server))
    assert b"REACHED" not in outcome.stdout
    assert secret.read_text() == "s3cret"
    assert not os.path.lexists(secret.parent / "link")
    assert oct(secret.stat().st_mode)[-3:] != "777"


@pytest.mark.parametrize("name", ALL)
def test_outside_they_reach_it(name: str, secret: Path, server: tuple[int, int]) -> None:
    """So the test above can fail."""
    assert "REACHED" in bare(fill(name, secret, server))


BOMBS = {
    "infinite loop": ("while True: pass", "killed"),
    "sleep": ("import time; time.sleep(1000)", "wall time"),
    "ignored signals": (
        "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\nimport time; time.sleep(1000)",
        "wall time",
    ),
    "memory": ("x = 'a' * (1 << 30)", "MemoryError"),
    "growing memory": ("x = []\nwhile True: x.append(bytes(1 << 20))", "MemoryError"),
    "output": ("while True: print('x' * 100000)", "output"),
    "errors as output": ("import sys\nwhile True: sys.stderr.write('x' * 100000)", "output"),
    "one big file": ("f = open('big', 'wb')\nwhile True: f.write(bytes(100000)); f.flush()", "File too large"),
    "many files": ("n = 0\nwhile True: open(f'f{n}', 'wb').write(bytes(60000)); n += 1", "disk"),
    "many folders": ("import os\nwhile True: os.mkdir('d'); os.chdir('d')", "disk"),
    "fork bomb": ("import os\nwhile True: os.fork()", "not permitted"),
    "core dump": ("import ctypes; ctypes.string_at(0)", "signal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_at_a_limit(name: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    program, sign = BOMBS[name]
    layers = tuple(box.level.split("+"))
    monkeypatch.setattr(sandbox_module, "available_layers", lambda: layers)
    by_time = sign in ("wall time", "killed")  # the others end by themselves, on a busy machine later
    limits = {"wall_seconds": 1.5, "cpu_seconds": 1} if by_time else {"wall_seconds": 20, "cpu_seconds": 15}
    outcome = make(**limits).run(program)
    assert not outcome.ok
    assert len(outcome.stdout) <= LIMITS["output_bytes"]
    assert len(outcome.stderr) <= LIMITS["output_bytes"]
    assert sign in _how(outcome) or (sign == "disk" and "No space left" in _how(outcome))


def _how(outcome: Outcome) -> str:
    signal = "signal killed" if outcome.code < 0 else ""
    return f"{outcome.ended} {signal} {outcome.stderr.decode(errors='replace')}"


def test_an_honest_program_runs(box: Sandbox) -> None:
    program = (
        "import collections, json, math, os, random, re, tempfile\n"
        "with open('own', 'w') as f: f.write('kept')\n"
        "with tempfile.TemporaryDirectory() as d: os.mkdir(d + '/x')\n"
        "print(open('own').read(), json.dumps([math.comb(5, 2)]), os.listdir('.'), 'é', __name__)\n"
    )
    outcome = box.run(program)
    assert outcome == Outcome("exit", 0, "kept [10] ['own'] é __main__\n".encode(), b"")


def test_output_exit_code_and_traceback_come_back(box: Sandbox) -> None:
    assert box.run("import sys; print('a'); sys.exit(7)") == Outcome("exit", 7, b"a\n", b"")
    failed = box.run("x = 1\nraise ValueError('no')")
    assert failed.code == 1
    assert failed.stderr.endswith(b"ValueError: no\n")
    assert box.run("def f(:").code == 1
    assert box.run("input()").stderr.endswith(b"EOFError: EOF when reading a line\n")


def test_nothing_is_shared_between_runs(box: Sandbox) -> None:
    assert box.run("open('left', 'w')").ok
    assert box.run("import os; print(os.listdir('.'))").stdout == b"[]\n"


def test_asyncio_and_allowed_threads_work() -> None:
    program = (
        "import asyncio, threading\nasyncio.run(asyncio.sleep(0))\n"
        "t = threading.Thread(target=lambda: print('thread')); t.start(); t.join()\n"
    )
    assert make(processes=4).run(program).stdout == b"thread\n"
    bomb = (
        "import threading, time\nn = 0\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1; print(n, flush=True)"
    )
    outcome = make(processes=4).run(bomb)
    assert not outcome.ok
    if "namespaces" in LAYERS:
        assert int(outcome.stdout.split()[-1]) < 10


@pytest.mark.slow
def test_a_thread_that_outlives_the_program_is_killed() -> None:
    program = "import threading, time\nthreading.Thread(target=lambda: time.sleep(1000)).start()\nprint('end')"
    outcome = make(processes=4, wall_seconds=1.5).run(program)
    assert (outcome.ended, outcome.stdout) == ("wall time", b"")  # never flushed


def test_only_the_standard_streams_are_inherited(box: Sandbox, tmp_path: Path) -> None:
    with open(tmp_path / "victim", "w") as victim:
        os.set_inheritable(victim.fileno(), True)
        program = (
            "import os\nfor fd in range(3, 200):\n  try: os.fstat(fd)\n  except OSError: continue\n"
            "  try: os.write(fd, b'x'); print(fd)\n  except OSError: pass\nprint('end')"
        )
        outcome = box.run(program)
    assert (tmp_path / "victim").read_text() == ""
    # one end of the launcher's own pipe is open; to write there ends the program
    assert outcome.ended == "exit"


def _children() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.add(entry.name)
    return found


def _folders() -> set[str]:
    import tempfile

    return {str(path) for path in Path(tempfile.gettempdir()).glob("dspec_sandbox_*")}


def test_no_process_and_no_folder_stays(box: Sandbox) -> None:
    children, folders, fds = _children(), _folders(), len(os.listdir("/proc/self/fd"))
    for program in ("1", "while True: print('x' * 9999)", "import os; os.mkdir('d', 0)", "import os; os._exit(3)"):
        box.run(program)
    with box.start("program", {"program": "import time; time.sleep(1000)"}, fds=(), capture=True):
        pass  # left at once: the context ends it
    assert _children() <= children
    assert _folders() <= folders
    assert len(os.listdir("/proc/self/fd")) == fds


def test_many_threads_share_one_sandbox(box: Sandbox) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: box.run(f"print({n} * {n})").stdout, range(12)))
    assert texts == [f"{n * n}\n".encode() for n in range(12)]
    assert threading.active_count() < 10


def test_the_level_is_named() -> None:
    assert make().level == "+".join(LAYERS)
    assert "landlock" in make().level


def test_where_nothing_contains_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "available_layers", lambda: ())
    with pytest.raises(UserError, match="allow_unsafe_code=true"):
        make()
    unsafe = make(allow_unsafe_code=True)
    assert unsafe.level == "limits alone (allow_unsafe_code)"
    assert unsafe.run("print(1)").stdout == b"1\n"
    assert not unsafe.run("import os; os.kill(os.getppid(), 9)").ok


def test_other_systems_have_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module.sys, "platform", "darwin")
    assert sandbox_module.available_layers.__wrapped__() == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wall_seconds", 0), ("memory_mb", 8), ("processes", 0), ("output_bytes", -1),
        ("wall_seconds", "abc"), ("cpu_seconds", None), ("cpu_seconds", 1.5), ("allow_unsafe_code", "maybe"),
    ],
)  # fmt: skip
def test_limits_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        make(**{name: value})


def test_a_layer_that_cannot_be_applied_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never silently weaker: here the kernel refuses the second unshare of what the probe said it has."""
    monkeypatch.setattr(sandbox_module, "available_layers", lambda: ("landlock", "seccomp"))
    monkeypatch.setattr(sandbox_module, "_START", sandbox_module._START.replace("main()", "raise SystemExit(9)"))
    with pytest.raises(sandbox_module.SandboxError, match="without a report"):
        make().run("print(1)")


def test_landlock_version_is_known() -> None:
    assert landlock.version() >= 1
