"""Every seed that dspec derives from a run's root seed: what is drawn hangs on names and numbers, never on order.

Whoever draws asks here, so that two uses never share a stream by accident; tests/test_seeding.py pins the numbers.
"""

import hashlib

import numpy as np

_VALIDATION = 2**31  # where a training row has the number of its batch, validation has this and then its own


def prompt_seed(seed: int, prompt_id: str) -> int:
    """For decoding one prompt: depends on nothing but its id and the root seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:6], "big")


def epoch_seed(seed: int, epoch: int) -> int:
    """For the order of the training rows in one epoch."""
    return prompt_seed(seed, f"epoch {epoch}")


def training_row_seed(seed: int, batch: int, row: int) -> int:
    """For what a method draws for one row of one batch; `row` counts over all ranks together."""
    return _mixed(seed, batch, row)


def validation_row_seed(seed: int, batch: int, row: int) -> int:
    """The same for a validation batch: equal each time, and none of training's."""
    return _mixed(seed, _VALIDATION, batch, row)


def calibration_seed(seed: int, prompt: int) -> int:
    """For decoding calibration prompt number `prompt`."""
    return seed * 1_000_003 + prompt


def corpus_seed(seed: int, *, task: str, split: str, unseen: bool) -> str:
    """For generating a task's examples of one split (`random.Random` takes text)."""
    return f"{seed}/{task}/{split}/{unseen}"


def corpus_order_seed(seed: int, *, split: str) -> str:
    """For shuffling the tasks of a split together."""
    return f"{seed}/corpus/{split}"


def _mixed(*parts: int) -> int:
    """A well-mixed 63-bit seed from several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
