"""Sequential Temperature Scaling (STS) of the confidence head, and a report on its effect.

Source: DSpark (arXiv 2607.05147), "Confidence-Scheduled Verification". For k = 1..K in order, T_k is grid-searched so
that prod_{i<=k} sigmoid(z_i / T_i) has the lowest expected calibration error (ECE, equal-width bins) against the event
"the first k draft tokens were all accepted", with T_1..T_{k-1} already fixed. Fit and report on disjoint `Traces`,
neither seen in training. Pure functions without models, decoding or files; float64 on the CPU.

Shapes: N = rounds, K = draft slots, M = the rounds valid at one slot, G = grid points, B = bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torchmetrics.functional.classification import binary_auroc

_CHUNK = 8192  # rows per chunk of the grid search: bounds memory, does not change the result
_TIE = 1e-12  # ECE values this close differ by rounding only


@dataclass(frozen=True)
class Traces:
    """Observed decoding rounds. Slots after the valid ones (cut off by EOS or the length limit, or not drafted) are
    never read and may be NaN. Validity must not depend on acceptance (cut at the first *drafted* EOS, accepted or
    not), or the remaining outcomes are a biased sample."""

    logits_NK: Tensor  # confidence logits z
    accepted_N: Tensor  # leading draft tokens accepted, 0..K
    valid_N: Tensor  # leading valid slots, 0..K

    def __post_init__(self) -> None:
        if self.logits_NK.ndim != 2 or not self.logits_NK.is_floating_point():
            raise ValueError(f"logits_NK must be a float [N, K] tensor, got {_describe(self.logits_NK)}")
        self._check_counts("accepted_N", self.accepted_N)
        self._check_counts("valid_N", self.valid_N)
        if not self.logits_NK[self._first(self.valid_N)].isfinite().all():
            raise ValueError("logits_NK is NaN or inf at a valid slot; fix the drafter or lower valid_N")

    def _check_counts(self, name: str, counts_N: Tensor) -> None:
        rounds, slots = self.logits_NK.shape
        if counts_N.shape != (rounds,) or counts_N.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be an int32 or int64 [{rounds}] tensor, got {_describe(counts_N)}")
        if ((counts_N < 0) | (counts_N > slots)).any():
            raise ValueError(f"{name} must lie in 0..{slots}, the number of slots in logits_NK")

    def _first(self, counts_N: Tensor) -> Tensor:
        """bool [N, K]: whether the slot is among the first `counts_N`."""
        return torch.arange(self.logits_NK.shape[1], device=counts_N.device) < counts_N[:, None]

    def slots(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per slot: its valid rounds (int [M]), their logits and the outcomes "the first k were all accepted" (both
        float64 [M]), on the CPU."""
        z_NK = self.logits_NK.detach().cpu().double()
        survived_NK = self._first(self.accepted_N).cpu().double()
        rows = [valid_N.nonzero()[:, 0] for valid_N in self._first(self.valid_N).cpu().T]
        return [(row, z_NK[row, k], survived_NK[row, k]) for k, row in enumerate(rows)]

    @staticmethod
    def cat(parts: Sequence[Traces]) -> Traces:
        """All rounds of `parts`, which must have the same number of slots."""
        if len({part.logits_NK.shape[1] for part in parts}) != 1:
            raise ValueError(f"cat needs traces with the same K, got K = {[p.logits_NK.shape[1] for p in parts]}")
        fields = ("logits_NK", "accepted_N", "valid_N")
        return Traces(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))

    def split(self, *, fractions: Sequence[float], seed: int, group_N: Tensor | None = None) -> list[Traces]:
        """Disjoint random parts that cover all rounds. With each round's prompt index as `group_N` (int [N]), a
        response's rounds stay in one part; without it, rounds are assigned individually."""
        if min(fractions, default=0.0) <= 0 or not math.isclose(sum(fractions), 1.0):
            raise ValueError(f"fractions must be positive and sum to 1, got {list(fractions)}")
        group_N = torch.arange(len(self.valid_N)) if group_N is None else group_N.cpu()
        if group_N.shape != self.valid_N.shape:
            raise ValueError(f"group_N must have shape {list(self.valid_N.shape)}, got {_describe(group_N)}")
        groups, member_N = torch.unique(group_N, return_inverse=True)
        rank_N = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))[member_N]
        edges = [round(len(groups) * sum(fractions[:i])) for i in range(len(fractions) + 1)]
        rows = [((rank_N >= low) & (rank_N < high)).nonzero()[:, 0] for low, high in pairwise(edges)]
        tensors = (self.logits_NK, self.accepted_N, self.valid_N)
        return [Traces(*(x[row.to(x.device)] for x in tensors)) for row in rows]


def temperature_grid(*, low: float, high: float, points: int) -> Tensor:
    """float64 [points], increasing from low to high, log-spaced on either side of exactly 1.0."""
    if not 0 < low < 1 < high < math.inf or points < 3:
        raise ValueError(f"need 0 < low < 1 < high and points >= 3, got {low}, {high}, {points}")
    share = math.log(low) / (math.log(low) - math.log(high))
    below = min(max(round((points - 1) * share), 1), points - 2)
    lower = torch.linspace(math.log(low), 0.0, below + 1, dtype=torch.float64)
    upper = torch.linspace(0.0, math.log(high), points - below, dtype=torch.float64)
    return torch.cat([lower[:-1], upper]).exp()


def expected_calibration_error(probabilities: Tensor, outcomes: Tensor, *, bins: int) -> float:
    """ECE = sum_b (n_b / M) |mean p - mean outcome| over the bins [b/B, (b+1)/B), the last one closed;
    probabilities [M] in [0, 1], outcomes [M] in {0, 1} or bool."""
    if probabilities.ndim != 1 or probabilities.shape != outcomes.shape or not len(probabilities):
        raise ValueError(f"need two equal non-empty [M]: {_describe(probabilities)}, {_describe(outcomes)}")
    if bins < 1 or not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError("need bins >= 1 and probabilities in [0, 1]")
    p_M1, outcome_M1 = (x.detach().cpu().double()[:, None] for x in (probabilities, outcomes))
    return _bin_gaps(p_M1, outcome_M1, bins).abs().sum().item() / len(p_M1)


def fit_sts(traces: Traces, *, grid: Tensor, bins: int) -> Tensor:
    """STS temperatures, float64 [K]: slot by slot the point of `grid` [G] with the lowest ECE of the cumulative
    product; ties go to the T nearest 1.0 in log space."""
    grid = grid.detach().cpu().double()
    _check_fit(traces, grid, bins)
    prefix_N = torch.ones(len(traces.valid_N), dtype=torch.float64)
    chosen = []
    for rows, z_M, survived_M in traces.slots():
        error_G = _grid_errors(z_M, prefix_N[rows], survived_M, grid, bins)
        distance_G = grid.log().abs().masked_fill(error_G > error_G.min() + _TIE, math.inf)
        chosen.append(grid[distance_G.argmin()])
        prefix_N[rows] *= torch.sigmoid(z_M / chosen[-1])
    return torch.stack(chosen)


def cross_validated_gain(folds: Sequence[Traces], *, grid: Tensor, bins: int) -> float:
    """How much STS lowers the mean ECE over slots on held-out traces: the mean over `folds`, each held out in turn.
    Near 0 or below, the temperatures fit noise."""
    if len(folds) < 2:
        raise ValueError(f"cross-validation needs at least 2 folds, got {len(folds)}")
    gains = []
    for i, held_out in enumerate(folds):
        fitted = fit_sts(Traces.cat([f for k, f in enumerate(folds) if k != i]), grid=grid, bins=bins)
        report = calibration_report(held_out, fitted, bins=bins)
        gains.append(report["mean_ece_before"] - report["mean_ece_after"])
    return fmean(gains)


def calibration_report(traces: Traces, temperatures: Tensor, *, bins: int) -> dict[str, Any]:
    """The effect of `temperatures` [K] on held-out `traces`, JSON-ready; `before` is T = 1 at every slot.

    `ece`, `auc_cumulative`: prod_{i<=k} c_i against "the first k were all accepted". `auc_slot`: c_k against
    "token k accepted" among rounds whose first k - 1 were; STS cannot change it.
    None: an AUC where one outcome never occurs, an ECE without rounds (left out of the mean over slots).
    """
    slots, after = traces.slots(), temperatures.detach().cpu().double()
    if after.shape != (len(slots),) or not (after > 0).all() or not (traces.valid_N > 0).any():
        raise ValueError(f"need a valid round and {len(slots)} positive temperatures, got {after.tolist()}")
    stages = {"before": _stage(traces, torch.ones_like(after), bins), "after": _stage(traces, after, bins)}
    numbers = enumerate(zip(after.tolist(), slots, strict=True), start=1)
    rows: list[dict[str, Any]] = [{"slot": k, "temperature": t, "valid": len(s[0])} for k, (t, s) in numbers]
    means = {}
    for when, stage in stages.items():
        for row, measured in zip(rows, stage, strict=True):
            row.update({f"{name}_{when}": value for name, value in measured.items()})
        means[f"mean_ece_{when}"] = fmean(slot["ece"] for slot in stage if slot["ece"] is not None)
    return {"bins": bins, "rounds": len(traces.valid_N), **means, "slots": rows}


def _stage(traces: Traces, temperatures: Tensor, bins: int) -> list[dict[str, Any]]:
    """Per slot: ECE, AUCs and reliability curve under `temperatures` [K]."""
    log_N, reached_N = torch.zeros(len(traces.valid_N), dtype=torch.float64), traces.accepted_N.cpu()
    stage = []
    for k, ((rows, z_M, survived_M), t) in enumerate(zip(traces.slots(), temperatures, strict=True)):
        log_N[rows] += logsigmoid(z_M / t)  # in log space: no ties from products that round to 1
        log_M, reached_M = log_N[rows], reached_N[rows] >= k
        ece = expected_calibration_error(log_M.exp(), survived_M, bins=bins) if len(rows) else None
        auc_slot = _auc((z_M / t)[reached_M], survived_M[reached_M])
        aucs = {"auc_slot": auc_slot, "auc_cumulative": _auc(log_M, survived_M)}
        stage.append({"ece": ece, **aucs, "curve": _curve(log_M.exp(), survived_M, bins)})
    return stage


def _bin_index(probability: Tensor, bins: int) -> Tensor:
    return (probability * bins).long().clamp(max=bins - 1)


def _bin_gaps(p_MG: Tensor, outcome_M1: Tensor, bins: int) -> Tensor:
    """[G, B]: sum of (p - outcome) in each bin; the sum of its absolute values over B, divided by M, is the ECE."""
    points = p_MG.shape[1]
    cell_MG = _bin_index(p_MG, bins) + torch.arange(points) * bins
    gap_MG = p_MG - outcome_M1
    return torch.bincount(cell_MG.flatten(), gap_MG.flatten(), minlength=points * bins).view(points, bins)


def _grid_errors(z_M: Tensor, prefix_M: Tensor, outcome_M: Tensor, grid: Tensor, bins: int) -> Tensor:
    """[G]: ECE of prefix * sigmoid(z / T) for every T of the grid."""
    gap_GB = torch.zeros(len(grid), bins, dtype=torch.float64)
    for start in range(0, len(z_M), _CHUNK):
        z, prefix, outcome = (x[start : start + _CHUNK, None] for x in (z_M, prefix_M, outcome_M))
        gap_GB += _bin_gaps(prefix * torch.sigmoid(z / grid), outcome, bins)
    return gap_GB.abs().sum(1) / len(z_M)


def _auc(score_M: Tensor, outcome_M: Tensor) -> float | None:
    """Exact AUROC, ties count half. Scores are passed as ranks: torchmetrics squashes values outside [0, 1]."""
    if outcome_M.sum().item() in (0, len(outcome_M)):
        return None
    values, rank_M = torch.unique(score_M, return_inverse=True)
    return float(binary_auroc(rank_M.double() / len(values), outcome_M.long(), thresholds=None))


def _curve(p_M: Tensor, outcome_M: Tensor, bins: int) -> dict[str, list[Any]]:
    """Reliability curve, one value per bin; predicted and observed are None for empty bins."""
    columns = (p_M, outcome_M, torch.ones_like(p_M))
    p_B, outcome_B, count_B = (torch.bincount(_bin_index(p_M, bins), x, minlength=bins) for x in columns)
    count = count_B.long().tolist()
    means = [(total_B / count_B).tolist() for total_B in (p_B, outcome_B)]
    predicted, observed = ([x if n else None for x, n in zip(m, count, strict=True)] for m in means)
    centre = [(b + 0.5) / bins for b in range(bins)]
    return {"centre": centre, "predicted": predicted, "observed": observed, "count": count}


def _check_fit(traces: Traces, grid: Tensor, bins: int) -> None:
    if grid.ndim != 1 or bins < 1 or not ((grid > 0) & grid.isfinite()).all() or not (grid == 1.0).any():
        raise ValueError("need bins >= 1 and a positive finite grid [G] that contains 1.0: temperature_grid")
    empty = [k + 1 for k, (rows, _, _) in enumerate(traces.slots()) if not len(rows)]
    if empty or not traces.logits_NK.shape[1]:
        raise ValueError(f"no valid rounds at slots {empty}: collect more traces or fit fewer slots")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
