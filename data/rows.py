"""Rows of public data sets, from $DSPEC_DATA or the Hugging Face Hub, with a checksum of what was read.

Knows the files and their fields, not how a benchmark or a training run uses them.
"""

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dspec.errors import UserError

DataRow = dict[str, Any]


class Hub(NamedTuple):
    """A data set on the Hub; several configs are concatenated."""

    repo: str
    configs: Sequence[str]
    split: str


@dataclass(frozen=True)
class Rows:
    rows: list[DataRow]
    origin: str  # path of the file, or the Hub id with config and split
    sha256: str  # of the file's bytes; for the Hub, of the rows as JSON Lines with sorted keys


def _lines(path: Path) -> Iterator[str]:
    """Lines of a text file, gzip or plain; raises UserError if it cannot be read to the end."""
    if not path.is_file():
        raise UserError(f"no data file at {path}; check the path (DSPEC_DATA={os.environ.get('DSPEC_DATA', 'unset')})")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); fetch it again") from error


def read_jsonl(path: Path) -> Iterator[tuple[int, DataRow]]:
    """(line number, row) of a JSON Lines file, gzip or plain; raises UserError with file and line for a bad row."""
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
            if "\\ud" in line.lower():  # half a surrogate pair: no tokenizer and no file takes it
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            what = "is empty" if not line.strip() else f"is not JSON ({error})"
            raise UserError(f"{path}, line {number} {what}; fix or delete it") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is not a JSON object; fix or delete it")
        yield number, row


def data_file(name: str) -> Path | None:
    """$DSPEC_DATA/<name>.jsonl[.gz]; None if DSPEC_DATA is unset. Raises UserError with the paths tried."""
    folder = os.environ.get("DSPEC_DATA")
    if not folder:
        return None
    tried = [Path(folder).expanduser() / f"{name}{suffix}" for suffix in (".jsonl.gz", ".jsonl")]
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise UserError(f"no data file {' or '.join(map(str, tried))}; put it there or unset DSPEC_DATA for the Hub")
    return found


def load_rows(name: str, *, hub: Hub | None, fields: Sequence[str]) -> Rows:
    """Rows of a public data set, each with all of `fields`, from $DSPEC_DATA or else the Hub."""
    path = data_file(name)
    if path is not None:
        numbered = list(read_jsonl(path))
        loaded = Rows([row for _, row in numbered], str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    elif hub is not None:
        loaded = _from_hub(name, hub)
    else:
        raise UserError(f"{name} is read from a file: set DSPEC_DATA to a folder with {name}.jsonl.gz")
    if not loaded.rows:
        raise UserError(f"{loaded.origin} has no rows; fetch it again")
    for number, row in enumerate(loaded.rows, 1):
        if missing := [field for field in fields if field not in row]:
            raise UserError(f'{loaded.origin}, line {number}: no "{missing[0]}"; every row of {name} needs it')
    return loaded


def check_texts(rows: Rows, *, fields: Sequence[str], lists: Sequence[str] = ()) -> Rows:
    """The rows themselves. Raises UserError for one whose `fields` are no strings, or whose `lists` are no lists of
    strings."""
    for number, row in enumerate(rows.rows, 1):
        for field in (*fields, *lists):
            value = row.get(field)
            texts = value if field in lists and isinstance(value, list) else [value]
            if (field in lists and texts is not value) or not all(isinstance(text, str) for text in texts):
                wanted = "a list of strings" if field in lists else "a string"
                raise UserError(f'{rows.origin}, line {number}: "{field}" must be {wanted}; fix or delete it')
    return rows


def _from_hub(name: str, hub: Hub) -> Rows:
    from datasets import load_dataset

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without a network it reports each of many retries
    try:
        rows = [dict(row) for config in hub.configs for row in load_dataset(hub.repo, config, split=hub.split)]
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a data set of an old kind, with a script
        raise UserError(
            f"cannot load {hub.repo} from the Hub ({type(error).__name__}); "
            f"set DSPEC_DATA to a folder with {name}.jsonl.gz"
        ) from error
    text = "".join(json.dumps(row, sort_keys=True, default=str) + "\n" for row in rows)
    origin = f"{hub.repo} ({', '.join(hub.configs)}; {hub.split}) on the Hub"
    return Rows(rows, origin, hashlib.sha256(text.encode()).hexdigest())


def gsm8k_rows(split: str) -> Rows:
    """GSM8K (MIT; openai/grade-school-math)."""
    return load_rows(f"gsm8k_{split}", hub=Hub("openai/gsm8k", ["main"], split), fields=("question", "answer"))


_SUBJECTS = (
    "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus".split()
)


def math_rows(split: str) -> Rows:
    """MATH as published (MIT as stated upstream; hendrycks/math)."""
    hub = Hub("EleutherAI/hendrycks_math", _SUBJECTS, split)
    return load_rows(f"math_{split}", hub=hub, fields=("problem", "solution"))


def math500_rows() -> Rows:
    """MATH-500 (openai/prm800k), a subset of the MATH test set."""
    hub = Hub("HuggingFaceH4/MATH-500", ["default"], "test")
    return load_rows("math500", hub=hub, fields=("problem", "answer"))


def same_problem(text: str) -> str:
    """A problem's text without white space, in which copies of a problem differ."""
    return " ".join(text.split())


def math_training_rows() -> Rows:
    """The MATH train set without what is also in the test set (one problem, differing only in white space)."""
    train, test = math_rows("train"), math_rows("test")
    tested = {same_problem(row["problem"]) for row in test.rows}
    kept = [row for row in train.rows if same_problem(row["problem"]) not in tested]
    return Rows(kept, f"{train.origin} less {test.origin}", train.sha256)
