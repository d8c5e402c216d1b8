"""Counting, acceptance and the rows of the table."""

from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from data.chat import PromptPolicy
from dspec.decoding import factory
from dspec.decoding.base import Generation, Round
from dspec.errors import UserError
from dspec.models.target import embedded_target
from eval.benchmarks.base import Item
from eval.evaluate import Contender, Evaluation, acceptance, counts
from eval.report import table

POLICY = PromptPolicy(system=None, thinking=False)


def generation(tokens: int, rounds: Sequence[Round]) -> Generation:
    return Generation(
        list(range(tokens)), prefill_tokens=1, prefill_forwards=1, forwards=len(rounds), rounds=list(rounds)
    )


def test_counts_follow_the_definitions() -> None:
    first = generation(8, [Round(3, 3, 3), Round(3, 2, 3)])  # 1 + 4 + 3
    second = generation(3, [Round(3, 0, 3), Round(3, 0, 3)])
    got = counts([first, second])
    assert got["tau"] == got["tpf"] == (7 + 2) / 4
    assert got["tau_prompt_mean"] == (7 / 2 + 2 / 2) / 2
    assert got["tpf_with_prefill"] == 11 / 6
    assert (got["nfe"], got["nfe_prefill"], got["tokens"]) == (6, 2, 11)


def test_plain_ar_is_exactly_one() -> None:
    plain = Generation([1, 2, 3], prefill_tokens=1, prefill_forwards=1, forwards=2)
    assert counts([plain]) | {"tau": None} == counts([plain])
    assert counts([plain])["tpf"] == 1
    assert acceptance([plain]) is None


def test_acceptance_leaves_cut_slots_out() -> None:
    rounds = [Round(3, 3, 3), Round(3, 1, 3), Round(3, 1, 1), Round(3, 0, 2)]
    got = acceptance([generation(9, rounds)])
    assert got == {"conditional": [3 / 4, 1 / 2, 1.0], "prefix_survival": [3 / 4, 1 / 3, 1 / 2]}


class Echo:
    """A benchmark whose verdict is whether there was an answer."""

    quality = "answered"
    chat = True
    stop: tuple[str, ...] = ()

    def __init__(self, prompts: Sequence[str], max_new_tokens: int = 12) -> None:
        self._prompts, self.max_new_tokens = prompts, max_new_tokens

    def items(self) -> list[Item]:
        return [Item(f"echo/{i}", text) for i, text in enumerate(self._prompts)]

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        return {self.quality: bool(answer)}

    def source(self) -> dict[str, Any]:
        return {}


class Unjudged(Echo):
    """Speed and acceptance only."""

    quality = ""

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        return {}


class Raw(Echo):
    chat = False


def evaluation(floor: float, *, temperatures: Sequence[float] = (0.0, 1.0), seed: int = 0) -> Evaluation:
    return Evaluation(
        temperatures=temperatures, top_p=1.0, warmup=1, generate_prompts=2, generate_floor=floor, seed=seed
    )


def lookup(**kwargs: object) -> object:
    return factory.prompt_lookup(num_drafts=4, max_ngram=2, **kwargs)  # type: ignore[arg-type]


CONTENDERS = {
    "autoregressive": Contender(method="AR", build=factory.autoregressive),
    "lookup": Contender(method="prompt lookup", build=lookup),  # type: ignore[arg-type]
}


def test_rows_and_table() -> None:
    target = embedded_target(dtype="float32", device="cpu")
    benchmarks = {"echo": Echo(["Tom has 3 pens.", "Say one two one two one two."])}
    kwargs = {"target": target, "draft": None, "contenders": CONTENDERS, "benchmarks": benchmarks}
    stop = (target.tokenizer.eos_token_id,)
    rows, check = evaluation(0.0)(**kwargs, policy=POLICY, stop_ids=stop)  # type: ignore[arg-type]
    assert check["trusted"]
    assert [(r["method"], r["decoder"]["temperature"]) for r in rows] == [
        ("AR", 0.0), ("prompt lookup", 0.0), ("AR", 1.0), ("prompt lookup", 1.0),
    ]  # fmt: skip
    assert rows[0]["speedup"] == 1
    assert rows[1]["mismatches"] == 0
    assert rows[2]["mismatches"] is None
    assert rows[1]["tokens"] == rows[0]["tokens"]
    console = Console(width=160, record=True)
    console.print(table(rows))
    text = console.export_text()
    assert "echo (n=2)" in text
    assert "prompt lookup" in text
    other = evaluation(0.0, temperatures=[1.0], seed=5)(**kwargs, policy=POLICY, stop_ids=stop)[0]  # type: ignore[arg-type]
    assert len(other) == 2
    # a slow AR loop would make every speedup look good: then none is shown
    rows, check = evaluation(1e9, temperatures=[0.0])(**kwargs, policy=POLICY, stop_ids=stop)  # type: ignore[arg-type]
    assert not check["trusted"]
    assert all(row["speedup"] is None for row in rows)


def test_a_benchmark_without_quality_shows_none() -> None:
    target = embedded_target(dtype="float32", device="cpu")
    kwargs = {"target": target, "draft": None, "contenders": {"autoregressive": CONTENDERS["autoregressive"]}}
    kwargs |= {"benchmarks": {"talk": Unjudged(["Tom has 3 pens.", "Hello."])}, "policy": POLICY}
    rows, _ = evaluation(0.0, temperatures=[0.0])(**kwargs, stop_ids=(target.tokenizer.eos_token_id,))  # type: ignore[arg-type]
    assert (rows[0]["quality"], rows[0]["n"]) == (None, 2)
    console = Console(width=160, record=True)
    console.print(table(rows))
    assert "–" in console.export_text()


def test_bad_evaluations_are_refused_before_any_work() -> None:
    target = embedded_target(dtype="float32", device="cpu")
    only = {"lookup": CONTENDERS["lookup"]}
    for contenders, benchmark, words in (
        (only, Echo(["a"]), "autoregressive"),
        (CONTENDERS, Echo([]), "no prompts"),
        (CONTENDERS, Raw(["a"]), "eval.run"),
        (CONTENDERS, Echo(["long " * 2000]), "exceed the context"),
    ):
        with pytest.raises(UserError, match=words):
            evaluation(0.0).check(target=target, contenders=contenders, benchmarks={"e": benchmark}, policy=POLICY)
