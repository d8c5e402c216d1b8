"""What a language model is to any-subset training, to decoding and to evaluation, whatever its architecture.

Two kinds exist: causal ones (models/language_model.py), which any method and decoder can take, and XLNet
(models/xlnet.py), which fills holes only.

Legend: B = batch, L = places that a pass computes, D = model width, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dspec.errors import UserError
from dspec.models.cache import PositionCache

_LARGE_HEAD = 2**22  # weights; smaller heads take microseconds


class TargetModel(nn.Module, ABC):
    """A model of transformers with its tokenizer; frozen until a method trains it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        mask_token_id: int | None = None,
    ) -> None:
        """`mask_token_id` fills a drafter's empty slots and asks for tokens at chosen positions; None takes the one
        that the model's config names, else the tokenizer's mask token, if it has one."""
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer: Any = tokenizer  # None only for decoding bare token ids
        self.name = name
        named = (mask_token_id, getattr(model.config, "mask_token_id", None), getattr(tokenizer, "mask_token_id", None))
        self.mask_token_id: int | None = next((token for token in named if token is not None), None)

    @property
    @abstractmethod
    def max_positions(self) -> int: ...

    @abstractmethod
    def new_cache(self) -> PositionCache:
        """An empty cache for `any_subset`."""

    @abstractmethod
    def any_subset(
        self,
        ids_BL: Tensor,
        *,
        positions_BL: Tensor,
        limit_BL: Tensor,
        query_BL: Tensor,
        cache: PositionCache | None = None,
        start_B: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states [B, L, D] that `logits` reads, of places in order of generation (attention/masks.py).

        `query_BL` (bool) marks position queries, whose ids are ignored; `limit_BL` says how many places each sees. With
        a cache, row b computes the places from start_B[b] on, and sees those before.
        """

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.weight.shape[0])

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    def logits(self, hidden: Tensor) -> Tensor:
        return lm_logits(self.lm_head, hidden)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's EOS and the generation config's.

        Raises UserError if there is none.
        """
        ends = end_tokens(self.model, self.tokenizer)
        if not ends:
            raise UserError(
                f"target {self.name!r} has no end-of-text token: set eos_token in its tokenizer_config.json"
            )
        return ends

    def required_mask_token(self) -> int:
        """The mask token's id. Raises UserError for a model that has none, or one outside its vocabulary."""
        if self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"{self.name!r} has no mask token (mask_token_id={self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size}): set target.mask_token=<the id of an unused token>, or target.mask_token=add "
                "for a new one"
            )
        return self.mask_token_id

    def check_length(self, prompt: int, new: int) -> None:
        """Raises UserError when prompt and new tokens do not fit the model's positions."""
        if prompt + new > self.max_positions:
            raise UserError(
                f"a prompt of {prompt} tokens and max_new_tokens={new} exceed the context of {self.name!r} "
                f"({self.max_positions} positions); shorten the prompt or lower max_new_tokens"
            )


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's EOS, and those of the model's generation config."""
    more = getattr(model.generation_config, "eos_token_id", None)
    more = [] if more is None else [more] if isinstance(more, int) else list(more)
    turn_end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return tuple(dict.fromkeys([*turn_end, *more]))


def lm_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., D].

    On a CPU, float32 matmuls with 3, 7, 11 rows take up to twice as long as with one row more (two threads, V = 32k and
    49k), so for large heads such inputs are padded with a row of zeros.
    """
    shape = hidden.shape[:-1]
    slow = hidden.dtype == torch.float32 and hidden.device.type == "cpu" and head.weight.numel() >= _LARGE_HEAD
    if not (slow and shape.numel() % 4 == 3):
        return head(hidden)
    padded = nn.functional.pad(hidden.reshape(shape.numel(), -1), (0, 0, 0, 1))
    return head(padded)[:-1].view(*shape, -1)
