"""The settings of the search. Imports nothing heavy: mistakes are reported before torch loads."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dspec.decoding.jacobi_state import JacobiConfig
from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The grid, and how it is measured. `activations` have an effect only with several blocks in flight: with one, only
    the first is tried. Raises UserError for an empty grid or settings that Jacobi decoding rejects."""

    block_sizes: Sequence[int]
    candidates: Sequence[int]
    blocks: Sequence[int]
    activations: Sequence[float]
    pool_size: int
    warmup: int  # prompts that each configuration decodes untimed first
    stream_mb: int  # MB read to measure memory bandwidth: larger than any cache
    matrix: int  # width of the square matrices whose product is timed

    def __post_init__(self) -> None:
        if not (self.block_sizes and self.candidates and self.blocks and self.activations):
            raise UserError("search needs at least one value of block_sizes, candidates, blocks and activations")
        for name, least in (("warmup", 0), ("stream_mb", 1), ("matrix", 1)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise UserError(f"search.{name}={value} must be an integer, at least {least}")
        _ = self.configs

    @property
    def configs(self) -> list[JacobiConfig]:
        """All configurations of the grid, each once."""
        return [
            JacobiConfig(block_size=n, blocks=k, activation=r, pool_size=self.pool_size, candidates=c)
            for n, c, k, r in itertools.product(self.block_sizes, self.candidates, self.blocks, self.activations)
            if k > 1 or r == self.activations[0]
        ]
