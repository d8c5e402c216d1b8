"""95 % intervals: of a proportion, a bootstrapped statistic, a mean difference, a median. Pure functions."""

import math
import statistics
from collections.abc import Callable, Sequence

from dspec.errors import UserError

Statistic = Callable[[Sequence[int]], float | None]  # takes indices of units (prompts or batches)

# two-sided 95 % quantiles of Student's t for 1..9 degrees of freedom
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_Z95 = statistics.NormalDist().inv_cdf(0.975)


def wilson(right: int, n: int) -> list[float] | None:
    """Wilson's score interval of a proportion; None without trials. Its width is positive even at 0 and at n of n."""
    if not n:
        return None
    share, z = right / n, _Z95
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def bootstrap(statistic: Statistic, units: int, *, seed: int, resamples: int = 1000) -> list[float] | None:
    """2.5 % and 97.5 % quantiles of `statistic` over resampled unit indices; None without units."""
    import torch  # not needed for reading results

    if not units:
        return None
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(units, (resamples, units), generator=generator).tolist()
    values = torch.tensor([v for at in draws if (v := statistic(at)) is not None], dtype=torch.float64)
    return torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist() if len(values) else None


def student(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean and t interval; raises UserError for fewer than 2."""
    if len(differences) < 2:
        raise UserError(f"{len(differences)} paired values: an interval needs 2")
    mean = statistics.fmean(differences)
    half = _t_quantile(len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def _t_quantile(freedom: int) -> float:
    """Beyond the table by the Cornish-Fisher expansion, accurate to three decimals there."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Interval of a median by order statistics, distribution-free; None for fewer than six values."""
    n, below, k = len(values), 0.0, 0
    while (below := below + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    ranked = sorted(values)
    return [ranked[k - 1], ranked[n - k]] if k else None
