"""Sampling: a token's distribution, and drawing from it with given uniforms.

All randomness comes as uniforms from one stream per row, so that a row draws the same alone and in any batch; diffusion
decoding draws as many per pass as a row's answer has slots, from a generator of the row's own (diffusion/row_state.py).
Distributions are sorted and summed in chunks of rows to bound memory; each row's result depends on that row alone.
Legend: B = rows, V = vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dspec.errors import UserError
from dspec.precision import widest

_COLDEST = 1e-5  # dividing logits by a lower temperature overflows
_REFILL = 512  # uniforms drawn at a time for each row
_CHUNK_BYTES = 2**26  # for one float64 copy of the distributions: sorting and summing need several


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens whose probability reaches it (1.0 keeps all)."""

    temperature: float
    top_p: float

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise UserError(
                f"sampling needs temperature >= 0 and 0 < top_p <= 1, not {self.temperature} and {self.top_p}"
            )
        if 0 < self.temperature < _COLDEST:
            raise UserError(f"temperature={self.temperature} overflows: use 0 for greedy, or at least {_COLDEST}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution [..., V] that tokens are drawn from, at least float32; greedy: all mass on the argmax."""
        rows = logits.reshape(-1, logits.shape[-1])
        probs = [self._probs(rows[part]) for part in row_chunks(*rows.shape)]
        return (probs[0] if len(probs) == 1 else torch.cat(probs)).view(logits.shape)

    def _probs(self, logits: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.greedy:
            return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1)
        probs = (wide if self.temperature == 1 else wide / self.temperature).softmax(-1)
        if self.top_p == 1:
            return probs
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        outside = ranked.cumsum(-1) - ranked >= self.top_p
        truncated = torch.zeros_like(probs).scatter(-1, order, ranked.masked_fill(outside, 0))
        return truncated / truncated.sum(-1, keepdim=True)


GREEDY = Sampling(temperature=0.0, top_p=1.0)


class SamplingBatch:
    """The samplings of a batch's rows."""

    def __init__(self, samplings: Sequence[Sampling]) -> None:
        self._samplings = list(samplings)
        self._identical = all(sampling == samplings[0] for sampling in samplings)

    @property
    def greedy(self) -> bool:
        """Whether all rows are greedy. In a mixed batch the distribution of a greedy row is a point mass."""
        return all(sampling.greedy for sampling in self._samplings)

    def __len__(self) -> int:
        return len(self._samplings)

    def __getitem__(self, row: int) -> Sampling:
        return self._samplings[row]

    def probs(self, logits: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """`Sampling.probs` of logits [n, ..., V] that belong to these n rows (None: all rows, in order)."""
        if self._identical:
            return self._samplings[0].probs(logits)
        groups: dict[Sampling, list[int]] = {}
        for i, row in enumerate(range(len(self)) if rows is None else rows):
            groups.setdefault(self._samplings[row], []).append(i)
        probs = torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        for sampling, members in groups.items():
            probs[members] = sampling.probs(logits[members])
        return probs


def row_chunks(rows: int, vocab: int) -> Iterator[slice]:
    """Slices of rows whose distributions fit in a fixed amount of memory, at least one row each; one empty slice if
    there are no rows."""
    size = max(1, _CHUNK_BYTES // (8 * vocab))
    return (slice(start, start + size) for start in range(0, max(1, rows), size))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens [...] from unnormalised weights [..., V] by the inverse CDF at uniform [...] in [0, 1)."""
    rows, uniform_N = weights.reshape(-1, weights.shape[-1]), uniform.reshape(-1)
    drawn = [_draw(rows[part], uniform_N[part]) for part in row_chunks(*rows.shape)]
    return torch.cat(drawn).view(uniform.shape)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    cdf = weights.cumsum(-1, dtype=widest(weights.device))
    return torch.searchsorted(cdf, (uniform * cdf[..., -1])[..., None], right=True).squeeze(-1)


class Streams:
    """One stream of uniforms per row, each with its own seed; all rows take the same number of uniforms at a time."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = device
        self._dtype = widest(device)
        self._buffer = torch.empty(len(seeds), 0, dtype=self._dtype, device=device)

    def take(self, count: int) -> Tensor:
        """The next `count` uniforms of each row [B, count], float64 where the device has it."""
        if self._buffer.shape[1] < count:
            self._refill(max(count, _REFILL))
        taken, self._buffer = self._buffer[:, :count], self._buffer[:, count:]
        return taken

    def _refill(self, size: int) -> None:
        if size > 0:
            fresh = [torch.rand(size, generator=g, dtype=self._dtype) for g in self._generators]
            self._buffer = torch.cat([self._buffer, torch.stack(fresh).to(self._device)], 1)

    def select(self, rows: Sequence[int]) -> None:
        self._generators = [self._generators[i] for i in rows]
        self._buffer = self._buffer[torch.tensor(rows, dtype=torch.long)]

    def join(self, other: "Streams") -> None:
        """Appends the other's rows; each stream continues where it is."""
        for one, more in ((self, other), (other, self)):
            one._refill(more._buffer.shape[1] - one._buffer.shape[1])
        self._generators += other._generators
        self._buffer = torch.cat([self._buffer, other._buffer])
