"""The role that decides: it runs the test, and asks the worker to make the calls. No model-written code runs here.

The program's functions and classes appear as proxies. Results are plain data rebuilt from exact types, or an opaque
`Remote` that equals only itself, so no `__eq__` of the program decides. A builtin, a standard library module or a
helper of the trusted prefix is never taken from the program, unless it is the entry point. At the end it writes to the
verdict pipe: {"passed": nonce} or {"failed": reason}, with "gone" if the worker ended early.
"""

import ast
import builtins
import importlib
import json
import os
import sys
from typing import Any, NoReturn

from eval.sandbox.contain.codec import pack, receive, send, unpack
from eval.sandbox.contain.oracles import Comparison


class Broken(BaseException):
    """The worker has ended or sent garbage; a BaseException, so that no test's `except Exception` swallows it."""


class Peer:
    """The checker's connection to the worker."""

    def __init__(self, ask: int, answer: int) -> None:
        self._ask, self._answer = ask, answer
        self.broken: str | None = None
        self.gone = False

    def hello(self) -> None:
        """Waits until the program has been executed; raises what it raised."""
        self._reply()

    def __call__(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        request = [operation, pack(list(args), _handle_of), pack(kwargs, _handle_of)]
        try:
            send(self._ask, request)
        except BrokenPipeError:
            self._give_up("the program ended early", gone=True)
        return self._reply()

    def _reply(self) -> Any:
        try:
            message = receive(self._answer)
            if "value" in message:
                return unpack(message["value"], lambda handle: Remote(self, int(handle)))
            error = self._error(*message["error"])
        except EOFError:
            self._give_up("the program ended early", gone=True)
        except Exception as failure:
            self._give_up(f"an answer is malformed ({type(failure).__name__})")
        raise error

    def _error(self, name: str, args: Any) -> Exception:
        kind = vars(builtins).get(name)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            self._give_up(f"the program raised {name!r}"[:200])  # SystemExit would end the checker
        plain = unpack(args, _no_handles)
        try:
            return kind(*plain)
        except TypeError:
            return Exception(*plain)

    def _give_up(self, reason: str, *, gone: bool = False) -> NoReturn:
        self.broken, self.gone = reason, gone
        raise Broken(reason)


class Remote:
    """A proxy for an object in the worker. Compares by identity only."""

    __slots__ = ("_dspec_handle", "_dspec_peer")

    def __init__(self, peer: Peer, handle: int) -> None:
        object.__setattr__(self, "_dspec_peer", peer)
        object.__setattr__(self, "_dspec_handle", handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._dspec_peer("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and others look for protocols
            raise AttributeError(name)
        return self._dspec_peer("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._dspec_peer("setattr", self, name, value)

    def __iter__(self) -> Any:
        return self._dspec_peer("iter", self)

    def __next__(self) -> Any:
        return self._dspec_peer("next", self)

    def __len__(self) -> int:
        return self._dspec_peer("len", self)

    def __getitem__(self, key: Any) -> Any:
        return self._dspec_peer("getitem", self, key)

    def __contains__(self, item: Any) -> bool:
        return self._dspec_peer("contains", self, item) is True

    def __bool__(self) -> bool:
        return self._dspec_peer("bool", self) is True

    def __str__(self) -> str:
        return self._dspec_peer("str", self)

    def __repr__(self) -> str:
        return self._dspec_peer("repr", self)


def main(payload: dict[str, Any]) -> None:
    peer = Peer(payload["ask"], payload["answer"])
    verdict: dict[str, Any] = {"passed": payload["nonce"]}
    try:
        peer.hello()
        verdict |= _MODES[payload["mode"]](peer, payload)
    except BaseException as error:  # also SystemExit of a test, and Broken
        verdict = {"failed": f"{type(error).__name__}: {error}"[:500]}
    if peer.broken:  # even if the test swallowed it
        verdict = {"failed": peer.broken, "gone": peer.gone}
    with os.fdopen(payload["verdict"], "w", encoding="ascii") as pipe:
        pipe.write(json.dumps(verdict) + "\n")
    os._exit(0)


def _test(peer: Peer, payload: dict[str, Any]) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "test"}
    exec(compile(payload["trusted"], "trusted", "exec"), scope)
    scope |= _from_program(peer, payload["test"], payload["entry_point"], kept={*scope, *vars(builtins)})
    exec(compile(payload["test"], "test", "exec"), scope)
    return {}


def _from_program(peer: Peer, test: str, entry_point: str | None, *, kept: set[str]) -> dict[str, Any]:
    """The names that the test reads and the program defines; modules are our own import of the same name."""
    read = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    wanted = sorted((read - kept) | (read & {entry_point}))
    found = peer("find", Remote(peer, 0), wanted)
    modules = {name for name in wanted if name in sys.stdlib_module_names and name != entry_point}
    return {name: importlib.import_module(name) if name in modules else found[name] for name in wanted if name in found}


def _agree(peer: Peer, payload: dict[str, Any]) -> dict[str, Any]:
    comparison = Comparison(payload["dataset"], payload["entry_point"], payload["atol"])
    inputs, expected = (unpack(payload[name], _handle_of) for name in ("inputs", "expected"))
    function = _function(peer, payload["entry_point"])
    for index, (arguments, right) in enumerate(zip(inputs, expected, strict=True)):
        if not comparison.holds(function(*arguments), right, arguments):
            raise AssertionError(f"wrong answer for input {index}")
    return {}


def _answer(peer: Peer, payload: dict[str, Any]) -> dict[str, Any]:
    comparison = Comparison(payload["dataset"], payload["entry_point"], 0.0)
    function = _function(peer, payload["entry_point"])
    answers = [comparison.reference(function(*args)) for args in unpack(payload["inputs"], _handle_of)]
    return {"answers": pack(answers, _no_handles)}


def _function(peer: Peer, name: str) -> Any:
    found = peer("find", Remote(peer, 0), [name])
    if name not in found:
        raise NameError(f"the program defines no {name}")
    return found[name]


_MODES = {"test": _test, "agree": _agree, "answer": _answer}


def _handle_of(value: Any) -> Any:
    if type(value) is not Remote:
        raise TypeError(f"a {type(value).__name__} of the test cannot be passed to the program")
    return {"handle": value._dspec_handle}


def _no_handles(value: Any) -> Any:
    raise TypeError("an answer is no plain value")
