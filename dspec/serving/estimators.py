"""Estimators of acceptance: how likely each draft is to be accepted if those before it are. Schedulers read them.

    Scaled     the confidence head's logits over temperatures: 1 is the head as trained, STS fits others
    Online     the same with temperatures refitted after every step, to the rounds served so far
    Logistic   without a head: the slot, and the likeliest token and entropy of the distribution it is drafted from

**Lossless.** Estimates of slot j are made of what is known before its token is drawn, and of earlier steps.

**Censoring.** A step shows less than a recorded round that verified everything. Slot j says something only if it was
sent and all slots before it were accepted: those after a rejection and those that were not sent are unknown, neither
accepted nor rejected (a slot that was not sent must not count as rejected after an earlier rejection either, or the
outcome would decide what is counted). Whether j was sent and reached depends on drafts before j alone, if the scheduler
is lossless, and its own acceptance given those is what is estimated: so the likelihood of the slots that were seen is
that of a random sample, whatever the scheduler chose, and can be fitted as it is. STS's own criterion, calibration of
the product up to j, has no such property: rounds whose early drafts look bad to later slots are cut before j. It is
fitted to rounds that verified everything.

Legend: R = requests, J = draft slots, F = features, G = temperatures tried, N = rounds.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dspec.errors import UserError
from dspec.serving.scheduling import Ints
from dspec.serving.step_table import Floats
from dspec.serving.traces import Answer, Round, Trace

# features of a draft: confidence logit; log-probability of the likeliest token and entropy (nats) of what it is drawn
# from; and, known once it is drafted, 1 if its outcome counts and 0 past a drafted stop or the length limit
LOGIT, TOP, ENTROPY, COUNTS = range(4)


class Estimator(Protocol):
    def __call__(self, drafts_RJF: Floats) -> Floats:
        """The probability [R, J] that a draft is accepted, given that those before it are."""
        ...

    def observe(self, drafts_RJF: Floats, sent_R: Ints, accepted_R: Ints) -> None:
        """What came of a step: of each request's drafts the first `sent` were verified, and `accepted` of these."""
        ...


class Scaled:
    """The head's logits over one temperature per slot."""

    def __init__(self, temperatures: Sequence[float]) -> None:
        self.temperatures_J = np.asarray(temperatures, dtype=float)

    def __call__(self, drafts_RJF: Floats) -> Floats:
        return sigmoid(drafts_RJF[..., LOGIT] / self.temperatures_J)

    def observe(self, drafts_RJF: Floats, sent_R: Ints, accepted_R: Ints) -> None:
        """Fitted once."""


class Online:
    """One temperature per slot, always the likeliest of a grid given the rounds so far; a round's weight halves every
    `half_life` rounds.

    Temperatures start at 1, and a prior worth `prior` in log-likelihood for each squared factor e away from 1 keeps
    them there while little is known. Evidence fades with rounds, not with sightings of the slot: one that looks
    hopeless and is therefore never sent comes back to the head's own opinion, and is tried again."""

    def __init__(self, slots: int, *, grid: Sequence[float], half_life: float, prior: float) -> None:
        self.grid_G = np.asarray(grid, dtype=float)
        if not half_life > 0 or not prior > 0:
            raise UserError(f"an online estimate needs half_life={half_life} and prior={prior} above 0")
        self._decay = 0.5 ** (1 / half_life)
        self._prior_G = -prior * np.log(self.grid_G) ** 2
        self._likelihood_JG = np.zeros((slots, len(self.grid_G)))

    @property
    def temperatures(self) -> Floats:
        """Of the slots."""
        return self.grid_G[(self._likelihood_JG + self._prior_G).argmax(1)]

    def __call__(self, drafts_RJF: Floats) -> Floats:
        return sigmoid(drafts_RJF[..., LOGIT] / self.temperatures)

    def observe(self, drafts_RJF: Floats, sent_R: Ints, accepted_R: Ints) -> None:
        R, J = drafts_RJF.shape[:2]
        seen_RJ = seen(sent_R, accepted_R, J) & (drafts_RJF[..., COUNTS] > 0)
        signed_RJ = np.where(np.arange(J) < accepted_R[:, None], 1.0, -1.0) * drafts_RJF[..., LOGIT]
        signed_RJ = np.where(seen_RJ, signed_RJ, 0.0)  # an unseen slot may be NaN
        log_RJG = -np.logaddexp(0.0, -signed_RJ[..., None] / self.grid_G)
        self._likelihood_JG *= self._decay**R
        self._likelihood_JG += np.where(seen_RJ[..., None], log_RJG, 0.0).sum(0)


class Logistic:
    """Acceptance = sigmoid(intercept of the slot + weights x features)."""

    def __init__(self, intercept_J: Floats, columns: Sequence[int], weights: Floats) -> None:
        self.intercept_J, self.columns, self.weights = intercept_J, list(columns), weights

    @staticmethod
    def fit(traces: Sequence[Trace], *, slots: int, columns: Sequence[int], ridge: float) -> "Logistic":
        """Maximum likelihood on the slots reached in recorded rounds, less `ridge` / 2 for each squared coefficient.
        Without columns: the mean acceptance of each slot. Raises UserError without a round, or where the columns were
        not recorded."""
        rounds = [one for trace in traces for one in trace.rounds]
        if not rounds:
            raise UserError("no rounds to fit acceptance to: all answers ended with their first token")
        drafts_NJF = np.stack([features(one, slots) for one in rounds])
        accepted_N = np.array([one.accepted for one in rounds])
        known_NJ = seen(np.array([one.valid for one in rounds]), accepted_N, slots)
        at_N, slot_N = known_NJ.nonzero()
        picked = drafts_NJF[at_N, slot_N][:, list(columns)]
        if not np.isfinite(picked).all():
            raise UserError("these traces do not say what was drafted from: a logistic estimate needs sampled drafts")
        design = np.concatenate([np.eye(slots)[slot_N], picked], 1)
        solution = _newton(design, (slot_N < accepted_N[at_N]).astype(float), ridge)
        return Logistic(solution[:slots], columns, solution[slots:])

    def __call__(self, drafts_RJF: Floats) -> Floats:
        return sigmoid(self.intercept_J + drafts_RJF[..., self.columns] @ self.weights)

    def observe(self, drafts_RJF: Floats, sent_R: Ints, accepted_R: Ints) -> None:
        """Fitted once."""


class Recorded:
    """Answers recorded with a round at every position, drawn with replacement; their drafts are features [J, F]."""

    def __init__(self, traces: Sequence[Trace], *, slots: int) -> None:
        self.slots = slots
        self.traces = [trace for trace in traces if trace.rounds]
        self.answers = [RecordedAnswer(trace, slots) for trace in self.traces]
        if not self.answers:
            raise UserError("no rounds to replay: all answers ended with their first token")

    def answer(self, rng: np.random.Generator) -> Answer:
        return self.answers[rng.integers(len(self.answers))]

    def deal(self, batches: int, *, seed: int) -> "list[Recorded]":
        """Its answers in disjoint batches, of sizes that differ by one at most. Raises UserError for too few."""
        if batches > len(self.answers):
            raise UserError(f"{len(self.answers)} answers are too few for {batches} batches: record more")
        order = np.random.default_rng(seed).permutation(len(self.answers))
        return [Recorded([self.traces[i] for i in order[k::batches]], slots=self.slots) for k in range(batches)]


class RecordedAnswer:
    def __init__(self, trace: Trace, slots: int) -> None:
        if any(one.committed != 1 for one in trace.rounds):
            raise UserError("estimators are compared on traces with a round at every position: record them so")
        self.tokens = trace.tokens
        self._drafts = [(features(one, slots), one.accepted) for one in trace.rounds]

    def draft(self, at: int) -> tuple[Floats, int]:
        return self._drafts[at - 1]


def features(one: Round, slots: int) -> Floats:
    """[J, F] of a recorded round; NaN where something was not recorded."""
    columns = [np.array(v) if v else np.full(slots, np.nan) for v in (one.logits, one.top, one.entropy)]
    return np.stack([*columns, np.arange(slots) < one.valid], 1)


def seen(sent_R: Ints, accepted_R: Ints, slots: int) -> np.ndarray:
    """bool [R, J]: slots that were sent and reached, so that they were accepted or rejected."""
    return np.arange(slots) < np.minimum(sent_R, accepted_R + 1)[:, None]


def sigmoid(x: Floats) -> Floats:
    return np.exp(-np.logaddexp(0.0, -x))


def _newton(design: Floats, outcome: Floats, ridge: float) -> Floats:
    """Coefficients of a logistic regression with a ridge penalty: at most 50 steps of Newton's method."""
    w = np.zeros(design.shape[1])
    for _ in range(50):
        p = sigmoid(design @ w)
        gradient = design.T @ (outcome - p) - ridge * w
        hessian = (design * (p * (1 - p))[:, None]).T @ design + ridge * np.eye(len(w))
        step = np.linalg.solve(hessian, gradient)
        w += step
        if np.abs(step).max() < 1e-10:
            break
    return w
