"""MT-Bench, first turns only (Zheng et al. 2023, arXiv 2306.05685; data Apache-2.0, lm-sys/FastChat).

For speed and acceptance on open-ended chat: answers are not judged. The user turn is the question's first turn.
"""

from typing import Unpack

from data.rows import DataRow, Hub, Rows, load_rows
from dspec.errors import UserError
from eval.benchmarks.base import Extent, FileBenchmark, Item


class MtBench(FileBenchmark):
    quality = ""
    chat = True
    stop: tuple[str, ...] = ()

    def __init__(self, **extent: Unpack[Extent]) -> None:
        super().__init__(_questions(), key=_id, describes="the first turn alone", **extent)

    def prompt(self, row: DataRow) -> str:
        return str(row["turns"][0])

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return {}


def _id(_: int, row: DataRow) -> str:
    return f"mt_bench/{row['question_id']}"


def _questions() -> Rows:
    """The questions; the Hub's copy has other names for the two fields."""
    data = load_rows("mt_bench", hub=Hub("HuggingFaceH4/mt_bench_prompts", ["default"], "train"), fields=())
    rows = [
        {"question_id": r.get("question_id", r.get("prompt_id")), "turns": r.get("turns", r.get("prompt"))}
        for r in data.rows
    ]
    for number, row in enumerate(rows, 1):
        if row["question_id"] is None or not row["turns"]:
            raise UserError(f'{data.origin}, line {number}: no "question_id" or no "turns"; every row needs both')
    return Rows(rows, data.origin, data.sha256)
