"""The variants of a load report, measured in the engine and simulated."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.loop import Decoder
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.speculative import Speculative
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.models.temperatures import Calibration
from dspec.serving.policies import ScheduledVerification
from dspec.serving.schedulers import ScheduleMemory, Scheduler, Static
from dspec.serving.scheduling import Ints
from dspec.serving.simulator import Load, Outcome, simulate
from dspec.serving.step_table import Floats, StepTable
from dspec.serving.traces import AnswerSource
from eval.evaluate import rotated
from eval.intervals import bootstrap
from eval.serving.costs import EVEN, PLAIN, RAGGED, EngineCosts, Samples, StepTimer, costs_of
from eval.serving.lanes import Clock, Counts, Lane
from eval.serving.prompts import ServedPrompt
from eval.serving.settings import AR, ServingSettings


class Timed:
    """A scheduler whose own seconds are summed; it decides as the one inside."""

    def __init__(self, inner: Scheduler, now: Clock) -> None:
        self.inner, self.reads_confidence, self._now = inner, inner.reads_confidence, now
        self.seconds, self.rounds = 0.0, 0

    def new_memory(self, requests: int) -> ScheduleMemory:
        return self.inner.new_memory(requests)

    def drafts(self, memory: ScheduleMemory) -> bool:
        start = self._now()
        wanted = self.inner.drafts(memory)
        self.seconds += self._now() - start
        self.rounds += 1
        return wanted

    def __call__(self, confidence_RJ: Floats, count_R: Ints, memory: ScheduleMemory) -> Ints:
        start = self._now()
        lengths = self.inner(confidence_RJ, count_R, memory)
        self.seconds += self._now() - start
        return lengths

    def settings(self) -> dict[str, Any]:
        return self.inner.settings()


@dataclass
class Measured:
    """One variant at one concurrency: its slices, one per repeat, and what came of its answers."""

    slices: list[Counts] = field(default_factory=list)
    users: list[float] = field(default_factory=list)  # tokens per second of each answer
    answers: dict[int, list[int]] = field(default_factory=dict)
    scheduler_microseconds: float | None = None  # per step

    @property
    def total(self) -> Counts:
        return sum(self.slices, Counts())


def measure(
    target: LanguageModel,
    draft: Draft,
    prompts: Sequence[ServedPrompt],
    settings: ServingSettings,
    table: StepTable,
    *,
    concurrency: int,
    tokens: int,
    calibration: Calibration | None,
    now: Clock,
    advance: Callable[[int], None],
) -> tuple[dict[str, Measured], EngineCosts]:
    """All variants at one concurrency, in slices of about `tokens` tokens that take turns; every variant goes through
    the same prompts with the same seeds. The order rotates from repeat to repeat.

    What steps cost at this concurrency is timed in between, so that it is of the same moments of the machine."""
    timed = {name: Timed(scheduler, now) for name, scheduler in settings.schedulers(table).items()}
    decoders: dict[str, Decoder] = {AR: Autoregressive(target=target)}
    for name, scheduler in timed.items():
        policy = ScheduledVerification(scheduler, calibration=calibration)
        decoders[name] = Speculative(target=target, proposer=DraftProposer(draft), policy=policy)
    lanes = {name: Lane(decoder, prompts, concurrency, now) for name, decoder in decoders.items()}
    for lane in lanes.values():
        lane.warm_up(concurrency)
        lane.rates.clear()
    for scheduler in timed.values():
        scheduler.seconds, scheduler.rounds = 0.0, 0
    timer = StepTimer(target, draft, prompts, settings, requests=concurrency, calibration=calibration, now=now)
    samples: Samples = defaultdict(list)
    results = {name: Measured() for name in lanes}
    for repeat in range(settings.repeats):
        for _ in range(-(-settings.profile_repeats // settings.repeats)):
            timer.time(samples)
        for name in rotated(list(lanes), repeat):
            results[name].slices.append(lanes[name].advance(tokens))
            advance(1)
    for name, result in results.items():
        result.users = [rate for _, rate in lanes[name].rates]
        result.answers = lanes[name].answers
        if name in timed:
            result.scheduler_microseconds = 1e6 * timed[name].seconds / max(1, timed[name].rounds)
    return results, costs_of(samples, about={})


def predict(
    source: AnswerSource,
    settings: ServingSettings,
    table: StepTable,
    costs: EngineCosts,
    *,
    concurrency: int,
    seed: int,
) -> dict[str, Outcome]:
    """The same variants, simulated."""
    load = Load(max_in_flight=concurrency, arrivals_per_second=None)
    variants: dict[str, Scheduler] = {AR: Static(0), **settings.schedulers(table)}
    outcomes = {}
    for name, scheduler in variants.items():
        kind = PLAIN if name == AR else RAGGED if scheduler.reads_confidence else EVEN
        outcomes[name] = simulate(
            source,
            scheduler,
            costs.steps[kind],
            load,
            requests=max(settings.simulated_requests, 4 * concurrency),
            prefill_seconds=costs.prefill[kind],
            seed=seed,
            warmup=concurrency,
        )
    return outcomes


def ratio(a: Sequence[Counts], b: Sequence[Counts], *, seed: int) -> dict[str, Any]:
    """Median over repeats of a's throughput over b's, with a bootstrapped 95 % interval (None for one repeat)."""
    ratios = [x.throughput / y.throughput for x, y in zip(a, b, strict=True)]
    interval = None
    if len(ratios) > 1:
        interval = bootstrap(lambda at: median(ratios[i] for i in at), len(ratios), seed=seed)
    return {"median": median(ratios), "interval_95": interval}


def row(
    name: str,
    concurrency: int,
    measured: Measured,
    simulated: Outcome,
    *,
    baseline: Measured,
    greedy: bool,
    seed: int,
) -> dict[str, Any]:
    """A cell of the report, JSON-ready. `baseline` is AR's measurement at the same concurrency."""
    total = measured.total
    common = measured.answers.keys() & baseline.answers.keys()
    differ = sum(measured.answers[n] != baseline.answers[n] for n in common) if greedy else None
    return {
        "variant": name,
        "concurrency": concurrency,
        "throughput": total.throughput,
        "over_ar": ratio(measured.slices, baseline.slices, seed=seed),
        "tokens_per_second_per_user": fmean(measured.users) if measured.users else None,
        "budget": total.verified / total.request_steps,
        "waste": 1 - total.accepted / total.verified if total.verified else 0.0,
        "tokens_per_step": total.tokens / total.steps,
        "milliseconds_per_step": 1000 * total.seconds / total.steps,
        "scheduler_microseconds": measured.scheduler_microseconds,
        "answers_that_differ": differ,  # from AR's, of those that both finished; None: sampled, lossless in law
        "answers_compared": len(common),
        "counts": vars(total),
        "predicted": simulated.to_dict(),
        "error": simulated.throughput / total.throughput - 1,
    }


def verdicts(
    cells: Mapping[int, Mapping[str, Measured]],
    predicted: Mapping[int, Mapping[str, Outcome]],
    *,
    statics: Sequence[str],
    scheduled: Sequence[str],
    seed: int,
) -> list[dict[str, Any]]:
    """Per concurrency: the better scheduled variant against the best static length, and against AR."""
    lines = []
    for concurrency, measured in cells.items():
        simulated = {name: outcome.throughput for name, outcome in predicted[concurrency].items()}
        rates = {name: one.total.throughput for name, one in measured.items()}
        best, better = (max(names, key=lambda name: rates[name]) for names in (statics, scheduled))
        lines.append(
            {
                "concurrency": concurrency,
                "static": best,
                "scheduled": better,
                "over_static": ratio(measured[better].slices, measured[best].slices, seed=seed),
                "over_ar": ratio(measured[better].slices, measured[AR].slices, seed=seed),
                "simulated_over_static": max(simulated[n] for n in scheduled) / max(simulated[n] for n in statics),
                "simulated_over_ar": max(simulated[n] for n in scheduled) / simulated[AR],
            }
        )
    return lines
