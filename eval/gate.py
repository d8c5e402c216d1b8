"""Checks that our AR loop keeps up with transformers' own generate; otherwise speedups over it would be inflated.

Both decode the same batches greedily, alternating, at the batch size of the evaluation, until the interval of the
median ratio lies on one side of the floor.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import make_requests
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY
from dspec.models.language_model import LanguageModel, require_causal
from dspec.models.target_model import TargetModel
from eval.intervals import median_interval


def timed(target: TargetModel, work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `work` and its seconds; synchronises CUDA."""
    _synchronise(target)
    start = time.perf_counter()
    result = work()
    _synchronise(target)
    return result, time.perf_counter() - start


def _synchronise(target: TargetModel) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def against_generate(
    target: TargetModel,
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    most: int,
    floor: float,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Ratio of our AR loop's tokens per second to those of transformers' generate: the median over at most `most`
    batches (cycling through them if there are fewer), its 95 % interval, and whether it reaches `floor`. `trusted` is
    None if `most` is 0 and nothing was measured. `tick` is called after each batch."""
    ratios: list[float] = []
    interval: list[float] | None = None
    if most:
        model = require_causal(target)
        batches = [list(prompts[i : i + batch_size]) for i in range(0, len(prompts), batch_size)]
        _ratio(model, batches[0], max_new_tokens, stop_ids, ours_first=True)
        for number, batch in enumerate(itertools.islice(itertools.cycle(batches), most)):
            ratios.append(_ratio(model, batch, max_new_tokens, stop_ids, ours_first=number % 2 == 0))
            tick()
            interval = median_interval(ratios)
            if interval is not None and not interval[0] < floor <= interval[1]:
                break
    ratio = statistics.median(ratios) if ratios else None
    return {
        "ar_over_generate": ratio,
        "interval_95": interval,
        "batches": len(ratios),
        "batch_size": batch_size,
        "floor": floor,
        "trusted": None if ratio is None else ratio >= floor,
    }


def _ratio(
    target: LanguageModel, batch: Sequence[list[int]], max_new_tokens: int, stop_ids: Sequence[int], *, ours_first: bool
) -> float:
    requests = make_requests(
        batch, seeds=[0] * len(batch), sampling=GREEDY, max_new_tokens=max_new_tokens, stop_ids=stop_ids
    )

    def ours() -> int:
        return sum(len(g.tokens) for g in decode(Autoregressive(target=target), requests))

    def theirs() -> int:
        return _generate(target, batch, max_new_tokens, stop_ids)

    speeds = {}
    for work in (ours, theirs) if ours_first else (theirs, ours):
        tokens, seconds = timed(target, work)
        speeds[work] = tokens / seconds
    return speeds[ours] / speeds[theirs]


def _generate(target: LanguageModel, batch: Sequence[list[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> int:
    """Number of tokens, up to and including each row's first stop, from transformers' own greedy generate."""
    return sum(map(len, generated(target, batch, max_new_tokens, stop_ids)))


def generated(
    target: LanguageModel, batch: Sequence[list[int]], max_new_tokens: int, stop_ids: Sequence[int]
) -> list[list[int]]:
    """The answers of transformers' own greedy generate to a left-padded batch."""
    width = max(map(len, batch))
    pad = stop_ids[0] if stop_ids else 0
    padded = [[pad] * (width - len(ids)) + ids for ids in batch]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in batch]
    output = target.model.generate(
        torch.tensor(padded, device=target.device),
        attention_mask=torch.tensor(mask, device=target.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad,
    )
    answers = output[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in answers]
    return [row[:end] for row, end in zip(answers, ends, strict=True)]
