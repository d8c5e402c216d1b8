"""Runs every decoder on the same prompts, alternating batch by batch; each sample is written as soon as it is done.

Timing excludes warm-up and verdicts, and synchronises CUDA; the order of decoders rotates from batch to batch. The
check that our AR loop, the baseline of speedups, keeps up with transformers' own is in eval/gate.py, the statistics
over samples in eval/rows.py, the format of results.json in eval/results.py.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from data.chat import PromptPolicy
from dspec.atomic import write_json
from dspec.decoding.generation import Generation
from dspec.decoding.loop import Decoder, decode
from dspec.decoding.sampling import Sampling
from dspec.decoding.stopping import StopStrings
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.target_model import TargetModel
from dspec.provenance import fingerprint
from dspec.seeding import prompt_seed
from eval.benchmarks.base import Benchmark, Item
from eval.decoders import DecoderSpec, built
from eval.gate import against_generate, timed
from eval.meter import Meter
from eval.prompts import EncodedPrompt, UnfitError, encode, text_of
from eval.reports.table import line
from eval.results import ANY_SUBSET, AR, DIFFUSION, ResultRow, assemble, kept_ar_check, reference
from eval.rows import result_row
from eval.samples import Sample, SampleLog, digest

log = logging.getLogger(__name__)

EncodedPrompts = list[tuple[Item, EncodedPrompt]]
ARCheck = dict[str, Any]  # the result of eval/gate.py
T = TypeVar("T")
OnRows = Callable[[list[ResultRow], ARCheck], None]


@dataclass(frozen=True, kw_only=True)
class _Condition:
    """One benchmark at one temperature, with the decoders that can answer its prompts."""

    name: str
    benchmark: Benchmark
    sampling: Sampling
    prompts: EncodedPrompts
    decoders: Mapping[str, Decoder]


class Evaluation:
    """Runs decoders over benchmarks at each temperature."""

    def __init__(
        self,
        *,
        temperatures: Sequence[float],
        top_p: float,
        batch_size: int,
        limit: int | None,
        warmup: int,
        generate_prompts: int,
        generate_floor: float,
        seed: int,
    ) -> None:
        """`limit` uses only the first prompts of each benchmark. `warmup` batches are decoded untimed first. Our AR
        loop must reach a fraction `generate_floor` of the tokens per second of transformers' generate, measured on at
        most `generate_prompts` batches (0: not measured), else speedups are marked."""
        if batch_size < 1:
            raise UserError(f"evaluation.batch_size={batch_size} must be at least 1")
        if limit is not None and limit < 1:
            raise UserError(f"limit={limit} must be at least 1 (null: all prompts)")
        if not temperatures:
            raise UserError("evaluation.temperatures=[] must hold at least one temperature, such as [0.0]")
        self.samplings = [Sampling(temperature=t, top_p=top_p) for t in temperatures]
        self.batch_size, self.limit, self.warmup, self.seed = batch_size, limit, warmup, seed
        self.generate_prompts, self.generate_floor = generate_prompts, generate_floor

    def encode_prompts(
        self,
        *,
        target: TargetModel,
        specs: Mapping[str, DecoderSpec],
        benchmarks: Mapping[str, Benchmark],
        policy: PromptPolicy,
    ) -> dict[str, EncodedPrompts]:
        """Items and their prompt ids, by benchmark; texts with holes that do not fit the model are left out, with a
        warning. Raises UserError if plain AR or another baseline is missing, for a benchmark without prompts, and for
        any other prompt that does not fit the context."""
        if lacking := sorted({spec.baseline for spec in specs.values()} - specs.keys()):
            raise UserError(f"decoder must contain {', '.join(lacking)}, the baseline of others in it")
        encoded = {
            name: _fitting(target, name, benchmark, benchmark.items()[: self.limit], policy)
            for name, benchmark in benchmarks.items()
        }
        if not all(encoded.values()) or not encoded:
            raise UserError("a benchmark has no prompts: set its count to at least 1")
        for name, prompts in encoded.items():
            needed = ANY_SUBSET if _infilling(prompts) else AR
            if needed not in specs and (needed == ANY_SUBSET or DIFFUSION not in specs):
                raise UserError(f"decoder must contain {needed}: speeds on {name} are measured against it")
            for item, prompt in prompts:
                try:
                    target.check_length(len(prompt.ids), prompt.max_new_tokens)
                except UserError as error:
                    raise UserError(f"{item.id}: {error} (benchmark.{name}.max_new_tokens=...)") from error
        return encoded

    def __call__(
        self,
        *,
        target: TargetModel,
        draft: Draft | None,
        specs: Mapping[str, DecoderSpec],
        benchmarks: Mapping[str, Benchmark],
        policy: PromptPolicy,
        stop_ids: Sequence[int],
        folder: Path,
        run: Mapping[str, Any],
        calibration: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
        on_start: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """The content of results.json: the rows and, with `run`, their provenance.

        samples.jsonl and results.json grow in `folder`; existing content is resumed from if it was written with the
        same settings, weights and data; `on_start` is called once that is known.
        """
        run = {**run, "benchmarks": {name: benchmark.source() for name, benchmark in benchmarks.items()}}

        def results(rows: Sequence[ResultRow], check: ARCheck, *, complete: bool) -> dict[str, Any]:
            return assemble(rows, run=run, ar_check=check, calibration=calibration, complete=complete)

        rows, check = self.rows(
            target=target,
            draft=draft,
            specs=specs,
            benchmarks=benchmarks,
            policy=policy,
            stop_ids=stop_ids,
            samples=folder / "samples.jsonl",
            settings=settings,
            kept_check=kept_ar_check(folder),
            on_start=on_start,
            on_rows=lambda rows, check: write_json(folder / "results.json", results(rows, check, complete=False)),
        )
        return results(rows, check, complete=True)

    def rows(
        self,
        *,
        target: TargetModel,
        draft: Draft | None,
        specs: Mapping[str, DecoderSpec],
        benchmarks: Mapping[str, Benchmark],
        policy: PromptPolicy,
        stop_ids: Sequence[int],
        samples: Path,
        settings: Mapping[str, Any],
        kept_check: ARCheck | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_rows: OnRows = lambda rows, check: None,
    ) -> tuple[list[ResultRow], ARCheck]:
        """All rows, and the check of our AR loop against transformers' generate.

        Resumes from existing `samples` (a JSONL file); then `kept_check`, from the session that timed them, is used.
        Raises UserError, before `on_start` is called, if they were written with other settings, weights or data.
        `on_rows` is called with the rows so far: none at first, then after each benchmark and temperature.
        """
        with Meter("evaluation") as meter, torch.inference_mode():
            meter.phase("reading weights and prompts")
            weights = {"target": fingerprint(target.model), "draft": fingerprint(draft) if draft is not None else None}
            encoded = self.encode_prompts(target=target, specs=specs, benchmarks=benchmarks, policy=policy)
            data = {name: _verdict_data(benchmark) for name, benchmark in benchmarks.items()}
            decoders = {key: built(key, spec, target=target, draft=draft) for key, spec in specs.items()}
            with SampleLog(samples, {**settings, "weights": weights, "data": data}) as log:
                for name, prompts in encoded.items():
                    log.check_prompts(name, [(item.id, prompt.key) for item, prompt in prompts])
                on_start()
                rows: list[ResultRow] = []
                if log.samples and kept_check is not None:
                    check = kept_check
                else:
                    check = self._check_ar(target, specs, benchmarks, encoded, stop_ids, meter)
                if not log.samples:
                    on_rows(rows, check)
                conditions = self._conditions(specs, benchmarks, encoded, decoders)
                meter.expect(sum(len(c.prompts) * len(c.decoders) for c in conditions), done=len(log.samples))
                for condition in conditions:
                    decoded = self._decode(condition, target, stop_ids, log, meter)
                    added = self._rows(condition, target, specs, log)
                    rows += added
                    if decoded:
                        for row in added:
                            meter.say(line(row, trusted=bool(check["trusted"])))
                        on_rows(rows, check)
        return rows, check

    def _conditions(
        self,
        specs: Mapping[str, DecoderSpec],
        benchmarks: Mapping[str, Benchmark],
        encoded: Mapping[str, EncodedPrompts],
        decoders: Mapping[str, Decoder],
    ) -> list[_Condition]:
        """Only any-subset decoders can fill holes; they also write from left to right."""
        return [
            _Condition(
                name=name,
                benchmark=benchmark,
                sampling=sampling,
                prompts=encoded[name],
                decoders={key: decoders[key] for key in specs if specs[key].infills or not _infilling(encoded[name])},
            )
            for name, benchmark in benchmarks.items()
            for sampling in self.samplings
        ]

    def _check_ar(
        self,
        target: TargetModel,
        specs: Mapping[str, DecoderSpec],
        benchmarks: Mapping[str, Benchmark],
        encoded: Mapping[str, EncodedPrompts],
        stop_ids: Sequence[int],
        meter: Meter,
    ) -> ARCheck:
        """AR against generate, on the first benchmark that AR can answer; without one nothing is timed."""
        answered = [name for name, prompts in encoded.items() if AR in specs and not _infilling(prompts)]
        name, most = (answered[0], self.generate_prompts) if answered else (next(iter(benchmarks)), 0)
        if most:
            meter.phase("comparing AR with transformers' generate")
        return against_generate(
            target,
            [prompt.ids for _, prompt in encoded[name]],
            batch_size=self.batch_size,
            max_new_tokens=benchmarks[name].max_new_tokens,
            stop_ids=stop_ids,
            most=most,
            floor=self.generate_floor,
            tick=lambda: meter.advance(0),
        )

    def _decode(
        self, condition: _Condition, target: TargetModel, stop_ids: Sequence[int], log: SampleLog, meter: Meter
    ) -> bool:
        """Decodes and logs the samples that are not in `log` yet; returns whether there were any."""
        name, sampling, decoders = condition.name, condition.sampling, condition.decoders
        strings = StopStrings(target.tokenizer, condition.benchmark.stop)
        stop = strings if condition.benchmark.stop else None

        def answer(decoder: Decoder, batch: EncodedPrompts) -> list[Generation]:
            requests = [
                prompt.request(sampling=sampling, seed=prompt_seed(self.seed, item.id), stop_ids=stop_ids, stop=stop)
                for item, prompt in batch
            ]
            return decode(decoder, requests)

        def sample(item: Item, prompt: EncodedPrompt, generation: Generation, **logged: Any) -> Sample:
            text = strings.cut(text_of(target.tokenizer, prompt.response(generation.tokens)))
            return Sample(
                benchmark=name,
                temperature=sampling.temperature,
                id=item.id,
                prompt_sha256=digest(prompt.key),
                text=text,
                verdicts=condition.benchmark.score(item, text),
                scores=condition.benchmark.continuous_scores(item, text),
                generation=generation,
                **logged,
            )

        # 1. batches of the prompts without a logged answer: an earlier session may have answered some
        logged = log.select(name, sampling.temperature)
        answered, first = {s.id for s in logged}, 1 + max((s.batch for s in logged), default=-1)
        rest = [prompt for prompt in condition.prompts if prompt[0].id not in answered]
        batches = [rest[i : i + self.batch_size] for i in range(0, len(rest), self.batch_size)]
        # 2. warm-up: every decoder on the first batches, neither timed nor kept
        if batches and self.warmup:
            meter.phase(f"{name} T={sampling.temperature:g}, warm-up")
        for batch in batches[: self.warmup]:
            for decoder in decoders.values():
                answer(decoder, batch)
                meter.advance(0)
        # 3. batch by batch, each decoder in turn; only decoding is timed, and a batch is logged once all have done it
        if batches:
            meter.phase(f"{name} T={sampling.temperature:g}")
        for number, batch in enumerate(batches, first):
            samples: dict[str, list[Sample]] = {}
            for key in rotated(list(decoders), number):
                generations, seconds = timed(target, lambda d=decoders[key], b=batch: answer(d, b))  # type: ignore[misc]
                samples[key] = [
                    sample(item, prompt, generation, decoder=key, batch=number, seconds=seconds)
                    for (item, prompt), generation in zip(batch, generations, strict=True)
                ]
                meter.advance(len(batch))
            log.add([sample for key in decoders for sample in samples[key]])
        return bool(batches)

    def _rows(
        self, condition: _Condition, target: TargetModel, specs: Mapping[str, DecoderSpec], log: SampleLog
    ) -> list[ResultRow]:
        samples = log.select(condition.name, condition.sampling.temperature)
        by_decoder = {key: [s for s in samples if s.decoder == key] for key in condition.decoders}
        shared, source = reference(by_decoder), condition.benchmark.source()
        return [
            {
                "method": specs[key].label,
                "target": target.name,
                "decoder": {"name": key, **condition.decoders[key].settings(condition.sampling)},
                "baseline": specs[key].baseline,
                "reference": shared,
                "lossless": condition.decoders[key].lossless,
                "benchmark": condition.name,
                "batch_size": self.batch_size,
                "left_out": len(condition.benchmark.items()[: self.limit]) - len(answered),
                "gold_length": bool(source.get("gold_length")),
                **result_row(
                    answered,
                    by_decoder[specs[key].baseline],
                    by_decoder[shared],
                    quality=condition.benchmark.quality,
                    greedy=condition.sampling.greedy,
                    seed=self.seed,
                ),
            }
            for key, answered in by_decoder.items()
        ]


def _verdict_data(benchmark: Benchmark) -> dict[str, Any]:
    """The part of a benchmark's provenance that verdicts depend on; prompts are compared one by one."""
    source = benchmark.source()
    return {key: source.get(key) for key in ("sha256", "prompt")}


def _fitting(
    target: TargetModel, name: str, benchmark: Benchmark, items: Sequence[Item], policy: PromptPolicy
) -> EncodedPrompts:
    """Items and prompts, without the texts with holes that do not fit the model: no setting would shorten those. Raises
    UserError if none is left."""
    prompts: EncodedPrompts = []
    unfit: list[UserError] = []
    for item in items:
        try:
            prompt = encode(target.tokenizer, benchmark, item, policy)
            if prompt.positions is not None and len(prompt.positions) > target.max_positions:
                raise UnfitError(f"{item.id} has {len(prompt.positions)} tokens, the context {target.max_positions}")
        except UnfitError as error:
            unfit.append(error)
        else:
            prompts.append((item, prompt))
    if unfit:
        which = f"{len(unfit)} of {len(items)} texts of {name} do not fit {target.name} (first: {unfit[0]})"
        if not prompts:
            raise UserError(which)
        log.warning("%s: left out", which)
    return prompts


def _infilling(prompts: EncodedPrompts) -> bool:
    """Whether these prompts have holes to fill: AR cannot answer them."""
    return prompts[0][1].positions is not None


def rotated(order: Sequence[T], by: int) -> list[T]:
    """Rotates the order so that each goes first in turn: effects of running after another average out."""
    at = by % len(order)
    return [*order[at:], *order[:at]]
