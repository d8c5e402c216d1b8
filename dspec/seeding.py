"""All seeds derived from a run's root seed: random draws depend on names and numbers, never on order.

`low_discrepancy` takes the place of draws where successive rows should fill a range evenly.

All of them are defined here so that no two uses share a stream by accident; tests/test_seeding.py pins the numbers.
"""

import hashlib

import numpy as np

GOLDEN_RATIO = (5**0.5 - 1) / 2  # n * it mod 1 fills [0, 1) evenly over any stretch of n
_VALIDATION = 2**31  # takes the place of the batch number, which follows it: validation never shares a training seed


def prompt_seed(seed: int, prompt_id: str) -> int:
    """For decoding one prompt: depends only on its id and the root seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:6], "big")


def epoch_seed(seed: int, epoch: int) -> int:
    """For the order of the training rows in one epoch."""
    return prompt_seed(seed, f"epoch {epoch}")


def training_row_seed(seed: int, batch: int, row: int) -> int:
    """For a method's randomness in one row of one batch; `row` counts across all ranks."""
    return _mixed(seed, batch, row)


def validation_row_seed(seed: int, batch: int, row: int) -> int:
    """The same for a validation batch: identical in every validation, and never one of training's."""
    return _mixed(seed, _VALIDATION, batch, row)


def calibration_seed(seed: int, prompt: int) -> int:
    """For decoding calibration prompt number `prompt`."""
    return seed * 1_000_003 + prompt


def corpus_seed(seed: int, *, task: str, split: str, unseen: bool) -> str:
    """For generating a task's examples of one split (`random.Random` takes text)."""
    return f"{seed}/{task}/{split}/{unseen}"


def corpus_order_seed(seed: int, *, split: str) -> str:
    """For shuffling a split's examples across tasks."""
    return f"{seed}/corpus/{split}"


def low_discrepancy(number: int, *, ratio: float = GOLDEN_RATIO) -> float:
    """A number in [0, 1): any stretch of successive `number` fills that range evenly. Two quantities that go with the
    same numbers need two irrational ratios."""
    return number * ratio % 1


def _mixed(*parts: int) -> int:
    """A well-mixed 63-bit seed from several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
