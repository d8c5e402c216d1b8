"""The embedded corpus: three tasks, split by a hash of an example's meaning, not of its wording."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

from data.embedded import functions, problems, stories
from dspec.seeding import corpus_order_seed, corpus_seed

SPLITS = ("train", "draft", "calibration", "test")
_SAMPLERS = {"problems": problems.sample, "functions": functions.sample, "stories": stories.sample}
_BOUNDS = dict(zip(SPLITS, ((0, 60), (60, 80), (80, 90), (90, 100)), strict=True))
_PATIENCE = 20_000  # draws without a new example after which the space counts as exhausted


@dataclass(frozen=True)
class Example:
    """One prompt with its reference response."""

    id: str  # unique within a corpus and stable, such as "problems/train/000123"
    task: str  # problems | functions | stories
    template: str
    unseen: bool  # the template is held out from training
    prompt: str  # text of the user message
    response: str  # text after the assistant tag
    answer: str  # problems: the final integer as text
    tests: tuple[str, ...]  # functions: assert statements
    signature: str  # key of the split


def split_of(signature: str) -> str:
    """The split that a signature belongs to, the same for every seed."""
    bucket = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:8], "big") % 100
    return next(split for split, (low, high) in _BOUNDS.items() if low <= bucket < high)


def generate(*, task: str, split: str, count: int, seed: int, unseen: bool = False) -> list[Example]:
    """`count` examples with distinct prompts; a smaller count gives a prefix of a larger one."""
    if task not in _SAMPLERS or split not in SPLITS:
        raise ValueError(f"task must be one of {tuple(_SAMPLERS)} and split of {SPLITS}; got {task!r}, {split!r}")
    if unseen and split != "test":
        raise ValueError(f"held-out templates are in split 'test' only; got unseen=True with split {split!r}")
    rng = random.Random(corpus_seed(seed, task=task, split=split, unseen=unseen))
    where = f"{task}/{split}/unseen" if unseen else f"{task}/{split}"
    examples: dict[str, Example] = {}
    idle = 0
    while len(examples) < count:
        found = _SAMPLERS[task](rng, lambda signature: split_of(signature) == split, unseen=unseen)
        idle += 1
        if found is not None and found.prompt not in examples:
            idle = 0
            name = f"{where}/{len(examples):06d}"
            examples[found.prompt] = Example(id=name, task=task, unseen=unseen, **vars(found))
        if idle > _PATIENCE:
            raise ValueError(f"{where} has no more than about {len(examples)} examples; ask for fewer than {count}")
    return list(examples.values())


def corpus(*, counts: Mapping[str, int], split: str, seed: int) -> list[Example]:
    """The seen templates of each task in `counts`, shuffled together."""
    examples = [
        example
        for task, count in counts.items()
        for example in generate(task=task, split=split, count=count, seed=seed)
    ]
    random.Random(corpus_order_seed(seed, split=split)).shuffle(examples)
    return examples
