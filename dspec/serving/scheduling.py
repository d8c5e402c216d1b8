"""How many drafts of each request a step verifies: pure functions of survival probabilities and of what steps cost.

Sources: DSpark (arXiv 2607.05147), Algorithm 1 and section 5.2; SGLang's and vLLM's budgets are the same search with
other histories and curves (schedulers.py).

    a[r, j] = c[r, 0] ... c[r, j]     probability that request r's drafts 0..j are all accepted
    theta(K) = (R + sum of the K largest a) / seconds(K)     expected tokens per second; each request emits one anyway

Drafts of a request can only be verified as a prefix; since a[r] never rises, the K largest a are prefixes.

**Which of these are lossless.** A request's tokens keep the target's distribution only if the decision to verify slot j
depends on its drafts before j alone: a[r, j] does (its confidence is computed from them), later slots do not. The rank
of a candidate among all depends on a[r, :j + 1] and on other requests, so admitting the K largest is lossless for a K
that was known before the drafts were drawn, and so is a search that stops at the first candidate that does not pay
(`synchronous`). Taking the best K over all of the current candidates (`capacity` on the confidences of this very round)
is not: whether draft 1 is sent then depends on what follows it. Requests must draw from streams of their own (seeds).

Legend: R = requests, J = draft slots, K = drafts verified in all (seconds_K has R * J + 1 entries, for K = 0, 1, ...).
"""

import numpy as np
from numpy.typing import NDArray

from dspec.serving.step_table import Floats

Ints = NDArray[np.int64]


def survival(confidence_RJ: Floats, count_R: Ints) -> Floats:
    """a [R, J] from calibrated confidences; 0 from the first slot that was not drafted or whose confidence is NaN."""
    drafted = np.arange(confidence_RJ.shape[1]) < np.asarray(count_R)[:, None]
    likely = drafted & (confidence_RJ > 0)  # NaN is not
    return np.where(likely, np.minimum(confidence_RJ, 1.0), 0.0).cumprod(1)


def synchronous(survival_RJ: Floats, *curves: Floats) -> Ints:
    """Lengths [R] by Algorithm 1: candidates in falling order of a, until the first that raises theta on no cost curve.

    With one curve it is the paper's, and finds the maximum if theta rises and then falls in K, as on a convex curve. On
    a measured one the break comes at the first step or bump: with `convex` of it beside it, the search passes what pays
    in the end, and then fills the tile of tokens that is paid for."""
    R, J = survival_RJ.shape
    order = _likeliest(survival_RJ)
    pays = np.zeros(len(order), bool)
    for seconds_K in curves:
        theta = throughput(survival_RJ.ravel()[order], R, seconds_K)
        pays |= theta[1:] > theta[:-1]
    K = len(order) if pays.all() else int(pays.argmin())
    return np.bincount(order[:K] // J, minlength=R)


def capacity(survival_RJ: Floats, seconds_K: Floats) -> int:
    """The K of the highest theta, by search over all; of several the least."""
    return int(throughput(np.sort(survival_RJ, axis=None)[::-1], len(survival_RJ), seconds_K).argmax())


def admit(survival_RJ: Floats, K: int) -> Ints:
    """Lengths [R] that admit the K largest a above 0; ties in order of requests, within a request in order of slots."""
    R, J = survival_RJ.shape
    return np.bincount(_likeliest(survival_RJ)[:K] // J, minlength=R)


def _likeliest(survival_RJ: Floats) -> Ints:
    """Flat indices of all a above 0 in falling order."""
    flat = survival_RJ.ravel()
    return np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]


def throughput(ranked_a: Floats, requests: int, seconds_K: Floats) -> Floats:
    """theta for K = 0, 1, ..., up to the last candidate above 0, given all a in falling order."""
    gains = ranked_a[: np.count_nonzero(ranked_a > 0)]
    return (requests + np.concatenate([[0.0], gains.cumsum()])) / seconds_K[: len(gains) + 1]


def drafting_pays(recent_NJ: Floats, requests: int, seconds_K: Floats, seconds_without_drafts: float) -> bool:
    """Whether some number of drafts beats a step that does not draft, if drafts are as the N `recent_NJ`: verifying the
    likeliest m of those is verifying K = m * R / N of R requests' drafts.

    Not by their mean: where drafts differ, the likeliest are worth more than as many mean ones."""
    share = requests / len(recent_NJ)
    gains = np.sort(recent_NJ, axis=None)[::-1].cumsum()
    seconds = np.interp(share * np.arange(1, len(gains) + 1), np.arange(len(seconds_K)), seconds_K)
    return bool(((requests + share * gains) / seconds).max() > requests / seconds_without_drafts)


def static(count_R: Ints, length: int) -> Ints:
    """The same length for all, as far as drafts go."""
    return np.minimum(count_R, length)


def threshold(confidence_RJ: Floats, count_R: Ints, least: float) -> Ints:
    """The leading slots whose confidence reaches `least`."""
    drafted = np.arange(confidence_RJ.shape[1]) < np.asarray(count_R)[:, None]
    return (drafted & (confidence_RJ >= least)).cumprod(1).sum(1)


def oracle(accepted_R: Ints, slots: int, seconds_K: Floats) -> Ints:
    """The best lengths if each request's first `accepted_R` drafts are accepted: an upper bound, for simulation."""
    sure = (np.arange(slots) < np.asarray(accepted_R)[:, None]).astype(float)
    return admit(sure, capacity(sure, seconds_K))


# ---- cost curves: measured ones have noise, steps and flat parts


def increasing(seconds_K: Floats) -> Floats:
    """The nearest curve that never falls (isotonic regression, least squares): noise is averaged, steps stay."""
    means: list[float] = []
    sizes: list[int] = []
    for value in seconds_K.tolist():
        mean, size = value, 1
        while means and means[-1] >= mean:
            mean = (mean * size + means[-1] * sizes[-1]) / (size + sizes[-1])
            size += sizes.pop()
            means.pop()
        means.append(mean)
        sizes.append(size)
    return np.repeat(means, sizes)


def convex(seconds_K: Floats) -> Floats:
    """The greatest convex curve below: a step up is spread over the tokens after it. It touches the curve at the first
    and the last K."""
    hull: list[int] = []
    y = seconds_K.tolist()
    for k, value in enumerate(y):
        while len(hull) > 1:
            i, j = hull[-2:]
            if (y[j] - y[i]) * (k - i) < (value - y[i]) * (j - i):
                break
            hull.pop()
        hull.append(k)
    return np.interp(np.arange(len(y)), hull, [y[i] for i in hull])


def not_free(seconds_K: Floats, requests: int, min_yield: float) -> Floats:
    """The same curve, made to grow by at least `min_yield` of the mean cost of a token per token (as B ** min_yield).

    On a flat curve a candidate then pays if its a is above `min_yield` times the mean yield of a verified token, and
    not as long as it is above 0."""
    power = (requests + np.arange(len(seconds_K), dtype=float)) ** min_yield
    return power * np.maximum.accumulate(seconds_K / power)
