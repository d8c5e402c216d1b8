"""Writes that either happen whole or leave what was there before."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from dspec.errors import UserError


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` that replaces it when the block ends without an error.

    Raises UserError when the disk is full or the folder cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        _to_disk(scratch)
        os.replace(scratch, path)
        _to_disk(path.parent)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror or error}); what was there before is untouched"
        ) from error
    finally:
        with suppress(OSError):  # already gone, or its folder was never created
            scratch.unlink()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """The same for a folder: the new one replaces the old one only when it is complete.

    There is no portable atomic swap of two folders. A process killed between the two renames leaves the old one as
    .<name>.old: `restore` brings it back, and the next write calls it first.
    """
    scratch, old = None, _old(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        restore(path)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        scratch.chmod(0o755)
        yield scratch
        for part in (*scratch.rglob("*"), scratch):
            _to_disk(part)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(scratch, path)
        except OSError:
            restore(path)
            raise
        _to_disk(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror or error}); what was there before is untouched"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def restore(path: Path) -> None:
    """Restores a folder whose writer was killed between its two renames; otherwise removes a leftover old copy."""
    old = _old(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        with suppress(OSError):  # not ours to move: as good as missing
            os.replace(old, path)


def _old(path: Path) -> Path:
    return path.parent / f".{path.name}.old"


def _to_disk(path: Path) -> None:
    """Flushes a file's bytes (or a folder's entries, where the platform allows it) to disk, to survive a power cut."""
    folder = path.is_dir()
    with suppress(OSError) if folder else nullcontext():
        descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as scratch:
        scratch.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
