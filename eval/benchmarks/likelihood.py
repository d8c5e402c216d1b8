"""Benchmarks scored by the exact log-likelihood of given answers; nothing is decoded (eval/likelihood/ scores them).

LAMBADA (Paperno et al. 2016, arXiv 1606.06031; rows as in lm-eval's lambada_openai): the last word of a passage, given
all before it. "accuracy": greedy decoding writes that word; with its log-likelihood, from which the perplexity follows.

HellaSwag (Zellers et al. 2019, arXiv 1905.07830; texts put together as in lm-eval's hellaswag): four endings of a
context, of which the likeliest is chosen: "accuracy" by log-likelihood, "normalised" by log-likelihood per character.

AS-ARM's released code scores LAMBADA by samples at temperature 1, and its HellaSwag compares the number of the last
ending read, not of the likeliest: those numbers cannot be compared with these.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from data.rows import DataRow, Hub, Rows, check_texts, load_rows
from dspec.errors import UserError
from eval.benchmarks.base import FileBenchmark, Item

_BRACKETS = re.compile(r"\[.*?\]")  # left over from WikiHow


@dataclass(frozen=True)
class Question:
    """Answers that may follow a context, white space between them included."""

    id: str
    context: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Scores:
    """What the likelihoods of a question's answers come to."""

    chosen: int  # the answer
    verdicts: dict[str, bool]
    continuous: dict[str, float]


class LikelihoodBenchmark(FileBenchmark):
    quality = "accuracy"
    chat = False
    stop: tuple[str, ...] = ()

    def __init__(self, data: Rows, *, name: str, describes: str, limit: int | None, seed: int | None) -> None:
        self.name = name
        super().__init__(
            data,
            key=lambda i, _: f"{name}/{i:05d}",
            describes=describes,
            limit=limit,
            seed=seed,
            max_new_tokens=1,  # nothing is decoded
        )

    def items(self) -> list[Item]:
        """Raises UserError: there is nothing to decode."""
        raise UserError(f"{self.name} is scored by log-likelihood: use python -m eval.score benchmark={self.name}")

    def prompt(self, row: DataRow) -> str:
        return self._texts(row)[0]

    def questions(self) -> list[Question]:
        return [Question(id_, *self._texts(row)) for id_, row in self._rows.items()]

    @abstractmethod
    def _texts(self, row: DataRow) -> tuple[str, tuple[str, ...]]:
        """A row's context and answers."""

    @abstractmethod
    def judge(self, question: Question, totals: Sequence[float], greedy: Sequence[bool]) -> Scores:
        """`totals` are the answers' log-likelihoods in nats, `greedy` whether greedy decoding writes them."""


class Lambada(LikelihoodBenchmark):
    def __init__(self, *, limit: int | None, seed: int | None) -> None:
        hub = Hub("EleutherAI/lambada_openai", ["default"], "test")
        data = load_rows("lambada", hub=hub, fields=("text",))
        for number, row in enumerate(data.rows, 1):
            if not isinstance(row["text"], str) or len(row["text"].split(" ")) < 2 or not row["text"].split(" ")[-1]:
                raise UserError(f'{data.origin}, line {number}: "text" must be words with one space before the last')
        super().__init__(data, name="lambada", describes="the passage without its last word", limit=limit, seed=seed)

    def _texts(self, row: DataRow) -> tuple[str, tuple[str, ...]]:
        context, _, word = row["text"].rpartition(" ")
        return context, (f" {word}",)

    def judge(self, question: Question, totals: Sequence[float], greedy: Sequence[bool]) -> Scores:
        return Scores(0, {self.quality: greedy[0]}, {"log_likelihood": totals[0]})


class HellaSwag(LikelihoodBenchmark):
    def __init__(self, *, limit: int | None, seed: int | None) -> None:
        hub = Hub("Rowan/hellaswag", ["default"], "validation")
        texts = ("activity_label", "ctx_a", "ctx_b")
        data = load_rows("hellaswag", hub=hub, fields=(*texts, "endings", "label"))
        check_texts(data, fields=texts, lists=("endings",))
        for number, row in enumerate(data.rows, 1):
            if len(row["endings"]) < 2:
                raise UserError(f'{data.origin}, line {number}: "endings" must be at least two, one of them right')
            if str(row["label"]) not in map(str, range(len(row["endings"]))):
                raise UserError(
                    f'{data.origin}, line {number}: "label" {row["label"]!r} is not the number of an ending'
                )
        super().__init__(data, name="hellaswag", describes="activity and context", limit=limit, seed=seed)

    def _texts(self, row: DataRow) -> tuple[str, tuple[str, ...]]:
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return _plain(context), tuple(f" {_plain(ending)}" for ending in row["endings"])

    def judge(self, question: Question, totals: Sequence[float], greedy: Sequence[bool]) -> Scores:
        lengths = [max(1, len(answer) - 1) for answer in question.answers]  # without the space before it
        per_character = [total / length for total, length in zip(totals, lengths, strict=True)]
        right, chosen = int(self._rows[question.id]["label"]), _largest(totals)
        margin = totals[right] - max(total for i, total in enumerate(totals) if i != right)
        verdicts = {self.quality: chosen == right, "normalised": _largest(per_character) == right}
        return Scores(chosen, verdicts, {"margin": margin})


def _largest(values: Sequence[float]) -> int:
    """The first of the largest."""
    return max(range(len(values)), key=values.__getitem__)


def _plain(text: str) -> str:
    return _BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")
