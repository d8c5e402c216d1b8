"""The measured roofline of this device (memory bandwidth and matmul throughput), and the cost of a forward pass.

A forward pass over `positions` reads the weights once and the keys and values of its rows, and multiplies each weight
with each position. The matmuls of attention scores are left out: at these lengths they are small compared with those of
the weights.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspec.models.language_model import LanguageModel

_REPEATS = 7


@dataclass(frozen=True)
class Roofline:
    """Bytes per second and FLOP per second, as measured."""

    bandwidth: float
    flops: float

    @property
    def ridge_point(self) -> float:
        """FLOP per byte above which the device is compute-bound."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """Maximum FLOP per second at `intensity` FLOP per byte."""
        return min(self.flops, self.bandwidth * intensity)


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """The median of several calls, after a warm-up call."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure_roofline(device: torch.device, dtype: torch.dtype, *, stream_mb: int, matrix: int) -> Roofline:
    """Reads a tensor of `stream_mb` MB (larger than any cache), and multiplies square matrices of width `matrix`."""
    stream = torch.ones(stream_mb * 2**20 // dtype.itemsize, dtype=dtype, device=device)
    a = torch.ones(matrix, matrix, dtype=dtype, device=device)
    seconds_read = _seconds(lambda: stream.sum(), device)
    seconds_product = _seconds(lambda: a @ a, device)
    return Roofline(stream.numel() * dtype.itemsize / seconds_read, 2 * matrix**3 / seconds_product)


def pass_cost(target: LanguageModel, *, positions: float, context: float) -> tuple[float, float]:
    """FLOP of a pass over `positions` of one row with `context` keys, and the bytes that it reads: branches share the
    keys."""
    config = target.model.config
    width = target.dtype.itemsize
    products = sum(p.numel() for name, p in target.named_parameters() if p.dim() == 2 and "embed" not in name)
    if config.tie_word_embeddings:
        products += target.lm_head.weight.numel()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * head * context
    return 2 * products * positions, (products + keys) * width
