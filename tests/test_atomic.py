"""Atomic writes: whole or not at all, one-line errors, nothing left lying about."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dspec.atomic import atomic_file, atomic_folder, restore, write_json
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


def _killed_at(call: int, write: Any) -> bool:
    """Runs `write` in a process that dies (as by kill -9) before its `call`-th change of the disk; whether it did."""
    if (child := os.fork()) == 0:
        left = call

        def dying(function: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                return os._exit(9) if left == 0 else function(*args, **kwargs)

            return wrapped

        os.replace, os.fsync, shutil.rmtree = dying(os.replace), dying(os.fsync), dying(shutil.rmtree)
        write()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("first", [0, 1])
def test_killed_at_any_step_leaves_one_of_both_whole(tmp_path: Path, kind: str, first: int) -> None:
    """The old or the new content; a write after it finds its way."""

    def write(root: Path, content: str) -> None:
        with atomic_file(root / "out") if kind == "file" else atomic_folder(root / "out") as scratch:
            for path in [scratch] if kind == "file" else [scratch / "a", scratch / "b"]:
                path.write_text(content)

    def read(root: Path) -> set[str]:
        return {text for name, text in _tree(root).items() if name.startswith("out")}

    seen, missing, call = [], 0, first
    while True:
        root = tmp_path / str(call := call + 1)
        root.mkdir()
        write(root, "old")
        killed = _killed_at(call - first, lambda root=root: write(root, "new"))  # type: ignore[misc]
        missing += not read(root)
        if call % 2:
            restore(root / "out")
        else:  # a write brings the old one back before anything else, and so leaves it when it fails
            with pytest.raises(ZeroDivisionError):
                _write(root / "out", kind, ZeroDivisionError())
        (found,) = read(root)
        assert len(_tree(root / "out")) == (0 if kind == "file" else 2)
        seen.append(found)
        write(root, "next")
        assert read(root) == {"next"}
        assert not (root / ".out.old").exists()
        if not killed:
            break
    assert seen == sorted(seen, reverse=True)  # old, then new
    assert {"old", "new"} == set(seen)
    assert missing == (kind == "folder")  # between the renames: the old one is brought back


def test_bytes_are_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut behind the rename must not leave an empty file under the right name."""
    steps: list[str] = []
    replace = os.replace

    def watched_fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").resolve().name if Path("/proc/self/fd").exists() else "?")

    def watched_replace(source: Path, goal: Path) -> None:
        steps.append(f"-> {goal.name}")
        replace(source, goal)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_json(tmp_path / "x.json", {})
    assert len(steps) == 3
    assert steps[1] == "-> x.json"
    steps.clear()
    with atomic_folder(tmp_path / "run") as scratch:
        (scratch / "deep").mkdir()
        (scratch / "deep" / "a").write_text("a")
    assert steps.index("-> run") == 3  # the file, its folder, the whole
    assert len(steps) == 5
