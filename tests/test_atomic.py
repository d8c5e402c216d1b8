"""Atomic writes: whole or not at all, one-line errors, nothing left lying about."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dspec.atomic import atomic_file, atomic_folder, write_json
from dspec.errors import UserError


def _tree(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


def _full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "x.txt"
    for text in ("one", "two"):
        with atomic_file(path) as scratch:
            scratch.write_text(text)
            assert not path.exists() or path.read_text() == "one"
        assert _tree(tmp_path) == {"deep/down/x.txt": text}


def test_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    for name in ("one", "two"):
        with atomic_folder(path) as scratch:
            (scratch / name).write_text(name)
        assert _tree(tmp_path) == {f"a/run/{name}": name}  # the old content is gone, not mixed in
        assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o755


def _old(root: Path, kind: str) -> str:
    name = "out" if kind == "file" else "out/x"
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("old")
    return name


def _write(path: Path, kind: str, error: BaseException | None) -> None:
    with atomic_file(path) if kind == "file" else atomic_folder(path) as scratch:
        (scratch if kind == "file" else scratch / "x").write_text("new")
        if error is not None:
            raise error


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "Disk full"), ValueError("x"), KeyboardInterrupt()])
def test_failure_inside_leaves_the_old(tmp_path: Path, kind: str, error: BaseException) -> None:
    name = _old(tmp_path, kind)
    expected = UserError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        _write(tmp_path / "out", kind, error)
    if expected is UserError:
        message = f"cannot write {tmp_path / 'out'} (Disk full); what was there before is untouched"
        assert str(caught.value) == message
    assert _tree(tmp_path) == {name: "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_failure_of_the_last_rename_leaves_the_old(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, rename = _old(tmp_path, kind), os.replace

    def broken(source: Path, goal: Path) -> None:
        if Path(source).name.startswith(".out.") and Path(source).name != ".out.old":
            _full()
        rename(source, goal)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(UserError, match="untouched"):
        _write(tmp_path / "out", kind, None)
    assert _tree(tmp_path) == {name: "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_unwritable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})
    with pytest.raises(UserError, match="cannot write"), atomic_folder(tmp_path / "file" / "x"):
        pass
    assert _tree(tmp_path) == {"file": "in the way"}


def test_a_folder_left_by_a_killed_run_is_cleared(tmp_path: Path) -> None:
    old = tmp_path / ".run.old"
    old.mkdir()
    (old / "x").write_text("stale")
    with atomic_folder(tmp_path / "run") as scratch:
        (scratch / "y").write_text("new")
    assert _tree(tmp_path) == {"run/y": "new"}


def test_write_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"name": "ä", "numbers": [1, 2.5, None]}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert "ä" in text
    assert text.endswith("}\n")
    monkeypatch.setattr(Path, "write_text", _full)
    with pytest.raises(UserError, match="No space left on device"):
        write_json(tmp_path / "x.json", {})
    monkeypatch.undo()
    assert _tree(tmp_path) == {"x.json": text}
