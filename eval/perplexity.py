"""Generative perplexity and entropy of a text (arXiv 2504.20456, appendix E.3), under a causal LM that judges it.

The judge's own tokenizer counts: texts of models with different tokenizers can be compared. Special tokens are not
counted. Torch and the judge are loaded on first use.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from dspec.errors import UserError


class JudgeModel:
    """A causal LM of transformers and its tokenizer."""

    def __init__(self, *, path: str | None, dtype: str, device: str) -> None:
        """`path`: a folder or a Hub id; None: the embedded base."""
        self._path, self._dtype, self._device = path, dtype, device
        self.name = "the embedded base" if path is None else path

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """Model and tokenizer. Raises UserError if they cannot be loaded."""
        from dspec.devices import local_device
        from dspec.models.language_model import ASSETS, DTYPES, read_pretrained

        if self._dtype not in DTYPES:
            raise UserError(f"judge_model.dtype={self._dtype} is unknown; use one of {', '.join(DTYPES)}")
        path = str(ASSETS / "tiny") if self._path is None else self._path
        model, tokenizer = read_pretrained(path, dtype=self._dtype, role="judge_model.path")
        if not _is_causal(model):
            raise UserError(
                f"judge_model.path {path!r} sees the text after a token: use a causal LM, such as gpt2-large"
            )
        return model.to(local_device(self._device)).eval().requires_grad_(False), tokenizer

    def source(self) -> dict[str, Any]:
        """What to know of the judge, JSON-ready. Loads it: mistakes are told before anything is decoded."""
        model, _ = self._loaded
        return {"name": self.name, "dtype": self._dtype, "max_tokens": self._room(model)}

    def __call__(self, text: str, *, task: str | None = None) -> dict[str, float]:
        """`nll`, nats per token, `gen_ppl` = exp(nll), and `entropy`, bits, of the tokens that `text` has, as far as
        they fit the judge's context. Without any, none of the three.

        The judge first reads the user turn `task`, if it has a chat template, or else its first token, if it has one;
        otherwise the first token of the text is only read.
        """
        model, tokenizer = self._loaded
        context = self._context(tokenizer, task)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [token for token in ids if token not in tokenizer.all_special_ids]
        ids = ids[: max(0, self._room(model) - len(context))]
        if len(context) + len(ids) < 2 or not ids:
            return {}
        nll = self._nll(model, context, ids)
        return {"gen_ppl": math.exp(min(nll, 700)), "nll": nll, "entropy": entropy(ids)}  # exp(710) overflows

    @staticmethod
    def _room(model: Any) -> int:
        return int(getattr(model.config, "max_position_embeddings", None) or 1 << 30)

    @staticmethod
    def _context(tokenizer: Any, task: str | None) -> list[int]:
        if task is not None and tokenizer.chat_template:
            from data.chat import PromptPolicy, prompt_ids

            return prompt_ids(tokenizer, task, PromptPolicy(system=None, thinking=False))
        return [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]

    @staticmethod
    def _nll(model: Any, context: Sequence[int], ids: Sequence[int]) -> float:
        """Mean over the tokens of `ids`, but for the first one if nothing stands before it."""
        import torch

        read = torch.tensor([[*context, *ids]], device=model.device)
        scored = read[0, max(1, len(context)) :]
        with torch.inference_mode():
            logits = model(read, use_cache=False).logits[0, -1 - len(scored) : -1]
            return float(torch.nn.functional.cross_entropy(logits.double(), scored))


def _is_causal(model: Any) -> bool:
    """Whether the output at a token does not depend on the next one; XLNet's and BERT's do."""
    import torch

    with torch.inference_mode():
        a, b = (model.eval()(torch.tensor([[0, after]]), use_cache=False).logits[0, 0] for after in (1, 2))
        return torch.equal(a, b)


def entropy(tokens: Sequence[int]) -> float:
    """Shannon entropy in bits of the tokens' frequencies (eq. 22)."""
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    return sum(-share * math.log2(share) for share in shares)
