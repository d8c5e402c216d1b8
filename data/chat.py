"""Prompts and responses as token ids, by the target's own chat template; one policy for training and evaluation."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dspec.errors import UserError

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PromptPolicy:
    """How user text is rendered as a prompt; stored with checkpoints and results."""

    system: str | None
    thinking: bool

    def to_dict(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """JSON-ready, with a digest of the chat template."""
        template = str(tokenizer.chat_template or "")
        return {**asdict(self), "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest()[:16]}


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, policy: PromptPolicy) -> list[int]:
    """Token ids of one user turn, up to and including the generation prompt.

    Raises UserError for a tokenizer without a chat template.
    """
    if tokenizer.chat_template is None:
        raise UserError("the target has no chat template: use benchmarks of plain text, or an instruction-tuned one")
    messages: list[Message] = [{"role": "user", "content": text}]
    if policy.system is not None:
        messages.insert(0, {"role": "system", "content": policy.system})
    ids: list[int] = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        enable_thinking=policy.thinking,
    )
    return list(ids)


def response_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a response from the corpus (not the target), with the end-of-turn token."""
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, int(tokenizer.eos_token_id)]
