"""Texts with hidden tokens, drawn at random, and no verdict: generative perplexity and entropy of the filled text.

Decoders are told how many tokens are hidden, and where (the gold length; the results say so). Paper: 95 % of rows of
WikiText (arXiv 2504.20456, tables 1, 5, 6 and 8).
"""

import re
from typing import Any

from data.rows import Hub, Rows, check_texts, load_rows
from dspec.errors import UserError
from eval.benchmarks.base import FileBenchmark, Item, check_switch, check_whole
from eval.benchmarks.embedded import Embedded
from eval.benchmarks.embedded_infilling import check_share
from eval.perplexity import JudgeModel


class WikiText(FileBenchmark):
    """WikiText-2's test set (Merity et al. 2016; CC-BY-SA-3.0) in rows of `length` tokens of the model under test.

    Row i begins at word i * `length`, whatever the tokenizer: so many words have at least as many tokens, and a row
    takes the first of them.
    """

    quality = ""
    chat = False
    stop: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        length: int,
        hidden: float,
        left_to_right: bool,
        judge_model: JudgeModel,
        limit: int | None,
        seed: int | None,
    ) -> None:
        """`hidden` is the share of a row's tokens that are holes: random ones, or the last (`left_to_right`)."""
        check_whole(2, length=length)
        check_switch(left_to_right=left_to_right)
        self._length, self._hidden, self._judge_model = length, check_share(hidden), judge_model
        self._left_to_right = left_to_right
        hub = Hub("Salesforce/wikitext", ["wikitext-2-v1"], "test")
        data = check_texts(load_rows("wikitext2_test", hub=hub, fields=("text",)), fields=("text",))
        super().__init__(
            _in_pieces(data, words=length),
            key=lambda i, _: f"wikitext2/test/{i:04d}",
            describes=f"rows of {length} tokens with {hidden:g} of them hidden" + (", the last" * left_to_right),
            limit=limit,
            seed=seed,
            max_new_tokens=1,
        )

    def prompt(self, row: dict[str, Any]) -> str:
        return str(row["text"])

    def items(self) -> list[Item]:
        return [
            Item(id_, "", row["text"], self._hidden, length=self._length, left_to_right=self._left_to_right)
            for id_, row in self._rows.items()
        ]

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return {}

    def measured(self, item: Item, answer: str) -> dict[str, float]:
        return self._judge_model(answer)

    def source(self) -> dict[str, Any]:
        return super().source() | {"gold_length": True, "judge_model": self._judge_model.source()}


class FilledStories(Embedded):
    """Held-out stories of the embedded corpus; the judge reads the user turn first, as the model does."""

    quality = ""

    def __init__(self, *, count: int, hidden: float, judge_model: JudgeModel, seed: int) -> None:
        """`hidden` is the share of the response's tokens that are holes."""
        super().__init__(task="stories", split="test", unseen=False, count=count, seed=seed, max_new_tokens=1)
        self._hidden, self._judge_model = check_share(hidden), judge_model

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt, e.response, self._hidden) for e in self._examples.values()]

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return {}

    def measured(self, item: Item, answer: str) -> dict[str, float]:
        return self._judge_model(answer, task=item.prompt)

    def source(self) -> dict[str, Any]:
        described = f"the task and its reference response with {self._hidden:g} of the tokens hidden"
        judged = {"gold_length": True, "judge_model": self._judge_model.source()}
        return super().source() | {"prompt": described} | judged


def _in_pieces(rows: Rows, *, words: int) -> Rows:
    """The whole text in pieces of so many words, with its white space; the rest is left out."""
    text = "".join(line if (line := row["text"]).endswith("\n") else f"{line}\n" for row in rows.rows)
    starts = [word.start() for word in re.finditer(r"\S+", text)]
    ends = [*starts[words::words], len(text)][: len(starts) // words]
    if not ends:
        raise UserError(f"{rows.origin} has {len(starts)} words: set length to at most that")
    pieces = [{"text": text[start:end]} for start, end in zip(starts[::words], ends, strict=False)]
    return Rows(pieces, rows.origin, rows.sha256)
