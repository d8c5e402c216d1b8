"""Sources of training prompts: the embedded corpus, GSM8K, or a custom JSONL file.

A source returns prompts for the splits "train" and "calibration", which are disjoint. It knows no tokenizer.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.embedded.corpus import corpus
from data.rows import gsm8k_rows, read_jsonl
from dspec.errors import UserError


@dataclass(frozen=True)
class TrainingPrompt:
    id: str
    text: str
    response: str | None = None  # the corpus's own response, if it has one


class PromptSource(Protocol):
    name: str

    def prompts(self, split: str) -> list[TrainingPrompt]:
        """Prompts of "train" or "calibration", in a fixed order."""
        ...


class EmbeddedPrompts:
    """Prompts of the embedded corpus that its target was not trained on."""

    name = "tiny"

    def __init__(self, *, train: Mapping[str, int], calibration: Mapping[str, int], seed: int) -> None:
        """`train` and `calibration` are the number of prompts per task."""
        self._counts = {"train": ("draft", train), "calibration": ("calibration", calibration)}
        self._seed = seed

    def prompts(self, split: str) -> list[TrainingPrompt]:
        corpus_split, counts = self._counts[split]
        examples = corpus(counts=counts, split=corpus_split, seed=self._seed)
        return [TrainingPrompt(e.id, e.prompt, e.response) for e in examples]


def _split_by_id(prompts: list[TrainingPrompt], split: str, *, train: int, calibration: int) -> list[TrainingPrompt]:
    """Every tenth id (by hash) belongs to calibration, the others to train; returns the first ones of the split."""
    calibrates = split == "calibration"

    def belongs(prompt: TrainingPrompt) -> bool:
        return (int(hashlib.sha256(prompt.id.encode()).hexdigest(), 16) % 10 == 0) == calibrates

    return [p for p in prompts if belongs(p)][: calibration if calibrates else train]


class Gsm8kPrompts:
    """Questions of the GSM8K training set (MIT; openai/grade-school-math)."""

    name = "gsm8k"

    def __init__(self, *, train: int, calibration: int) -> None:
        self._train, self._calibration = train, calibration

    def prompts(self, split: str) -> list[TrainingPrompt]:
        rows = gsm8k_rows("train").rows
        every = [TrainingPrompt(f"gsm8k/train/{i:05d}", row["question"], row["answer"]) for i, row in enumerate(rows)]
        return _split_by_id(every, split, train=self._train, calibration=self._calibration)


class JsonlPrompts:
    """Custom prompts: a .jsonl (or .jsonl.gz) file whose rows have "prompt" and optionally "id" and "response".

    A row without an id is identified by its text, so that the rows around it may change.
    """

    def __init__(self, *, path: str, train: int, calibration: int) -> None:
        self._path = Path(path).expanduser()
        self._train, self._calibration = train, calibration
        self.name = self._path.name.split(".")[0]

    def prompts(self, split: str) -> list[TrainingPrompt]:
        every: list[TrainingPrompt] = []
        seen: Counter[str] = Counter()
        for number, row in read_jsonl(self._path):
            text = row.get("prompt")
            if not isinstance(text, str) or not text.strip():
                raise UserError(f'{self._path}, line {number}: no text under "prompt"; every row needs one')
            seen[text] += 1
            name = f"{self.name}/{hashlib.sha256(text.encode()).hexdigest()[:16]}/{seen[text]}"
            every.append(TrainingPrompt(str(row.get("id", name)), text, row.get("response")))
        if len({p.id for p in every}) < len(every):
            raise UserError(f'{self._path}: an "id" occurs twice; make them unique or leave them out')
        return _split_by_id(every, split, train=self._train, calibration=self._calibration)
