"""The role that runs model-written code: it executes the program, then answers calls until the checker hangs up.

Nothing that it sends is trusted, and it learns only the arguments of each call: no test, no expected value. Objects
that are not plain values stay here; the checker gets a number for each.
"""

import builtins
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from eval.sandbox.contain.codec import pack, receive, send, unpack


class _Objects:
    """The objects for which the checker holds handles."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def keep(self, value: Any) -> dict[str, int]:
        self._kept.append(value)
        return {"handle": len(self._kept) - 1}

    def __getitem__(self, handle: int) -> Any:
        return self._kept[handle]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "find": lambda scope, names: {name: vars(scope)[name] for name in names if name in vars(scope)},
    **{"getattr": getattr, "setattr": setattr, "iter": iter, "next": next, "len": len},
    **{"getitem": operator.getitem, "contains": operator.contains, "str": str, "repr": repr, "bool": bool},
}


def main(payload: dict[str, Any]) -> None:
    ask, answer, objects = payload["ask"], payload["answer"], _Objects()
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    objects.keep(module)  # handle 0
    try:
        exec(compile(payload["program"], "program", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too: the program must not end here
        send(answer, _failure(error, objects))
        os._exit(1)
    send(answer, {"value": None})
    try:
        while True:
            send(answer, _serve(receive(ask), objects))
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _serve(request: Any, objects: _Objects) -> dict[str, Any]:
    try:
        operation, args, kwargs = (unpack(part, objects.__getitem__) for part in request)
        return {"value": pack(_OPERATIONS[operation](*args, **kwargs), objects.keep)}
    except BaseException as error:
        return _failure(error, objects)


def _failure(error: BaseException, objects: _Objects) -> dict[str, Any]:
    """The nearest builtin class of an exception and its arguments, or its text if these are not plain."""
    kind = next(kind for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind)
    try:
        args = pack(list(error.args), _no_handles)
    except Exception:
        args = [str(error)]
    return {"error": [kind.__name__, args]}


def _no_handles(value: Any) -> Any:
    raise TypeError
