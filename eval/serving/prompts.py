"""What is served: the prompts of benchmarks as requests, each with its benchmark's name as its domain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data.chat import PromptPolicy
from dspec.decoding.generation import Request
from dspec.decoding.sampling import Sampling
from dspec.decoding.stopping import StopStrings
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from dspec.seeding import prompt_seed
from eval.benchmarks.base import Benchmark, Item
from eval.prompts import encode


@dataclass(frozen=True)
class ServedPrompt:
    id: str
    domain: str
    request: Request


def left_to_right(benchmarks: Mapping[str, Benchmark], *, limit: int | None) -> list[tuple[str, Benchmark, Item]]:
    """At most `limit` items of each benchmark, as many of each, in turn: any stretch of them has the same mixture.
    Raises UserError where there is none, one that has holes to fill, or for limit < 1."""
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} must be at least 1 (null: all prompts)")
    queues = {name: list(benchmark.items()[:limit]) for name, benchmark in benchmarks.items()}
    if any(item.infills for items in queues.values() for item in items):
        raise UserError(
            "an engine serves text from left to right, it fills no holes: use benchmark=tiny or another one"
        )
    count = min(map(len, queues.values()), default=0)
    if not count:
        raise UserError("there are no prompts to serve: choose a benchmark that has some")
    return [(name, benchmarks[name], items[i]) for i in range(count) for name, items in queues.items()]


def served_prompts(
    items: Sequence[tuple[str, Benchmark, Item]],
    *,
    target: LanguageModel,
    policy: PromptPolicy,
    sampling: Sampling,
    seed: int,
    use: str,
) -> list[ServedPrompt]:
    """Requests for the items. Seeds depend on `seed`, the item and `use`: answers recorded are not those timed."""
    prompts = []
    for domain, benchmark, item in items:
        encoded = encode(target.tokenizer, benchmark, item, policy)
        stop = StopStrings(target.tokenizer, benchmark.stop) if benchmark.stop else None
        item_seed = prompt_seed(seed, f"{use}/{item.id}")
        request = encoded.request(sampling=sampling, seed=item_seed, stop_ids=target.stop_ids, stop=stop)
        prompts.append(ServedPrompt(item.id, domain, request))
    return prompts
