"""Drafts from the bigrams of a text whose tokens become known in any order (arXiv 2504.20456, Algorithm 2).

Departures from eq. 23: the bigram of "b, then a" counts (the indicator there has them the other way round), and the
denominator is the number of counted bigrams that begin with b, so that the probabilities sum to 1. The back-off to
unigrams is in the released code.

Legend: J = draft slots, V = vocabulary.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dspec.decoding.sampling import draw


class Bigrams:
    """Counts the bigrams of the known part of a text: pairs of tokens at adjacent positions, in whatever order the two
    became known."""

    def __init__(self) -> None:
        self._token_at: dict[int, int] = {}  # by position
        self._unigrams: Counter[int] = Counter()
        self._successors: defaultdict[int, Counter[int]] = defaultdict(Counter)  # by the token before them
        self._counted = 0

    def update(self, text: Sequence[int], positions: Sequence[int]) -> None:
        """Counts the tokens that `text` has gained since the last call. It is in the order in which its tokens became
        known; `positions` are theirs, and may go on."""
        for token, position in zip(text[self._counted :], positions[self._counted :], strict=False):
            self._unigrams[token] += 1
            if (previous := self._token_at.get(position - 1)) is not None:
                self._successors[previous][token] += 1
            if (following := self._token_at.get(position + 1)) is not None:
                self._successors[token][following] += 1
            self._token_at[position] = token
        self._counted = len(text)

    def draft(
        self, positions: Iterable[int], uniform_J: Tensor | None, *, vocab: int, dtype: torch.dtype
    ) -> tuple[list[int], Tensor]:
        """Draft tokens for these positions, and the distributions [J, V] they were drawn from (eq. 23). `uniform_J`
        None means greedy: the most frequent token.

        A draft is drawn from the counted successors of the token at the previous position, known or just drafted; from
        all known tokens if there is no token at that position or it has no successors. Drafts are not counted.
        """
        tokens: list[int] = []
        probs_JV: list[Tensor] = []
        drafted: dict[int, int] = {}
        for slot, position in enumerate(positions):
            previous = self._token_at.get(position - 1, drafted.get(position - 1))
            counts = self._unigrams if previous is None else self._successors.get(previous) or self._unigrams
            probs_V = torch.zeros(vocab, dtype=dtype)
            probs_V[list(counts)] = torch.tensor(list(counts.values()), dtype=dtype) / counts.total()
            token = int(probs_V.argmax() if uniform_J is None else draw(probs_V, uniform_J[slot]))
            drafted[position] = token
            tokens.append(token)
            probs_JV.append(probs_V)
        return tokens, torch.stack(probs_JV)
