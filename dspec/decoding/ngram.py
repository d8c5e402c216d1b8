"""Drafts from the bigrams of a text whose tokens become known in any order (arXiv 2504.20456, Algorithm 2)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dspec.decoding.sampling import draw


class Bigrams:
    """Counts which token follows which in the known part of a text: neighbours by position, not by the order in which
    they became known. Each call of `read` counts only the new tokens."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}  # position -> token
        self._tokens: Counter[int] = Counter()
        self._followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._read = 0

    def read(self, text: Sequence[int], positions: Sequence[int]) -> None:
        """`text` in the order in which it became known, longer than at the last call, and at least its positions."""
        for token, position in zip(text[self._read :], positions[self._read :], strict=False):
            self._tokens[token] += 1
            if (before := self._at.get(position - 1)) is not None:
                self._followers[before][token] += 1
            if (after := self._at.get(position + 1)) is not None:
                self._followers[token][after] += 1
            self._at[position] = token
        self._read = len(text)

    def draft(
        self, positions: Iterable[int], uniform_J: Tensor | None, *, vocab: int, dtype: torch.dtype
    ) -> tuple[list[int], Tensor]:
        """Tokens for these positions and the distributions [J, V] they were drawn from; without uniforms the most
        frequent tokens.

        Each is drawn from the followers of the token at the previous position, known or just drafted; from all known
        tokens if that token is unknown or has no followers. Drafted tokens are not counted.
        """
        tokens: list[int] = []
        probs_JV: list[Tensor] = []
        drafted: dict[int, int] = {}
        for slot, position in enumerate(positions):
            before = self._at.get(position - 1, drafted.get(position - 1))
            seen = self._tokens if before is None else self._followers.get(before) or self._tokens
            probs_V = torch.zeros(vocab, dtype=dtype)
            probs_V[list(seen)] = torch.tensor(list(seen.values()), dtype=dtype) / seen.total()
            token = int(probs_V.argmax() if uniform_J is None else draw(probs_V, uniform_J[slot]))
            drafted[position] = token
            tokens.append(token)
            probs_JV.append(probs_V)
        return tokens, torch.stack(probs_JV)
