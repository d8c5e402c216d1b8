"""Progress where there is no terminal: plain lines, from the first second, now and then."""

import io

from rich.console import Console

from eval.meter import Meter


def test_plain_lines_now_and_then() -> None:
    now, out = [0.0], io.StringIO()
    with Meter("evaluation", console=Console(file=out), clock=lambda: now[0]) as meter:
        meter.phase("reading weights")
        assert out.getvalue() == "evaluation: reading weights\n"
        meter.expect(100, done=20)
        meter.phase("gsm8k T=0")
        for second in range(1, 41):
            now[0] = float(second)
            meter.advance(1)
        meter.say("[a row] that is done")
    lines = out.getvalue().splitlines()
    assert lines[1] == "evaluation: gsm8k T=0, 20/100, 0:00 passed"
    assert lines[2] == "evaluation: gsm8k T=0, 40/100, 0:20 passed, about 1:00 left"  # 20 of its own in 20 s
    assert lines[3] == "evaluation: gsm8k T=0, 60/100, 0:40 passed, about 0:40 left"
    assert lines[4:] == ["[a row] that is done"]


def test_a_terminal_has_a_bar() -> None:
    out = io.StringIO()
    with Meter("evaluation", console=Console(file=out, force_terminal=True, width=80)) as meter:
        meter.phase("warm-up")
        meter.expect(4, done=1)
        meter.advance(1)
    assert "2/4" in out.getvalue()
    assert "passed" not in out.getvalue()
