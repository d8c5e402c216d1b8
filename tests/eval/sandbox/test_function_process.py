"""A process of its own: what ends it between two questions changes no answer, what hangs in one is over in time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dspec.errors import UserError
from eval.sandbox import function_process
from eval.sandbox.function_process import FunctionProcess, Reply

SCRIPT = """
import os, sys, time
from eval.sandbox.function_process import serve

def answer(what, value=None):
    if what == "raise":
        raise RecursionError("deep")
    if what == "fill":
        return len(bytearray(1 << 40))
    if what == "die":
        os._exit(1)
    if what == "die once" and not os.path.exists(value):
        open(value, "w").close()
        os._exit(1)
    if what == "print":
        print('["answered", "printed"]', flush=True)
    if what == "hang":
        time.sleep(600)
    return [os.getpid(), value]

if __name__ == "__main__":
    serve(lambda: answer, memory_bytes=1 << 30)
"""
Make = Callable[[float], FunctionProcess]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda timeout_s: FunctionProcess(tmp_path / "script.py", timeout_s=timeout_s, refusal="mend it")


def pid(process: FunctionProcess) -> int:
    reply = process.ask("say")
    assert reply.how == "answered"
    return int(reply.value[0])


def test_values_and_exceptions_come_back_from_one_process(make: Make) -> None:
    process = make(30.0)
    first = pid(process)
    assert process.ask("say", {"a": ["\ud800", "½", 1.5, None]}).value == [first, {"a": ["\ud800", "½", 1.5, None]}]
    assert process.ask("raise") == Reply("raised")
    assert process.ask("fill") == Reply("raised")
    assert process.ask("print") == Reply("answered", [first, None])
    assert pid(process) == first


@pytest.mark.slow
def test_an_alarm_is_over_with_its_question(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model lets the process wait for longer than any question may take."""
    monkeypatch.setattr(function_process, "_SLACK_S", -29)  # an alarm after one second
    process = make(30.0)
    first = pid(process)
    time.sleep(1.3)
    assert pid(process) == first


@pytest.mark.slow
def test_an_alarm_ends_a_question_whose_host_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_process, "_SLACK_S", -29)
    process = make(30.0)
    assert process.ask("hang") == Reply("died")  # by its own clock, long before ours


def test_what_died_between_two_questions_is_started_anew(make: Make) -> None:
    process = make(30.0)
    first = pid(process)
    os.kill(first, signal.SIGALRM)
    assert pid(process) != first


def test_what_dies_of_a_question_is_asked_once_more(make: Make, tmp_path: Path) -> None:
    process = make(30.0)
    assert process.ask("die once", str(tmp_path / "died")).how == "answered"
    assert process.ask("die") == Reply("died")
    assert process.ask("say").how == "answered"


@pytest.mark.slow
def test_what_hangs_is_killed_and_not_asked_again(make: Make) -> None:
    process = make(2.0)
    first = pid(process)
    assert process.ask("hang") == Reply("timed out")
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert pid(process) != first


def test_threads_share_it(make: Make) -> None:
    process = make(30.0)
    got: list[int] = []
    threads = [threading.Thread(target=lambda i=i: got.append(process.ask("say", i).value[1])) for i in range(9)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(9))


def test_a_script_that_does_not_start_gives_the_mend(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import no_such_module")
    with pytest.raises(UserError, match="mend it"):
        FunctionProcess(tmp_path / "script.py", timeout_s=30.0, refusal="mend it").ask("say")


@pytest.mark.parametrize("seconds", [0, -1.0, "abc", None])
def test_a_timeout_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(UserError, match=f"timeout_s={seconds}"):
        FunctionProcess(Path("script.py"), timeout_s=seconds, refusal="")
