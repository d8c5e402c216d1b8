"""Checks a config against the constructors it names: each key is a parameter, each value of the parameter's type.

Constructors are imported for this, torch with them: entry points call `check_types` where the run begins, after the
checks of dspec/config/checks.py and before anything is loaded.
"""

import difflib
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from dspec.errors import UserError

_HYDRAS_KEYS = {"_target_", "_partial_", "_args_", "_recursive_", "_convert_"}
_SCALARS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "booleans"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
    types.NoneType: ("null", "nulls"),
}


def check_types(cfg: DictConfig) -> None:
    """Raises UserError for a key that is no parameter of its section's `_target_`, and for a value of another type.

    Interpolations count by what they resolve to; null if the program sets it later (as eval.run does `label`) passes.
    """
    resolved, written = (OmegaConf.to_container(cfg, resolve=resolve) for resolve in (True, False))
    _check_section(str(cfg._get_full_key(None) or ""), resolved, written)


@functools.cache
def parameters(target: str) -> dict[str, Any]:
    """Annotations of a constructor's or function's parameters by name; Any for one without, "**" for further keywords.

    Raises UserError if it cannot be imported.
    """
    try:
        constructor = get_object(target)
    except Exception as error:  # whatever its module raises when it is imported
        raise UserError(f"_target_={target} cannot be imported: {error}") from error
    found: dict[str, Any] = {}
    for name, parameter in _signature(constructor).parameters.items():
        hint = Any if parameter.annotation is parameter.empty else parameter.annotation
        if parameter.kind is not parameter.VAR_KEYWORD:
            found[name] = hint
        elif typing.get_origin(hint) is typing.Unpack:
            found |= typing.get_type_hints(typing.get_args(hint)[0])
        else:
            found["**"] = hint
    return found


def _signature(constructor: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(constructor, eval_str=True)
    except NameError:  # a name that is imported for type checkers only
        return inspect.signature(constructor)


def _check_section(path: str, node: Any, written: Any) -> None:
    if not isinstance(node, dict):
        return
    if isinstance(node.get("_target_"), str):
        _check_parameters(path, node, written)
    for name, inner in node.items():
        within = written[name] if isinstance(written, dict) else inner  # a whole section may be an interpolation
        _check_section(_join(path, name), inner, within)


def _check_parameters(path: str, node: dict[str, Any], written: Any) -> None:
    target = node["_target_"]
    known = parameters(target)
    for name, value in node.items():
        if name in _HYDRAS_KEYS:
            continue
        if name not in known and "**" not in known:
            raise UserError(_unknown(_join(path, name), name, target, known))
        later = value is None and isinstance(written, dict) and isinstance(written[name], str)
        if not later and value != "???" and (found := _mismatch(_join(path, name), value, known.get(name, Any))):
            raise UserError(found)


def _unknown(path: str, name: str, target: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    short = target.rpartition(".")[2]
    return f"unknown key {path}: {short} takes no {name}" + (f" (did you mean {near[0]}?)" if near else "")


def _mismatch(path: str, value: Any, hint: Any) -> str | None:
    """What is wrong with a value for a parameter of this annotation; None if nothing is, or nothing can be said."""
    if _fits(value, hint):
        return None
    for option in _options(hint):
        if isinstance(value, dict) and (inner := dict(_inner(value, option))):  # names the key inside
            found = (_mismatch(_join(path, name), value[name], inner[name]) for name in value if name in inner)
            return next(filter(None, found), None) or f"unknown key {path}.{next(n for n in value if n not in inner)}"
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    text = type(value) in (int, float) and str in _options(hint)
    quoted = f": quote it, '{path}=\"{shown}\"'" if text else ""
    return f"{path}={shown} must be {' or '.join(_words(hint))}{quoted}"


def _fits(value: Any, hint: Any) -> bool:
    options = _options(hint)
    if len(options) > 1:
        return any(_fits(value, option) for option in options)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint in _SCALARS:
        return _is_scalar(value, hint)
    if origin is typing.Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if isinstance(value, dict) and "_target_" in value:
        return True  # its object is known only once it is built
    if typing.is_typeddict(hint) or origin in (dict, Mapping):
        inner = dict(_inner(value, hint)) if isinstance(value, dict) else {}
        return isinstance(value, dict) and all(n in inner and _fits(value[n], inner[n]) for n in value)
    if origin is tuple and args and args[-1] is not ...:
        return isinstance(value, list) and len(value) == len(args) and all(map(_fits, value, args))
    if origin in (list, tuple, Sequence):
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    built = origin is Callable or (inspect.isclass(hint) and hint not in (dict, list, tuple, object))
    return not built  # an object that only a section with a _target_ gives


def _is_scalar(value: Any, hint: Any) -> bool:
    if hint in (None, types.NoneType):
        return value is None
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (str if hint is Path else hint)


def _inner(value: dict[str, Any], hint: Any) -> Iterator[tuple[str, Any]]:
    """Annotations of a mapping's keys."""
    if typing.is_typeddict(hint):
        yield from typing.get_type_hints(hint).items()
    elif typing.get_origin(hint) in (dict, Mapping):
        yield from ((name, typing.get_args(hint)[1]) for name in value)


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; else the annotation itself."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(o for arg in typing.get_args(hint) for o in _options(arg)) if union else (hint,)


def _words(hint: Any) -> list[str]:
    """What a value may be, for the error: "an integer", "null"."""
    found: list[str] = []
    for option in _options(hint):
        args, origin = typing.get_args(option), typing.get_origin(option)
        if option is None or option in _SCALARS:
            found.append(_SCALARS[types.NoneType if option is None else option][0])
        elif origin is typing.Literal:
            found += [json.dumps(arg).strip('"') for arg in args]
        elif origin in (list, tuple, Sequence):
            many = {plural for o in _options(args[0]) if (plural := _SCALARS.get(o, ("", ""))[1])}
            count = f"{len(args)} " if origin is tuple and args[-1] is not ... else ""
            found.append(f"a list of {count}{' or '.join(sorted(many)) or 'values'}")
        elif typing.is_typeddict(option) or origin in (dict, Mapping):
            found.append("a section")
    return list(dict.fromkeys(found)) or ["a section with a _target_"]


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
