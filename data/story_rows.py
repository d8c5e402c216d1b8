"""Five-sentence stories: ROCStories from the user's own file, and pieces of Aesop's fables that stand in for them.

ROCStories (Mostafazadeh et al. 2016) is given out on request only: put its CSV, or the same rows as JSON Lines, into
$DSPEC_DATA as rocstories.csv or rocstories.jsonl[.gz].
"""

import csv
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from data.rows import Rows, check_texts, load_rows
from dspec.errors import UserError

SENTENCES = 5
_FIELDS = [f"sentence{i}" for i in range(1, SENTENCES + 1)]


def roc_stories() -> Rows:
    """Rows with `sentences`, five each; the file has sentence1 .. sentence5."""
    folder = os.environ.get("DSPEC_DATA")
    table = Path(folder).expanduser() / "rocstories.csv" if folder else None
    if table is not None and table.is_file():
        rows = _csv(table)
    else:
        rows = check_texts(load_rows("rocstories", hub=None, fields=_FIELDS), fields=_FIELDS)
    return _pieces(rows, [[row[field].strip() for field in _FIELDS] for row in rows.rows])


def fables() -> Rows:
    """Rows with `sentences`: each fable's sentences five at a time, the rest left out (Townsend's Aesop, public
    domain)."""
    rows = check_texts(load_rows("aesop_fables", hub=None, fields=("sentences",)), fields=(), lists=("sentences",))
    pieces = [
        row["sentences"][start : start + SENTENCES]
        for row in rows.rows
        for start in range(0, len(row["sentences"]) - SENTENCES + 1, SENTENCES)
    ]
    return _pieces(rows, pieces)


def _csv(path: Path) -> Rows:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); fetch it again") from error
    for number, row in enumerate(rows, 1):
        if missing := [field for field in _FIELDS if row.get(field) is None]:
            raise UserError(f'{path}, row {number}: no "{missing[0]}"; every row of rocstories needs it')
    return Rows([dict(row) for row in rows], str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def _pieces(rows: Rows, pieces: Sequence[Sequence[str]]) -> Rows:
    """Raises UserError where there is none, or one with an empty sentence."""
    if not pieces:
        raise UserError(f"{rows.origin} has no story of {SENTENCES} sentences")
    for number, piece in enumerate(pieces, 1):
        if not all(sentence.strip() for sentence in piece):
            raise UserError(f"{rows.origin}, story {number} has an empty sentence; fix or delete it")
    return Rows([{"sentences": list(piece)} for piece in pieces], rows.origin, rows.sha256)
