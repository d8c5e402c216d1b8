"""Where simulated drafts come from: recorded rounds, replayed, or a distribution fitted to them.

A trace is a request's answer as rounds that verified every draft. Where rounds begin is recorded; between two of them
an answer is replayed as positions: whether the drafter found the token that stands there, and how sure it was of it.
After a round whose drafts were all accepted, the next token is the target's; the drafter is taken to find it if it
finds the one after it. So any number of drafts can be verified from any position, and verifying all of them gives the
recorded rounds again. In truth a shorter draft ends at text that is verified, and drafts from there are better than
late slots of a longer one: traces with a round at every position (eval/serving/record.py) show that too.

Legend: J = draft slots, N = rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspec.decoding.generation import Generation
from dspec.errors import UserError
from dspec.serving.step_table import Floats


@dataclass(frozen=True)
class Round:
    """A round that verified all J drafts: what is known of each, before any temperature, and what came of them.

    Only the first `valid` say something about acceptance: the others are past a drafted stop or the length limit."""

    logits: tuple[float, ...]  # of the confidence head; () without one
    accepted: int  # at most `valid`
    committed: int  # tokens
    valid: int
    # of the distribution that a draft was drawn from: log-probability of its likeliest token, entropy in nats; ()
    # where drafts are greedy
    top: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The rounds of one answer, after the token that its prefill emitted; its prompt's id, domain and length."""

    rounds: tuple[Round, ...]
    id: str = ""
    domain: str = ""
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return 1 + sum(r.committed for r in self.rounds)


def record(generations: Sequence[Generation]) -> list[Trace]:
    """Traces of answers decoded with VerifyAll and record_confidence=True. Raises UserError where there are no
    confidences."""
    traces = []
    for generation in generations:
        if any(len(r.confidence) < r.drafted for r in generation.rounds):
            raise UserError("these answers have no recorded confidences: decode them with record_confidence=True")
        rounds = [Round(r.confidence, r.accepted, r.committed, r.valid, r.top, r.entropy) for r in generation.rounds]
        traces.append(Trace(tuple(rounds)))
    return traces


class Answer(Protocol):
    """One request's answer in a simulation."""

    tokens: int  # in all

    def draft(self, at: int) -> tuple[Floats, int]:
        """Confidences [J] of drafts after the first `at` tokens, and how many of them the target would accept."""
        ...


class AnswerSource(Protocol):
    slots: int

    def answer(self, rng: np.random.Generator) -> Answer: ...


class Replay:
    """Recorded answers, drawn with replacement."""

    def __init__(self, traces: Sequence[Trace], *, slots: int, temperatures: Sequence[float] | None) -> None:
        """`temperatures` (one per slot) calibrate the confidences; None leaves them raw."""
        self.slots = slots
        scale = np.ones(slots) if temperatures is None else np.asarray(temperatures, dtype=float)
        self.answers = [ReplayedAnswer(trace, scale) for trace in traces if trace.rounds]
        if not self.answers:
            raise UserError("no rounds to replay: all answers ended with their first token")

    def answer(self, rng: np.random.Generator) -> Answer:
        return self.answers[rng.integers(len(self.answers))]


class ReplayedAnswer:
    """A trace by position: `rounds[t]` is the one recorded after t tokens. Between them, `hit[t]` and `sure[t]` are of
    the token after t others, `after[t]` the confidences of a round's drafts after a miss."""

    def __init__(self, trace: Trace, temperatures_J: Floats) -> None:
        self.tokens, self.slots = trace.tokens, len(temperatures_J)
        self.rounds: dict[int, tuple[Floats, int]] = {}
        self.hit, self.sure = [True], [1.0]  # position 0: the prefill's token
        self.after: dict[int, Floats] = {}
        unknown, at = [], 1
        for one in trace.rounds:
            c = 1 / (1 + np.exp(-np.array(one.logits) / temperatures_J))
            self.rounds[at] = c, one.accepted
            at += one.committed
            self.hit += [True] * one.accepted
            self.sure += c[: one.accepted].tolist()
            if one.committed == one.accepted:
                continue  # it ended with an accepted stop, or at the length limit
            if missed := one.accepted < len(c):
                self.after[len(self.hit)] = c[one.accepted + 1 :]
            else:
                unknown.append(len(self.hit))
            self.hit.append(False)
            self.sure.append(float(c[one.accepted]) if missed else 0.0)
        for t in reversed(unknown):
            if t + 1 < len(self.hit):
                self.hit[t], self.sure[t] = self.hit[t + 1], self.sure[t + 1]

    def draft(self, at: int) -> tuple[Floats, int]:
        if at in self.rounds:
            return self.rounds[at]
        accepted = 0
        while accepted < self.slots and at + accepted < self.tokens and self.hit[at + accepted]:
            accepted += 1
        sure = self.sure[at : at + accepted + 1]
        tail = self.after.get(at + accepted, np.empty(0)).tolist()
        known = (sure + tail)[: self.slots]
        return np.array(known + [known[-1] if known else 0.0] * (self.slots - len(known))), accepted


class FittedSource:
    """Answers whose rounds are drawn anew: logits from a normal distribution, each draft accepted with its calibrated
    confidence. What it has of the traces: means and covariances [J, J] of the logits, and the answers' lengths."""

    def __init__(self, *, mean_J: Floats, covariance_JJ: Floats, temperatures_J: Floats, tokens: Sequence[int]) -> None:
        self.slots = len(mean_J)
        self.mean_J, self.factor_JJ = mean_J, np.linalg.cholesky(covariance_JJ + 1e-9 * np.eye(len(mean_J)))
        self.temperatures_J, self.tokens = temperatures_J, list(tokens)

    @staticmethod
    def fit(traces: Sequence[Trace], *, slots: int, temperatures: Sequence[float]) -> "FittedSource":
        """From rounds that drafted all slots; `temperatures` are those of STS on the same traces (1 for each slot: the
        head is calibrated). Raises UserError for fewer than 2 such rounds."""
        logits_NJ = np.array([r.logits for trace in traces for r in trace.rounds if r.valid == slots])
        if len(logits_NJ) < 2:
            raise UserError(f"{len(logits_NJ)} rounds with {slots} drafts are too few to fit: record more answers")
        return FittedSource(
            mean_J=logits_NJ.mean(0),
            covariance_JJ=np.atleast_2d(np.cov(logits_NJ.T)),
            temperatures_J=np.asarray(temperatures, dtype=float),
            tokens=[trace.tokens for trace in traces],
        )

    def answer(self, rng: np.random.Generator) -> Answer:
        return _FittedAnswer(self, int(rng.choice(self.tokens)), np.random.default_rng(rng.integers(2**32)))


class _FittedAnswer:
    def __init__(self, source: FittedSource, tokens: int, rng: np.random.Generator) -> None:
        self.source, self.tokens, self.rng = source, tokens, rng

    def draft(self, at: int) -> tuple[Floats, int]:
        s = self.source
        logits = s.mean_J + s.factor_JJ @ self.rng.standard_normal(s.slots)
        c = 1 / (1 + np.exp(-logits / s.temperatures_J))
        return c, int((self.rng.random(s.slots) < c).cumprod().sum())
