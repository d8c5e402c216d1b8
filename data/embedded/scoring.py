"""Scores: the last ``#### <integer>`` of a word problem, the hidden tests of a function.

A function is model output. It is parsed, held against a whitelist of syntax, and only then run in a process
of its own with few builtins and tight limits. That stops accidents and simple tricks; it is no full sandbox
(no namespaces, no system-call filter), which is the business of ``eval/sandbox``.
"""

import ast
import builtins
import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence

_ANSWER = re.compile(r"####[ \t]*(-?\d[\d,]*)")
_MAX_SOURCE = 4000
_BUILTINS = (
    "abs all any bool dict divmod enumerate filter float int isinstance len list map max min range reversed "
    "round set sorted str sum tuple zip"
).split()
_METHODS = frozenset(
    "append capitalize copy count endswith extend find get index insert isalpha isdigit islower isupper items "
    "join keys lower lstrip pop remove replace reverse rstrip sort split startswith strip title upper "
    "values".split()
)
_NODES = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.Expr),
    *(
        ast.For,
        ast.While,
        ast.If,
        ast.Break,
        ast.Continue,
        ast.Pass,
        ast.Name,
        ast.Constant,
        ast.Load,
        ast.Store,
    ),
    *(
        ast.BinOp,
        ast.UnaryOp,
        ast.BoolOp,
        ast.Compare,
        ast.IfExp,
        ast.Call,
        ast.keyword,
        ast.Attribute,
        ast.Lambda,
    ),
    *(
        ast.Subscript,
        ast.Slice,
        ast.List,
        ast.Tuple,
        ast.Dict,
        ast.Set,
        ast.ListComp,
        ast.SetComp,
        ast.DictComp,
    ),
    *(
        ast.GeneratorExp,
        ast.comprehension,
        ast.JoinedStr,
        ast.FormattedValue,
        ast.operator,
        ast.unaryop,
        ast.boolop,
    ),
    *(ast.cmpop, ast.Starred),
)
# The child reads the job and prints the token if every test holds. A body
# cannot name the token: it sees its own globals, and attributes that lead elsewhere are refused beforehand.
_CHILD = """
import json, resource, sys
job = json.loads(sys.stdin.read())
sys.stdin.close()
limits = {"CPU": job["seconds"], "AS": 256 << 20, "FSIZE": 0, "NPROC": 0, "CORE": 0, "NOFILE": 8}
if sys.platform == "darwin":
    del limits["AS"]  # its kernel refuses this one
for name, value in limits.items():
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
builtins = {name: getattr(__import__("builtins"), name) for name in job["builtins"]}
function = {"__builtins__": builtins}
exec(compile(job["source"], "body", "exec"), function)
for test in job["tests"]:
    exec(compile(test, "test", "exec"), {"__builtins__": {}, job["name"]: function[job["name"]]})
print(job["token"])
"""


def score_problem(text: str, answer: str) -> bool:
    """Whether the last ``#### <integer>`` of ``text`` is ``answer``; thousands may have commas."""
    found = _ANSWER.findall(text)
    return bool(found) and int(found[-1].replace(",", "")) == int(answer)


def score_function(prompt: str, body: str, tests: Sequence[str], *, timeout_s: float) -> bool:
    """Whether ``prompt`` completed by ``body`` passes every test within ``timeout_s``."""
    if sys.platform == "win32":
        raise OSError("functions are scored under POSIX resource limits; run this on Linux, macOS or WSL")
    source = f"{prompt}\n{body}\n"
    name = _allowed(source)
    if name is None or not tests:
        return False
    token = secrets.token_hex(16)
    job: dict[str, object] = {
        "token": token,
        "source": source,
        "name": name,
        "tests": list(tests),
        "builtins": _BUILTINS,
    }
    job["seconds"] = int(timeout_s) + 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _CHILD],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                cwd=folder,
                env={},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout == f"{token}\n"


def _allowed(source: str) -> str | None:
    """The name of the one function that ``source`` defines, or None if anything in it is off the whitelist."""
    if len(source) > _MAX_SOURCE:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    function = tree.body[0]
    nodes = [node for node in ast.walk(tree) if node is not function]
    plain = not function.decorator_list and not any(isinstance(node, ast.FunctionDef) for node in nodes)
    return function.name if plain and all(_allowed_node(node) for node in nodes) else None


def _allowed_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Name):
        return not node.id.startswith("__") and (node.id in _BUILTINS or node.id not in dir(builtins))
    if isinstance(node, ast.arg):
        return not node.arg.startswith("__")
    return isinstance(node, _NODES)
