"""Stop strings: where a text ends that no stop token ends. Knows a tokenizer, no model and no decoder."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopStrings:
    """The `ends` of a decoder: true once the text contains one of the strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        # every token but a special one is at least a byte long: enough tokens to hold the longest string
        self._window = max((len(s.encode()) for s in strings), default=0) + 8

    def __call__(self, tokens: Sequence[int]) -> bool:
        tail = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=True)
        return any(string in tail for string in self._strings)

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        return text[: min((text.find(s) for s in self._strings if s in text), default=len(text))]
