"""Log-likelihoods of a benchmark's answers, and what follows from them: rows in the format of results.json.

A sample is one question: its text and tokens are those of the answer chosen, its passes one for each answer scored, and
its scores the benchmark's. Nothing is decoded: a row is its own baseline (speedup 1), tau and tpf are None.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dspec.atomic import atomic_file, write_json
from dspec.config.compose import instantiate_decoders
from dspec.config.run_folder import remember_command
from dspec.config.types import check_types
from dspec.decoding.any_subset.decoder import AnySubset
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Pass
from dspec.decoding.sampling import GREEDY
from dspec.errors import UserError
from dspec.likelihood import Continuation, Likelihood, check_text, log_likelihoods
from dspec.models.target_model import TargetModel
from dspec.provenance import fingerprint, provenance
from dspec.terminal import quiet
from eval.benchmarks.likelihood import LikelihoodBenchmark, Question
from eval.checkpoints import checkpoint_of, fill_in
from eval.decoders import DecoderSpec
from eval.gate import timed
from eval.likelihood.table import perplexity, score_table
from eval.load import LoadedModel, load_model
from eval.meter import Meter
from eval.prompts import plain_ids, raw_ids
from eval.results import ResultRow, assemble
from eval.rows import result_row
from eval.samples import Sample, SampleLog, digest

log = logging.getLogger(__name__)

_NOT_TIMED = {"trusted": None}  # there is no AR loop to compare with generate's


@dataclass(frozen=True)
class Distribution:
    """What scores: a model, and how it is read."""

    label: str
    model: TargetModel
    any_subset: bool


def distribution(name: str, spec: DecoderSpec, loaded: LoadedModel) -> Distribution:
    """The distribution that a decoder writes from. Raises UserError for one that shares that of its baseline."""
    decoder = spec.build(target=loaded.target, draft=loaded.draft)
    if name != spec.baseline or not isinstance(decoder, Autoregressive | AnySubset):
        raise UserError(f"{name} writes from the distribution of {spec.baseline}: use decoder={spec.baseline}")
    return Distribution(spec.label, decoder.target, spec.infills)


def encode(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[Continuation]:
    """Each answer after the context. The text is tokenised as a whole where its first tokens are the context's, else
    context and answer apart."""
    context = raw_ids(tokenizer, question.context)
    found = []
    for answer in question.answers:
        whole = raw_ids(tokenizer, question.context + answer)
        if whole[: len(context)] == context:
            tokens = whole[len(context) :]
        else:
            tokens = plain_ids(tokenizer, answer)
        found.append(Continuation(context, tokens))
    return found


@dataclass(frozen=True)
class Task:
    """A benchmark's questions with the tokens of their answers."""

    name: str
    benchmark: LikelihoodBenchmark
    texts: Sequence[tuple[Question, list[Continuation]]]
    left_out: int  # questions that cannot be scored


def encoded_task(model: TargetModel, name: str, benchmark: LikelihoodBenchmark, *, any_subset: bool) -> Task:
    """Leaves out what cannot be scored, with a warning. Raises UserError if nothing is left."""
    texts = []
    unfit: list[str] = []
    for question in benchmark.questions():
        answers = encode(model.tokenizer, question)
        try:
            for i, text in enumerate(answers):
                check_text(model, text, i, any_subset=any_subset)
        except UserError as error:
            unfit.append(f"{question.id}: {error}")
        else:
            texts.append((question, answers))
    if unfit:
        total = len(texts) + len(unfit)
        which = f"{len(unfit)} of {total} questions of {name} cannot be scored (first: {unfit[0]})"
        if not texts:
            raise UserError(which)
        log.warning("%s: left out", which)
    return Task(name, benchmark, texts, len(unfit))


def run_scoring(cfg: DictConfig, benchmarks: Mapping[str, LikelihoodBenchmark], run_dir: Path) -> dict[str, Any]:
    """Scores `benchmarks` by the distributions of `cfg.decoder`. samples.jsonl and results.json grow in `run_dir`."""
    quiet()
    check_types(cfg)
    fill_in(cfg)
    loaded = load_model(target=cfg.target, checkpoint=checkpoint_of(cfg))
    distributions = {name: distribution(name, spec, loaded) for name, spec in instantiate_decoders(cfg).items()}
    joint = any(one.any_subset for one in distributions.values())  # all score the same questions
    tasks = [encoded_task(loaded.target, name, benchmark, any_subset=joint) for name, benchmark in benchmarks.items()]
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    run = _provenance(loaded, plain, tasks)
    log.info("scoring %s in %s", loaded.target.name, run_dir)
    rows: list[ResultRow] = []
    with (
        Meter("scoring") as meter,
        SampleLog(run_dir / "samples.jsonl", _settings(plain, distributions, tasks)) as kept,
    ):
        for one in tasks:
            kept.check_prompts(one.name, [(question.id, _ids(answers)) for question, answers in one.texts])
        remember_command(cfg)
        meter.expect(sum(len(one.texts) for one in tasks) * len(distributions), done=len(kept.samples))
        for one in tasks:
            meter.phase(one.name)
            _score(one, distributions, int(cfg.batch_size), kept, meter)
            rows += [
                _row(one, key, d, kept, batch_size=cfg.batch_size, seed=cfg.seed) for key, d in distributions.items()
            ]
            results = assemble(rows, run=run, ar_check=_NOT_TIMED, calibration=None, complete=one is tasks[-1])
            write_json(run_dir / "results.json", results)
    write_json(run_dir / "config.json", plain)
    shown = score_table(rows)
    with atomic_file(run_dir / "table.md") as scratch:
        scratch.write_text(f"```\n{shown}\n```\n", encoding="utf-8")
    Console().print(f"{shown}\nresults: {run_dir}", markup=False, highlight=False, soft_wrap=True)
    return results


def _provenance(loaded: LoadedModel, config: dict[str, Any], tasks: Sequence[Task]) -> dict[str, Any]:
    dtype = str(loaded.target.dtype).removeprefix("torch.")
    run = provenance(seed=config["seed"], dtype=dtype, config=config, prompt_policy={})  # texts are raw
    return run | {"benchmarks": {one.name: one.benchmark.source() for one in tasks}}


def _settings(
    config: Mapping[str, Any], distributions: Mapping[str, Distribution], tasks: Sequence[Task]
) -> dict[str, Any]:
    """All that samples depend on."""
    return {key: value for key, value in config.items() if key not in ("resume", "limit")} | {
        "weights": {key: fingerprint(one.model.model) for key, one in distributions.items()},
        "data": {one.name: one.benchmark.source()["sha256"] for one in tasks},
    }


def _ids(answers: Sequence[Continuation]) -> list[int]:
    """What tells a question from others."""
    return [token for answer in answers for token in (*answer.context, *answer.tokens)]


def _score(
    task: Task, distributions: Mapping[str, Distribution], batch_size: int, kept: SampleLog, meter: Meter
) -> None:
    """Scores the questions that `kept` has no samples of."""
    before = kept.select(task.name, GREEDY.temperature)
    scored, first = {s.id for s in before}, 1 + max((s.batch for s in before), default=-1)
    rest = [text for text in task.texts if text[0].id not in scored]
    for at in range(0, len(rest), batch_size):
        batch, found = rest[at : at + batch_size], list[Sample]()
        flat = [answer for _, answers in batch for answer in answers]
        for key, one in distributions.items():
            work = partial(log_likelihoods, one.model, flat, any_subset=one.any_subset)
            likelihoods, seconds = timed(one.model, work)
            each = iter(likelihoods)
            found += [
                _sample(task, key, number=first + at // batch_size, question=question, answers=answers,
                        likelihoods=[next(each) for _ in answers], seconds=seconds)
                for question, answers in batch
            ]  # fmt: skip
            meter.advance(len(batch))
        kept.add(found)


def _sample(
    task: Task,
    key: str,
    *,
    number: int,
    question: Question,
    answers: Sequence[Continuation],
    likelihoods: Sequence[Likelihood],
    seconds: float,
) -> Sample:
    scores = task.benchmark.judge(question, [one.total for one in likelihoods], [one.greedy for one in likelihoods])
    passes = [Pass("prefill", positions=len(a.context) + len(a.tokens)) for a in answers]
    return Sample(
        benchmark=task.name,
        temperature=GREEDY.temperature,
        decoder=key,
        batch=number,
        id=question.id,
        prompt_sha256=digest(_ids(answers)),
        text=question.answers[scores.chosen],
        verdicts=scores.verdicts,
        scores=scores.continuous,
        generation=Generation(list(answers[scores.chosen].tokens), passes=passes),
        seconds=seconds,
    )


def _row(task: Task, key: str, one: Distribution, kept: SampleLog, *, batch_size: int, seed: int) -> ResultRow:
    samples = [s for s in kept.select(task.name, GREEDY.temperature) if s.decoder == key]
    counted = result_row(samples, samples, samples, quality=task.benchmark.quality, greedy=True, seed=seed)
    return {
        "method": one.label,
        "target": one.model.name,
        "decoder": {"name": key, **GREEDY.to_dict(), "density": "joint" if one.any_subset else "causal"},
        "baseline": key,
        "reference": key,
        "lossless": True,
        "benchmark": task.name,
        "batch_size": batch_size,
        "left_out": task.left_out,
        "gold_length": False,
        **counted,
        "perplexity": perplexity(counted),
    }
