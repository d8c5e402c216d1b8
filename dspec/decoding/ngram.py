"""Drafts from the bigrams of a text whose tokens become known in any order (arXiv 2504.20456, Algorithm 2)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dspec.decoding.sampling import draw


class Bigrams:
    """How often which token stands behind which in the known part of a text: neighbours by position, not by the order
    in which they became known. New tokens alone are read."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}  # position -> token
        self._tokens: Counter[int] = Counter()
        self._behind: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._read = 0

    def read(self, text: Sequence[int], positions: Sequence[int]) -> None:
        """The text by order of becoming known, longer than at the last call; positions of its tokens at least."""
        for token, position in zip(text[self._read :], positions[self._read :], strict=False):
            self._tokens[token] += 1
            if (before := self._at.get(position - 1)) is not None:
                self._behind[before][token] += 1
            if (after := self._at.get(position + 1)) is not None:
                self._behind[token][after] += 1
            self._at[position] = token
        self._read = len(text)

    def draft(
        self, positions: Iterable[int], uniform_J: Tensor | None, *, vocab: int, dtype: torch.dtype
    ) -> tuple[list[int], Tensor]:
        """Tokens for these positions and the distributions [J, V] that they were drawn from; without uniforms the most
        frequent ones.

        Each is drawn from what stood behind the token at the position before, which is known or drafted just now; from
        all known tokens where there is none, or where nothing was ever seen behind it. Drafted tokens are not counted.
        """
        tokens: list[int] = []
        laws: list[Tensor] = []
        drafted: dict[int, int] = {}
        for slot, position in enumerate(positions):
            before = self._at.get(position - 1, drafted.get(position - 1))
            seen = self._tokens if before is None else self._behind.get(before) or self._tokens
            law = torch.zeros(vocab, dtype=dtype)
            law[list(seen)] = torch.tensor(list(seen.values()), dtype=dtype) / seen.total()
            token = int(law.argmax() if uniform_J is None else draw(law, uniform_J[slot]))
            drafted[position] = token
            tokens.append(token)
            laws.append(law)
        return tokens, torch.stack(laws)
