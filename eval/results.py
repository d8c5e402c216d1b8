"""Reading what runs left behind, for the tables that compare them. Imports nothing heavy."""

import json
from pathlib import Path
from typing import Any

from dspec.errors import UserError
from dspec.old_names import renamed

AR = "autoregressive"
AR_OF_BASE = "base_autoregressive"  # plain AR of the untrained base, where a method trains the target's own weights


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of a finished run. Raises UserError when it is missing, malformed or of a run that did not end."""
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(f"{path} is missing: give folders of finished runs")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        rows, run = results["rows"], results["run"]
        _ = run["seed"], run["config"], [(r["method"], r["benchmark"], r["decoder"]["temperature"]) for r in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the results of a run ({error!r}): give folders of finished runs") from error
    if not run.get("complete", True):
        raise UserError(f"{folder} has not finished: go on with resume={folder}")
    run["config"] = renamed(run["config"])  # so that runs from before a renaming compare with those after
    return dict(results)


def read_verdicts(folder: Path) -> dict[tuple[str, str, float], dict[str, dict[str, bool]]]:
    """Verdicts by (decoder, benchmark, temperature) and prompt id, from samples.jsonl."""
    path, found = folder / "samples.jsonl", dict[tuple[str, str, float], dict[str, dict[str, bool]]]()
    if not path.is_file():
        raise UserError(f"{path} is missing: quality is compared prompt by prompt")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], 2):
        try:
            row = json.loads(line)
            own = found.setdefault((row["decoder"], row["benchmark"], row["temperature"]), {})
            name, verdicts = row["id"], row["verdicts"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number} is malformed ({error!r}); evaluate anew") from error
        if name in own:
            raise UserError(f"{path} has two answers to {name}: two runs wrote into it; evaluate anew")
        own[name] = verdicts
    return found


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested config by dotted path."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    parts = (flat(inner, f"{prefix}.{name}" if prefix else name) for name, inner in value.items())
    return {path: leaf for part in parts for path, leaf in part.items()}
