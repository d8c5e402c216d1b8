"""The settings of a speed report. Imports nothing heavy: mistakes are reported before torch loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Raises UserError for values that cannot be measured."""

    tokens: Sequence[int]  # K of the cost curves, verified or drafted in one pass
    contexts: Sequence[int]  # L of the cost curves, tokens in the cache before them
    repeats: int
    profiled_prompts: int  # profile the rounds of this many prompts, the first of the first benchmark
    position_width: int  # tokens of an answer in one bin of tau
    price_per_hour: float | None  # of this machine, in any currency
    seed: int

    def __post_init__(self) -> None:
        for name in ("repeats", "profiled_prompts", "position_width"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UserError(f"speed.{name}={value} must be an integer, at least 1")
        price = self.price_per_hour
        if price is not None and not (isinstance(price, int | float) and price > 0):
            raise UserError(f"speed.price_per_hour={price} must be above 0 (null: no price)")
        check_curves(self.tokens, self.contexts)

    @property
    def curves(self) -> dict[str, Any]:
        """Arguments of the cost measurements."""
        return {
            "tokens": list(self.tokens), "contexts": list(self.contexts), "repeats": self.repeats, "seed": self.seed
        }  # fmt: skip


def check_curves(tokens: Sequence[int], contexts: Sequence[int]) -> None:
    """Raises UserError unless `tokens` are increasing and all values are lengths."""
    rising = bool(tokens) and sorted(set(tokens)) == list(tokens)
    if not rising or not contexts or min([*tokens, *contexts]) < 1:
        raise UserError("speed.tokens must be increasing from at least 1, and speed.contexts lengths of at least 1")
