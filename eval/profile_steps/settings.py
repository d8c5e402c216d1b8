"""The settings of a profile. Imports nothing heavy: mistakes are reported before torch loads."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Raises UserError for values that cannot be measured."""

    requests: Sequence[int]  # in flight together
    lengths: Sequence[int]  # drafts verified of each; 0: a step that does not draft
    context: int  # tokens of each prompt
    temperature: float
    warmup: int  # steps at each point that are not timed
    repeats: int  # that are

    def __post_init__(self) -> None:
        for name, values, least in (("requests", self.requests, 1), ("lengths", self.lengths, 0)):
            if not values or sorted(set(values)) != list(values) or values[0] < least:
                raise UserError(f"profile.{name}={list(values)} must be increasing from at least {least}")
        for name, least in (("context", 1), ("warmup", 0), ("repeats", 1)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"profile.{name}={value} must be at least {least}")
        if 0 not in self.lengths or len(self.lengths) < 2:
            raise UserError(
                f"profile.lengths={list(self.lengths)} needs 0, a step that does not draft, and one above: their "
                "difference is what drafting costs"
            )

    @property
    def max_new_tokens(self) -> int:
        """More than any of the prompts' answers gets."""
        return 2 + (self.warmup + self.repeats) * (sum(1 + length for length in self.lengths) + 1 + self.lengths[1])
