"""Every decoder on the same prompts, batch by batch in turn, each sample written as it is done.

Timing leaves out the warm-up and the verdicts, and waits for CUDA. A speedup is only given when our AR loop keeps up
with transformers' own in the same run. What the samples amount to is eval/rows.py.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.chat import PromptPolicy, prompt_ids
from data.regenerate import prompt_seed
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.base import Decoder, Generation
from dspec.decoding.sampling import Sampling
from dspec.decoding.stopping import StopStrings
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.target import Target
from dspec.provenance import fingerprint
from eval.benchmarks.base import Benchmark, Item
from eval.rows import Row, row
from eval.samples import Sample, SampleLog

BASELINE = "autoregressive"
BASE = "base_autoregressive"  # plain AR of the untrained base, where a method trains the target's own weights
Prompts = list[tuple[Item, list[int]]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A line of the table: a method's label and `build(target=, draft=, sampling=)` for its decoder.

    `serial` is the contender that decodes the same weights one token a pass: mismatches and speedup refer to it.
    """

    method: str
    build: Callable[..., Decoder]
    serial: str = BASELINE


def _synchronise(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def timed(target: Target, work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and its seconds; waits for CUDA."""
    _synchronise(target)
    start = time.perf_counter()
    result = work()
    _synchronise(target)
    return result, time.perf_counter() - start


@contextmanager
def _progress(total: int) -> Iterator[Callable[..., None]]:
    """A bar; the function it yields takes `advance` and `description`."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("evaluation: {task.description}"), *columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda **change: bar.update(task, **change)


class Evaluation:
    """Runs contenders over benchmarks at each temperature."""

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
        """`limit` keeps the first prompts of each benchmark. `warmup` batches are decoded untimed first. Our AR loop
        must reach `generate_floor` of the tokens per second of transformers' generate on `generate_prompts` prompts,
        else no speedup is given."""
        if batch_size < 1:
            raise UserError(f"evaluation.batch_size={batch_size} must be at least 1")
        if limit is not None and limit < 1:
            raise UserError(f"limit={limit} must be at least 1 (null: all prompts)")
        self.samplings = [Sampling(temperature=t, top_p=top_p) for t in temperatures]
        self.batch_size, self.limit, self.warmup, self.seed = batch_size, limit, warmup, seed
        self.generate_prompts, self.generate_floor = generate_prompts, generate_floor

    def check(
        self,
        *,
        target: Target,
        contenders: Mapping[str, Contender],
        benchmarks: Mapping[str, Benchmark],
        policy: PromptPolicy,
    ) -> dict[str, Prompts]:
        """Items and prompt ids of each benchmark. Raises UserError without the AR baseline, for no benchmark, and for
        a prompt that does not fit the context."""
        if BASELINE not in contenders:
            raise UserError(f"decoder must contain {BASELINE}: speeds are measured against it")
        if lacking := sorted({c.serial for c in contenders.values()} - contenders.keys()):
            raise UserError(f"decoder must contain {', '.join(lacking)}, the serial decoder of others in it")
        encoded = {
            name: [(item, encode(target, benchmark, item, policy)) for item in benchmark.items()[: self.limit]]
            for name, benchmark in benchmarks.items()
        }
        if not all(encoded.values()) or not encoded:
            raise UserError("a benchmark has no prompts: set its count to at least 1")
        for name, prompts in encoded.items():
            for _, ids in prompts:
                target.check_length(len(ids), benchmarks[name].max_new_tokens)
        return encoded

    def __call__(
        self,
        *,
        target: Target,
        draft: Draft | None,
        contenders: Mapping[str, Contender],
        benchmarks: Mapping[str, Benchmark],
        policy: PromptPolicy,
        stop_ids: Sequence[int],
        samples: Path,
        settings: Mapping[str, Any],
    ) -> tuple[list[Row], dict[str, Any]]:
        """All rows, and the check of our AR loop against transformers' generate.

        Goes on from what `samples` (a JSONL file) holds, if it was written with the same settings and weights.
        """
        weights = {"target": fingerprint(target.model), "draft": fingerprint(draft) if draft is not None else None}
        log = SampleLog(samples, {**settings, "weights": weights})
        encoded = self.check(target=target, contenders=contenders, benchmarks=benchmarks, policy=policy)
        total = sum(map(len, encoded.values())) * len(self.samplings) * len(contenders)
        fields: list[dict[str, Decoder]] = [
            {key: c.build(target=target, draft=draft, sampling=sampling) for key, c in contenders.items()}
            for sampling in self.samplings
        ]
        rows: list[Row] = []
        with torch.inference_mode(), _progress(total) as progress:
            progress(advance=len(log.samples))
            check = self._against_generate(target, benchmarks, encoded, stop_ids)
            for name, benchmark in benchmarks.items():
                for decoders in fields:
                    progress(description=f"{name} T={decoders[BASELINE].sampling.temperature:g}")
                    self._run(target, name, benchmark, decoders, encoded[name], stop_ids, log, progress)
                    rows += self._rows(target, name, benchmark, contenders, decoders, log, speeds=check["trusted"])
        return rows, check

    def _run(
        self,
        target: Target,
        name: str,
        benchmark: Benchmark,
        decoders: Mapping[str, Decoder],
        prompts: Prompts,
        stop_ids: Sequence[int],
        log: SampleLog,
        progress: Callable[..., None],
    ) -> None:
        """Decodes what `log` lacks."""
        strings, temperature = StopStrings(target.tokenizer, benchmark.stop), decoders[BASELINE].sampling.temperature

        def decode(decoder: Decoder, batch: Prompts) -> list[Generation]:
            return decoder.decode(
                [ids for _, ids in batch],
                max_new_tokens=benchmark.max_new_tokens,
                stop_ids=stop_ids,
                seeds=[prompt_seed(self.seed, item.id) for item, _ in batch],
                ends=strings if benchmark.stop else None,
            )

        batches = [prompts[i : i + self.batch_size] for i in range(0, len(prompts), self.batch_size)]
        done = {s.batch for s in log.of(name, temperature)}
        todo = [(number, batch) for number, batch in enumerate(batches) if number not in done]
        for _, batch in todo[: self.warmup]:
            for decoder in decoders.values():
                decode(decoder, batch)
        for number, batch in todo:
            samples = []
            for key, decoder in decoders.items():
                generations, seconds = timed(target, lambda d=decoder, b=batch: decode(d, b))  # type: ignore[misc]
                for (item, _), generation in zip(batch, generations, strict=True):
                    text = strings.cut(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
                    samples.append(
                        Sample(
                            benchmark=name,
                            temperature=temperature,
                            decoder=key,
                            batch=number,
                            id=item.id,
                            text=text,
                            verdicts=benchmark.score(item, text),
                            generation=generation,
                            seconds=seconds,
                        )
                    )
                progress(advance=len(batch))
            log.add(samples)

    def _rows(
        self,
        target: Target,
        name: str,
        benchmark: Benchmark,
        contenders: Mapping[str, Contender],
        decoders: Mapping[str, Decoder],
        log: SampleLog,
        *,
        speeds: bool,
    ) -> list[Row]:
        sampling = decoders[BASELINE].sampling
        samples = log.of(name, sampling.temperature)
        by_decoder = {key: [s for s in samples if s.decoder == key] for key in decoders}
        return [
            {
                "method": contenders[key].method,
                "target": target.name,
                "decoder": {"name": key, **decoders[key].settings()},
                "benchmark": name,
                "batch_size": self.batch_size,
                **row(
                    own,
                    by_decoder[contenders[key].serial],
                    by_decoder[BASE if BASE in contenders else BASELINE],
                    quality=benchmark.quality,
                    greedy=sampling.greedy,
                    speeds=speeds,
                    seed=self.seed,
                ),
            }
            for key, own in by_decoder.items()
        ]

    def _against_generate(
        self,
        target: Target,
        benchmarks: Mapping[str, Benchmark],
        encoded: Mapping[str, Prompts],
        stop_ids: Sequence[int],
    ) -> dict[str, Any]:
        """Tokens per second of our greedy AR loop over those of transformers' generate, same prompts, in turn."""
        name = next(iter(benchmarks))
        decoder = Autoregressive(target=target, sampling=Sampling(temperature=0.0, top_p=1.0))
        budget = benchmarks[name].max_new_tokens
        ratios = []
        prompts = encoded[name] if len(encoded[name]) > 1 else encoded[name] * 2
        for i, (_, ids) in enumerate(prompts[: self.generate_prompts + 1]):
            ours, our_seconds = timed(
                target,
                lambda x=ids: decoder.decode([x], max_new_tokens=budget, stop_ids=stop_ids, seeds=[0]),  # type: ignore[misc]
            )
            theirs, their_seconds = timed(target, lambda x=ids: _generate(target, x, budget, stop_ids))  # type: ignore[misc]
            if i > 0:  # the first one warms up
                ratios.append(len(ours[0].tokens) / our_seconds * their_seconds / theirs)
        ratio = statistics.median(ratios)
        return {"ar_over_generate": ratio, "floor": self.generate_floor, "trusted": ratio >= self.generate_floor}


def encode(target: Target, benchmark: Benchmark, item: Item, policy: PromptPolicy) -> list[int]:
    """Prompt ids: the user turn of a chat, or raw text to go on from."""
    if benchmark.chat:
        return prompt_ids(target.tokenizer, item.prompt, policy)
    return list(target.tokenizer(item.prompt)["input_ids"])


def _generate(target: Target, ids: Sequence[int], budget: int, stop_ids: Sequence[int]) -> int:
    """Number of tokens that transformers' own greedy generate gives."""
    tensor = torch.tensor([ids], device=target.device)
    output = target.model.generate(
        tensor,
        attention_mask=torch.ones_like(tensor),
        max_new_tokens=budget,
        do_sample=False,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
    )
    return int(output.shape[1]) - len(ids)
