"""Stop strings: end an answer where no stop token does. Knows a tokenizer, but no model and no decoder."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopStrings:
    """The `should_stop` of a request: an answer ends with the token that completes one of the strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        # every non-special token is at least one byte long: enough tokens to hold the longest string
        self._window = max((len(s.encode()) for s in strings), default=0) + 8

    def __call__(self, tokens: Sequence[int], known: int) -> int | None:
        """Length of the shortest prefix of `tokens`, longer than `known`, that contains one of the strings."""
        # a string found in a prefix is also found in the whole: usually one check of all new tokens is enough
        if not self._strings or not self._holds(tokens, known + 1, len(tokens)):
            return None
        return next((end for end in range(known + 1, len(tokens) + 1) if self._holds(tokens, end, end)), None)

    def _holds(self, tokens: Sequence[int], first: int, last: int) -> bool:
        """Whether the windows ending at `first` to `last`, as one text, contain one of the strings."""
        tail = self._tokenizer.decode(list(tokens[max(0, first - self._window) : last]), skip_special_tokens=True)
        return any(string in tail for string in self._strings)

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        return text[: min((text.find(s) for s in self._strings if s in text), default=len(text))]
