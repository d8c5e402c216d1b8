"""Data sets of the lm-eval tasks in this folder, from $DSPEC_DATA or the Hub. lm-eval loads this file by its path."""

from typing import Any

from datasets import Dataset, DatasetDict

from data.rows import gsm8k_rows


def gsm8k(**metadata: Any) -> DatasetDict:
    return DatasetDict({split: Dataset.from_list(list(gsm8k_rows(split).rows)) for split in ("train", "test")})
