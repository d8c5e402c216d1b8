"""Every decoder on the same prompts, prompt by prompt in turn, and the rows that come of it.

Counting follows design.md. The speed of a decoder is the median over prompts of its tokens per second over those of
plain AR on the same prompt in the same run; it is only given when our AR loop keeps up with transformers' own.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.chat import PromptPolicy, prompt_ids
from data.regenerate import prompt_seed
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.base import Decoder, Generation
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.target import Target
from eval.benchmarks.base import Benchmark

BASELINE = "autoregressive"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A line of the table: a method's label and `build(target=, draft=, sampling=)` for its decoder."""

    method: str
    build: Callable[..., Decoder]


@dataclass
class _Runs:
    """What one contender did on one benchmark."""

    generations: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def speeds(self) -> list[float]:
        return [len(g.tokens) / s for g, s in zip(self.generations, self.seconds, strict=True)]


def _synchronise(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def _timed(target: Target, work: Callable[[], Any]) -> tuple[Any, float]:
    _synchronise(target)
    start = time.perf_counter()
    result = work()
    _synchronise(target)
    return result, time.perf_counter() - start


class Evaluation:
    """Runs contenders over benchmarks at each temperature."""

    def __init__(
        self,
        *,
        temperatures: Sequence[float],
        top_p: float,
        warmup: int,
        generate_prompts: int,
        generate_floor: float,
        seed: int,
    ) -> None:
        """`warmup` prompts are decoded untimed first. Our AR loop must reach `generate_floor` of the tokens per
        second of transformers' generate on `generate_prompts` prompts, else no speedup is given."""
        self.samplings = [Sampling(temperature=t, top_p=top_p) for t in temperatures]
        self.warmup, self.seed = warmup, seed
        self.generate_prompts, self.generate_floor = generate_prompts, generate_floor

    def check(
        self,
        *,
        target: Target,
        contenders: Mapping[str, Contender],
        benchmarks: Mapping[str, Benchmark],
        policy: PromptPolicy,
    ) -> dict[str, list[tuple[str, list[int]]]]:
        """(id, prompt ids) of each benchmark. Raises UserError without the AR baseline, for no benchmark, for one
        that is not plain chat, and for a prompt that does not fit the context."""
        if BASELINE not in contenders:
            raise UserError(f"decoder must contain {BASELINE}: speeds are measured against it")
        for name, benchmark in benchmarks.items():
            if benchmark.stop or not benchmark.chat:
                raise UserError(f"{name} is no plain chat (raw text or stop strings): run it with python -m eval.run")
        encoded = {
            name: [(item.id, prompt_ids(target.tokenizer, item.prompt, policy)) for item in benchmark.items()]
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
    ) -> tuple[list[Row], dict[str, Any]]:
        """All rows, and the check of our AR loop against transformers' generate."""
        encoded = self.check(target=target, contenders=contenders, benchmarks=benchmarks, policy=policy)
        total = sum(map(len, encoded.values())) * len(self.samplings) * len(contenders)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        rows: list[Row] = []
        with Progress(TextColumn("evaluation: {task.description}"), *columns) as bar:
            task = bar.add_task("", total=total)
            check = self._against_generate(target, benchmarks, encoded, stop_ids)
            for name, benchmark in benchmarks.items():
                for sampling in self.samplings:
                    bar.update(task, description=f"{name} T={sampling.temperature:g}")
                    decoders = {
                        key: c.build(target=target, draft=draft, sampling=sampling) for key, c in contenders.items()
                    }
                    runs = self._run(
                        target, decoders, encoded[name], benchmark.max_new_tokens, stop_ids, lambda: bar.advance(task)
                    )
                    rows += _rows(target, name, benchmark, contenders, decoders, runs, speeds=check["trusted"])
        return rows, check

    def _run(
        self,
        target: Target,
        decoders: Mapping[str, Decoder],
        prompts: Sequence[tuple[str, list[int]]],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        advance: Callable[[], None],
    ) -> dict[str, _Runs]:
        def decode(decoder: Decoder, name: str, ids: list[int]) -> Generation:
            seed = prompt_seed(self.seed, name)
            return decoder.decode([ids], max_new_tokens=max_new_tokens, stop_ids=stop_ids, seeds=[seed])[0]

        runs = {key: _Runs() for key in decoders}
        for name, ids in prompts[: self.warmup]:
            for decoder in decoders.values():
                decode(decoder, name, ids)
        for name, ids in prompts:
            for key, decoder in decoders.items():
                generation, seconds = _timed(target, lambda d=decoder, n=name, i=ids: decode(d, n, i))  # type: ignore[misc]
                runs[key].generations.append(generation)
                runs[key].seconds.append(seconds)
                advance()
        return runs

    def _against_generate(
        self,
        target: Target,
        benchmarks: Mapping[str, Benchmark],
        encoded: Mapping[str, Sequence[tuple[str, list[int]]]],
        stop_ids: Sequence[int],
    ) -> dict[str, Any]:
        """Tokens per second of our greedy AR loop over those of transformers' generate, same prompts, in turn."""
        name = next(iter(benchmarks))
        decoder = Autoregressive(target=target, sampling=Sampling(temperature=0.0, top_p=1.0))
        budget = benchmarks[name].max_new_tokens
        ratios = []
        for i, (_, ids) in enumerate(encoded[name][: self.generate_prompts + 1]):
            ours, our_seconds = _timed(
                target,
                lambda x=ids: decoder.decode([x], max_new_tokens=budget, stop_ids=stop_ids, seeds=[0]),  # type: ignore[misc]
            )
            theirs, their_seconds = _timed(target, lambda x=ids: _generate(target, x, budget, stop_ids))  # type: ignore[misc]
            if i > 0:  # the first one warms up
                ratios.append(len(ours[0].tokens) / our_seconds * their_seconds / theirs)
        ratio = statistics.median(ratios)
        return {"ar_over_generate": ratio, "floor": self.generate_floor, "trusted": ratio >= self.generate_floor}


@torch.inference_mode()
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


def _rows(
    target: Target,
    name: str,
    benchmark: Benchmark,
    contenders: Mapping[str, Contender],
    decoders: Mapping[str, Decoder],
    runs: Mapping[str, _Runs],
    *,
    speeds: bool,
) -> list[Row]:
    base, items = runs[BASELINE], benchmark.items()
    rows = []
    for key, run in runs.items():
        answers = [target.tokenizer.decode(g.tokens, skip_special_tokens=True) for g in run.generations]
        judged = [benchmark.score(item, answer) for item, answer in zip(items, answers, strict=True)]
        verdicts = [verdict[benchmark.quality] for verdict in judged if verdict]
        paired = [own / ar for own, ar in zip(run.speeds(), base.speeds(), strict=True)]
        speedup = statistics.median(paired) if speeds else None
        greedy = decoders[key].sampling.greedy
        differing = sum(a.tokens != b.tokens for a, b in zip(run.generations, base.generations, strict=True))
        rows.append(
            {
                "method": contenders[key].method,
                "target": target.name,
                "decoder": {"name": key, **decoders[key].settings()},
                "benchmark": name,
                "n": len(answers),
                "quality": statistics.fmean(verdicts) if verdicts else None,
                "quality_name": benchmark.quality,
                **counts(run.generations),
                "tokens_per_second": sum(len(g.tokens) for g in run.generations) / sum(run.seconds),
                "speedup": speedup,
                "speedup_vs_base_ar": speedup,  # the serial decoder of these weights is the shared AR base
                "mismatches": differing if greedy else None,
                "acceptance": acceptance(run.generations),
            }
        )
    return rows


def counts(generations: Sequence[Generation]) -> Row:
    """Pooled counts and ratios, and the means over prompts beside them."""
    tokens = sum(len(g.tokens) for g in generations)
    beyond = tokens - sum(g.prefill_tokens for g in generations)
    forwards = sum(g.forwards for g in generations)
    nfe = sum(g.nfe for g in generations)
    rounds = sum(len(g.rounds) for g in generations)
    own = [(len(g.tokens) - g.prefill_tokens) / len(g.rounds) for g in generations if g.rounds]
    return {
        "tau": beyond / rounds if rounds else None,
        "tau_prompt_mean": statistics.fmean(own) if own else None,
        "tpf": beyond / forwards if forwards else None,
        "tpf_with_prefill": tokens / nfe,
        "nfe": nfe,
        "nfe_prefill": nfe - forwards,
        "positions_computed": sum(g.positions_computed for g in generations),
        "tokens": tokens,
    }


def acceptance(generations: Sequence[Generation]) -> Row | None:
    """Per slot: conditional acceptance and prefix survival, over the rounds in which the slot counts."""
    rounds = [r for g in generations for r in g.rounds]
    slots = max((r.drafted for r in rounds), default=0)
    if not slots:
        return None
    conditional, survival = [], []
    for k in range(slots):
        counted = [r for r in rounds if r.valid > k]
        reached = [r for r in counted if r.accepted >= k]
        passed = sum(r.accepted > k for r in counted)
        conditional.append(passed / len(reached) if reached else None)
        survival.append(passed / len(counted) if counted else None)
    return {"conditional": conditional, "prefix_survival": survival}
