"""How a diffusion LM was trained, as its config.json says: written by training, read by decoding and later training."""

from dataclasses import dataclass
from typing import Any, Final

from dspec.errors import UserError
from dspec.models.language_model import LanguageModel

FULL: Final = "full"
BLOCK_CAUSAL: Final = "block_causal"
STORED_ATTENTION: Final = {FULL: "bidirectional", BLOCK_CAUSAL: "block_causal"}  # as config.json has it
_NAMES: Final = {name: attention for attention, name in STORED_ATTENTION.items()}


@dataclass(frozen=True)
class TrainingRecord:
    """A model's attention and blocks in training (None: not recorded), and whether the token at a place is predicted
    one place before (`shift`)."""

    attention: str | None
    block_size: int | None
    shift: bool

    @classmethod
    def read(cls, model: LanguageModel) -> "TrainingRecord":
        """Raises UserError for an attention that dspec does not know, and for other values that no training writes."""
        config: Any = model.model.config
        attention, blocks, shift = (
            getattr(config, name, None) for name in ("dspec_attention", "dspec_block_size", "dspec_logit_shift")
        )
        if attention is not None and attention not in _NAMES:
            raise UserError(
                f"{model.name!r} was trained with dspec_attention={attention}, which this dspec does not know; "
                f"its config.json may say {' or '.join(_NAMES)}"
            )
        if blocks is not None and (type(blocks) is not int or blocks < 1):
            raise UserError(
                f"the config.json of {model.name!r} says dspec_block_size={blocks}: it is a number of slots"
            )
        if shift not in (None, True, False) or type(shift) is int:
            raise UserError(f"the config.json of {model.name!r} says dspec_logit_shift={shift}: it is true or false")
        return cls(attention=None if attention is None else _NAMES[attention], block_size=blocks, shift=bool(shift))

    def write(self, model: LanguageModel) -> None:
        """Into the config of the model in memory, for decoders of this run; exports write that config."""
        config: Any = model.model.config
        config.dspec_attention = None if self.attention is None else STORED_ATTENTION[self.attention]
        config.dspec_block_size = self.block_size
        config.dspec_logit_shift = self.shift
