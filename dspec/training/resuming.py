"""A resumed run must be the same run: its settings are stored in config.json, and its folder may be moved."""

import json
from pathlib import Path
from typing import Any

from dspec.config.leaves import flat
from dspec.config.old_names import renamed
from dspec.errors import UserError


def check_same_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Raises UserError naming the keys in which a resumed command differs from the run it resumes."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UserError(f"nothing to resume: {path} is missing; set resume= to the folder of a run")
    try:
        before = renamed(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): restore it, or start a new run") from error
    now = json.loads(json.dumps(portable(config, run_dir)))
    old, new = (flat({k: v for k, v in c.items() if k != "resume"}) for c in (before, now))
    if one_sided := sorted(old.keys() ^ new.keys()):
        raise UserError(
            f"{run_dir} was started with other options or by another version of dspec (only one of both has "
            f"{', '.join(one_sided[:3])}): use the same command and version, or evaluate what it has exported with "
            "python -m eval.run checkpoint=<folder>"
        )
    if odd := sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k)):
        raise UserError(f"resume= needs the same command; these keys differ from {path}: {', '.join(odd[:5])}")


def portable(config: Any, run_dir: Path) -> Any:
    """The config with paths inside the run folder written as "<run>/...": the folder may be moved or renamed."""
    if isinstance(config, dict):
        return {k: portable(v, run_dir) for k, v in config.items()}
    if isinstance(config, list):
        return [portable(v, run_dir) for v in config]
    root = str(run_dir.absolute())
    inside = isinstance(config, str) and (config == root or config.startswith(f"{root}/"))
    return f"<run>{config.removeprefix(root)}" if inside else config
