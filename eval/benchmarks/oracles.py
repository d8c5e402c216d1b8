"""What a right output is for a problem of evalplus: its reference outputs, and the problems with rules of their own.

The rules are evalplus's (its `unsafe_execute`), put so that a judge which compares outputs can apply them: some compare
what an adapter makes of the output, run after the program in the same sandbox, and some accept a second output.
Lists of such problems and the formulas are read from the installed evalplus. Knows no prompt and runs no answer itself.
"""

import contextlib
import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any

from data.rows import Row
from eval.benchmarks.code import Judge

_ADAPTED = "dspec_adapted_output"
_ADAPTER = f"\n\ndef {_ADAPTED}(*args):\n    output = {{call}}(*args)\n    return {{value}}\n"


def passes(judge: Judge, dataset: str, row: Row, *, program: str, inputs: Sequence[Any]) -> bool:
    """Whether a program is right on all inputs of a problem."""
    expected = reference(row, inputs)
    atol = tolerance(row, expected)
    adapter, convert = adapted(dataset, row["entry_point"])
    entry_point = _ADAPTED if adapter else row["entry_point"]
    program += adapter

    def agrees(some: Sequence[Any], outputs: Sequence[Any]) -> bool:
        verdict = judge.agrees(program=program, entry_point=entry_point, inputs=some, expected=outputs, atol=atol)
        return verdict.passed

    wanted = [convert(output) for output in expected]
    if agrees(inputs, wanted):
        return True
    second = alternative(dataset, row["entry_point"])
    if second is None:
        return False
    # each input may take either output
    return all(agrees([x], [y]) or agrees([x], [second(*x)]) for x, y in zip(inputs, wanted, strict=True))


def reference(row: Row, inputs: Sequence[Any]) -> list[Any]:
    """What the canonical solution gives, run by evalplus in this process."""
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    program, name = row["prompt"] + row["canonical_solution"], row["entry_point"]
    with contextlib.redirect_stdout(io.StringIO()):
        return list(trusted_exec(program, inputs, name, output_not_none=name in MBPP_OUTPUT_NOT_NONE_TASKS))


def tolerance(row: Row, expected: Sequence[Any]) -> float:
    """The problem's own tolerance; 1e-6 where it has none and outputs are floats."""
    from evalplus.eval import is_floats

    if row["atol"]:
        return float(row["atol"])
    return 1e-6 if any(is_floats(output) for output in expected) else 0.0


def adapted(dataset: str, name: str) -> tuple[str, Callable[[Any], Any]]:
    """Code that turns an output into what is compared ("" for the output as it is), and the same for a reference."""
    from evalplus.eval import _special_oracle as special

    if dataset == "humaneval" and name == "find_zero":  # any root will do: the polynomial must vanish there
        value = f"{special._poly.__name__}(*args, output)"
        return f"\n\nimport math\n{inspect.getsource(special._poly)}{_adapter(name, value)}", lambda _: 0.0
    if dataset == "mbpp" and name == "are_equivalent":  # evalplus takes whatever returns
        return _adapter(name, "True"), lambda _: True
    if dataset == "mbpp" and name in special.MBPP_OUTPUT_SET_EQ_TASKS:
        return _adapter(name, "sorted(set(output), key=repr)"), lambda output: sorted(set(output), key=repr)
    if dataset == "mbpp" and name in special.MBPP_OUTPUT_NOT_NONE_TASKS:
        return _adapter(name, "output if isinstance(output, bool) else output is not None"), lambda output: output
    return "", lambda output: output


def _adapter(name: str, value: str) -> str:
    return _ADAPTER.format(call=name, value=value)


def alternative(dataset: str, name: str) -> Callable[..., Any] | None:
    """A second output that evalplus accepts, from the arguments."""
    from evalplus.eval import _special_oracle as special

    if dataset != "mbpp":
        return None
    also: dict[str, Callable[..., Any]] = {
        "sum_div": lambda *_: 0,
        "surface_Area": special._surface_Area,
        "digit_distance_nums": special._digit_distance_nums,
    }
    return also.get(name)
