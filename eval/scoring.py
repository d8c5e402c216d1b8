"""Log-likelihoods of a benchmark's answers, and what follows from them: rows in the format of results.json.

A sample is one question: its text and tokens are those of the answer chosen, its passes one for each answer scored, and
its scores the benchmark's. Nothing is decoded: a row is its own baseline (speedup 1), tau and tpf are None.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dspec.atomic import atomic_file, write_json
from dspec.config import instantiate_decoders, remember_command
from dspec.decoding.any_subset import AnySubset
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Pass
from dspec.decoding.likelihood import Continuation, check_text, log_likelihoods
from dspec.decoding.sampling import GREEDY
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from dspec.provenance import fingerprint, provenance
from dspec.terminal import quiet
from eval.benchmarks.likelihood import LikelihoodBenchmark, Question
from eval.decoders import DecoderSpec
from eval.gate import timed
from eval.load import LoadedModel, load_model
from eval.progress import Meter
from eval.reports.table import aligned, number
from eval.results import ResultRow, assemble
from eval.rows import row
from eval.samples import Sample, SampleLog, digest

log = logging.getLogger(__name__)

Texts = list[tuple[Question, list[Continuation]]]
_NOT_TIMED = {"trusted": None}  # there is no AR loop to compare with generate's


@dataclass(frozen=True)
class Distribution:
    """What scores: a model, and how it is read."""

    label: str
    model: LanguageModel
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
    context = list(tokenizer(question.context)["input_ids"])
    found = []
    for answer in question.answers:
        whole = list(tokenizer(question.context + answer)["input_ids"])
        if whole[: len(context)] == context:
            tokens = whole[len(context) :]
        else:
            tokens = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
        found.append(Continuation(context, tokens))
    return found


def fitting(model: LanguageModel, name: str, questions: Sequence[Question], *, any_subset: bool) -> Texts:
    """The questions with their tokens, without those that cannot be scored, of which a warning tells. Raises UserError
    if none is left."""
    texts: Texts = []
    unfit: list[str] = []
    for question in questions:
        answers = encode(model.tokenizer, question)
        try:
            for i, text in enumerate(answers):
                check_text(model, text, i, any_subset=any_subset)
        except UserError as error:
            unfit.append(f"{question.id}: {error}")
        else:
            texts.append((question, answers))
    if unfit:
        which = f"{len(unfit)} of {len(questions)} questions of {name} cannot be scored (first: {unfit[0]})"
        if not texts:
            raise UserError(which)
        log.warning("%s: left out", which)
    return texts


def run_scoring(cfg: DictConfig, benchmarks: Mapping[str, LikelihoodBenchmark], run_dir: Path) -> dict[str, Any]:
    """Scores `benchmarks` by the distributions of `cfg.decoder`. samples.jsonl and results.json grow in `run_dir`."""
    quiet()
    loaded = load_model(cfg)
    target = loaded.target
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    specs = instantiate_decoders(cfg)
    distributions = {name: distribution(name, spec, loaded) for name, spec in specs.items()}
    joint = any(one.any_subset for one in distributions.values())  # all score the same questions
    encoded = {
        name: fitting(target, name, benchmark.questions(), any_subset=joint) for name, benchmark in benchmarks.items()
    }
    settings = {key: value for key, value in plain.items() if key not in ("resume", "limit")}
    settings |= {
        "weights": {name: fingerprint(d.model.model) for name, d in distributions.items()},
        "data": {name: benchmark.source()["sha256"] for name, benchmark in benchmarks.items()},
    }
    dtype = str(target.dtype).removeprefix("torch.")
    run = provenance(seed=cfg.seed, dtype=dtype, config=plain, prompt_policy=loaded.policy.to_dict(target.tokenizer))
    run |= {"benchmarks": {name: benchmark.source() for name, benchmark in benchmarks.items()}}
    log.info("scoring %s in %s", target.name, run_dir)
    rows: list[ResultRow] = []
    with Meter("scoring") as meter, SampleLog(run_dir / "samples.jsonl", settings) as samples:
        for name, texts in encoded.items():
            samples.check_prompts(name, [(question.id, _ids(answers)) for question, answers in texts])
        remember_command(cfg)
        meter.expect(sum(map(len, encoded.values())) * len(distributions), done=len(samples.samples))
        for name, texts in encoded.items():
            meter.phase(name)
            _score(name, benchmarks[name], distributions, texts, int(cfg.batch_size), samples, meter)
            left_out = len(benchmarks[name].questions()) - len(texts)
            for key, one in distributions.items():
                rows.append(_row(name, key, one, benchmarks[name], samples, left_out, int(cfg.batch_size), cfg.seed))
            write_json(run_dir / "results.json", _results(rows, run, complete=False))
    results = _results(rows, run, complete=True)
    write_json(run_dir / "results.json", results)
    write_json(run_dir / "config.json", plain)
    shown = table(rows)
    with atomic_file(run_dir / "table.md") as scratch:
        scratch.write_text(f"```\n{shown}\n```\n", encoding="utf-8")
    Console().print(f"{shown}\nresults: {run_dir}", markup=False, highlight=False, soft_wrap=True)
    return results


def _results(rows: Sequence[ResultRow], run: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
    return assemble(rows, run=run, ar_check=_NOT_TIMED, calibration=None, complete=complete)


def _ids(answers: Sequence[Continuation]) -> list[int]:
    """What tells a question from others."""
    return [token for answer in answers for token in (*answer.context, *answer.tokens)]


def _score(
    name: str,
    benchmark: LikelihoodBenchmark,
    distributions: Mapping[str, Distribution],
    texts: Texts,
    batch_size: int,
    samples: SampleLog,
    meter: Meter,
) -> None:
    """Scores what is missing from `samples`."""
    before = samples.select(name, 0.0)
    answered, first = {s.id for s in before}, 1 + max((s.batch for s in before), default=-1)
    rest = [text for text in texts if text[0].id not in answered]
    batches = [rest[i : i + batch_size] for i in range(0, len(rest), batch_size)]
    for at, batch in enumerate(batches, first):
        found = []
        for key, one in distributions.items():
            flat = [answer for _, answers in batch for answer in answers]
            work = partial(log_likelihoods, one.model, flat, any_subset=one.any_subset)
            likelihoods, seconds = timed(one.model, work)
            for question, answers in batch:
                mine, likelihoods = likelihoods[: len(answers)], likelihoods[len(answers) :]
                scores = benchmark.judge(question, [m.total for m in mine], [m.greedy for m in mine])
                passes = [Pass("prefill", positions=len(a.context) + len(a.tokens)) for a in answers]
                found.append(
                    Sample(
                        benchmark=name,
                        temperature=0.0,
                        decoder=key,
                        batch=at,
                        id=question.id,
                        prompt_sha256=digest(_ids(answers)),
                        text=question.answers[scores.chosen],
                        verdicts=scores.verdicts,
                        scores=scores.continuous,
                        generation=Generation(list(answers[scores.chosen].tokens), passes=passes),
                        seconds=seconds,
                    )
                )
            meter.advance(len(batch))
        samples.add(found)


def _row(
    name: str,
    key: str,
    one: Distribution,
    benchmark: LikelihoodBenchmark,
    samples: SampleLog,
    left_out: int,
    batch_size: int,
    seed: int,
) -> ResultRow:
    mine = [s for s in samples.select(name, 0.0) if s.decoder == key]
    counted = row(mine, mine, mine, quality=benchmark.quality, greedy=True, seed=seed)
    return {
        "method": one.label,
        "target": one.model.name,
        "decoder": {"name": key, **GREEDY.to_dict(), "density": "joint" if one.any_subset else "causal"},
        "baseline": key,
        "reference": key,
        "lossless": True,
        "benchmark": name,
        "batch_size": batch_size,
        "left_out": left_out,
        **counted,
        "perplexity": perplexity(counted),
    }


def perplexity(of: ResultRow) -> float | None:
    """exp of minus the mean log-likelihood of an answer; None where the benchmark has no such score."""
    found = of["scores"].get("log_likelihood")
    return None if found is None else math.exp(-found["mean"])


def table(rows: Sequence[ResultRow]) -> str:
    """One line per row, under a line for each benchmark."""
    verdicts = list(dict.fromkeys(verdict for r in rows for verdict in r["verdicts"]))
    continuous = list(dict.fromkeys(score for r in rows for score in r["scores"]))
    headers = ["distribution", *(f"{verdict} %" for verdict in verdicts), *continuous]
    headers += ["perplexity"] if any(r["perplexity"] is not None for r in rows) else []
    cells = []
    for r in rows:
        low, high = (100 * end for end in r["interval_95"]["quality"])
        shares = [number(100 * r["verdicts"][v] if v in r["verdicts"] else None, ".1f") for v in verdicts]
        shares[verdicts.index(r["quality_name"])] += f" ({low:.0f}-{high:.0f})"
        means = [_mean(r["scores"].get(score)) for score in continuous]
        cells.append([r["method"], *shares, *means, number(r["perplexity"], ".2f")][: len(headers)])
    return aligned(headers, cells, titles=[_title(r) for r in rows])


def _mean(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return number(None, "")
    return f"{score['mean']:.2f}" + (f" ± {score['se']:.2f}" if score["se"] is not None else "")


def _title(r: ResultRow) -> str:
    out = f" ({r['left_out']} left out: they do not fit)" if r["left_out"] else ""
    return f"{r['benchmark']}, {r['n']} questions{out}; log-likelihoods in nats"
