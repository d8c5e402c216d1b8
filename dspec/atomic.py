"""Writes that either happen whole or leave what was there before."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        os.replace(scratch, path)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror or error}); what was there before is untouched"
        ) from error
    finally:
        with suppress(OSError):  # gone already, or its folder never came to be
            scratch.unlink()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """The same for a folder: the new one takes the old one's place only when it is complete."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        scratch.chmod(0o755)
        yield scratch
        old = path.with_name(f".{path.name}.old")
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
        try:
            os.replace(scratch, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror or error}); what was there before is untouched"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as scratch:
        scratch.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
