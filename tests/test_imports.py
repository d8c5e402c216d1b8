"""The direction of imports and a few words that do not occur, read from the syntax tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("dspec", "data", "eval")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
# inside dspec: which packages a package may import beside itself
LOWER = {
    "attention": (),
    "config": (),
    "models": ("attention",),
    "jacobi_forcing": ("models", "attention"),
    "masked_diffusion": ("models", "attention"),
    "methods": ("models", "attention", "jacobi_forcing", "masked_diffusion"),
    "decoding": ("models", "attention"),
    "calibration": ("decoding", "models", "attention"),
    "serving": ("decoding", "models", "attention"),
    "training": ("config", "calibration", "models", "attention"),
}


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(source: str, where: str) -> list[str]:
    """What the file `where` (dotted package of the module, such as dspec.models) must not do."""
    tree, found = ast.parse(source), []
    room, _, rest = where.partition(".")
    forbidden = {"dspec": ("data", "eval"), "data": ("eval",), "eval": ()}[room]
    part = rest.partition(".")[0]
    for name in _imports(tree, where):
        top, _, inner = name.partition(".")
        other = inner.partition(".")[0]
        if top in forbidden:
            found.append(f"imports {name}")
        if room == top == "dspec" and part in LOWER and other in LOWER and other not in (part, *LOWER[part]):
            found.append(f"imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"assert in line {node.lineno}")
        if isinstance(node, ast.Name) and node.id in ("hasattr", "NotImplementedError"):
            found.append(f"{node.id} in line {node.lineno}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rules_hold(path: Path) -> None:
    where = ".".join(path.relative_to(ROOT).parent.parts)
    assert violations(path.read_text(encoding="utf-8"), where) == []


def test_all_rooms_are_read() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(ROOMS)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("import data.chat", "dspec"),
        ("from eval import run", "dspec.models"),
        ("from eval.reports.report import x", "data.embedded"),
        ("from dspec.decoding.generation import Generation", "dspec.methods"),
        ("from dspec.methods import dflash", "dspec.decoding"),
        ("from dspec.decoding import loop", "dspec.models"),
        ("from dspec import models", "dspec.attention"),
        ("from dspec.calibration.sts import fit_sts", "dspec.models"),
        ("from dspec.calibration import sts", "dspec.decoding"),
        ("from dspec.calibration import sts", "dspec.methods"),
        ("from dspec.methods import dspark", "dspec.calibration"),
        ("from ..methods import dflash", "dspec.decoding"),
        ("def f():\n    from dspec.methods import dflash", "dspec.config"),
        ("from dspec.training.parts import Data", "dspec.methods"),
        ("from dspec.config.compose import instantiate", "dspec.jacobi_forcing"),
        ("assert x", "eval"),
        ("if hasattr(x, 'y'): pass", "data"),
        ("raise NotImplementedError", "dspec.methods"),
        ("raise NotImplementedError('later')", "dspec"),
    ],
)
def test_each_rule_bites(source: str, where: str) -> None:
    assert len(violations(source, where)) == 1


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("from dspec.models.draft import Draft\nfrom data import chat", "eval"),
        ("from dspec.method import Batch", "data"),
        ("from dspec.attention import masks", "dspec.models"),
        ("from dspec.models.language_model import LanguageModel\nfrom dspec.losses import x", "dspec.methods"),
        ("from dspec.methods.dflash import DFlash", "dspec.methods"),
        ("from dspec.decoding.loop import decode\nfrom dspec.models.draft import Draft", "dspec.calibration"),
        ("from datasets import load_dataset\nimport evaluate", "dspec"),
        ("from dspec.decoding.loop import Decoder\nfrom dspec.methods import dflash", "dspec"),
    ],
)
def test_what_is_allowed(source: str, where: str) -> None:
    assert violations(source, where) == []
