"""Derived seeds: the numbers of earlier versions, and no stream that serves two ends."""

import itertools

from dspec import seeding


def test_seeds_are_those_of_earlier_versions() -> None:
    """Another number here and no earlier result can be had again."""
    assert seeding.prompt_seed(0, "problems/test/000001") == 37_074_697_386_321
    assert seeding.epoch_seed(3, 2) == 269_348_363_241_055
    assert seeding.training_row_seed(0, 5, 3) == 8_435_031_017_018_158_374
    assert seeding.validation_row_seed(0, 5, 3) == 1_944_335_759_772_205_398
    assert seeding.calibration_seed(2, 7) == 2_000_013
    assert seeding.corpus_seed(1, task="problems", split="draft", unseen=False) == "1/problems/draft/False"
    assert seeding.corpus_order_seed(1, split="draft") == "1/corpus/draft"


def test_rows_of_batches_epochs_and_roots_draw_apart() -> None:
    numbers = list(itertools.product(range(3), range(4), range(4)))
    drawn = [seeding.training_row_seed(*n) for n in numbers] + [seeding.validation_row_seed(*n) for n in numbers]
    drawn += [seeding.epoch_seed(seed, epoch) for seed in range(3) for epoch in range(4)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**63 for seed in drawn)  # what torch.Generator.manual_seed takes
