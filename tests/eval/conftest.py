"""eval.run on the embedded target with a decoder whose answers a test writes."""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Pass, Request
from dspec.decoding.sampling import Streams
from dspec.decoding.state import Row, State
from dspec.models.cache import PositionCache
from dspec.models.language_model import LanguageModel
from eval.run import main

Answers = dict[tuple[int, ...], list[int]]  # prompt ids -> generated ids


@pytest.fixture
def eval_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Runs `python -m eval.run target=tiny` once, greedily; gives results.json and, in their order, the samples."""
    monkeypatch.setattr("eval.gate._generate", lambda *_: 8)  # it only times

    def call(*args: str) -> SimpleNamespace:
        quick = ["evaluation.temperatures=[0.0]", "evaluation.generate_prompts=1", "evaluation.warmup=0"]
        where = f"hydra.run.dir={tmp_path / 'run'}"
        monkeypatch.setattr(sys, "argv", ["eval.run", "target=tiny", *args, *quick, where])
        main()
        _, *samples = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
        return SimpleNamespace(**json.loads((tmp_path / "run" / "results.json").read_text()), samples=samples)

    return call


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], Answers]:
    """Plain AR then gives to each prompt (a text that occurs in it) its answer, in a context of any length.

    The prompts and tokens of every call go to the mapping that comes back.
    """

    def start(self: Autoregressive, asked: Sequence[Request], *, script: Mapping[str, str], seen: Answers) -> State:
        tokenizer, rows = self.target.tokenizer, []
        for request in asked:
            text = tokenizer.decode(request.ids)
            answer = next(script[prompt] for prompt in sorted(script, key=len, reverse=True) if prompt in text)
            row = Row(request, list(request.ids), Generation())
            row.commit([*tokenizer(answer)["input_ids"], request.stop_ids[0]])
            decoded = [Pass("decode", 1)] * (len(row.generation.tokens) - 1)
            row.generation.passes = [Pass("prefill", 1), *decoded]
            seen[tuple(request.ids)] = row.generation.tokens
            rows.append(row)
        return State(rows, PositionCache(0), Streams([0] * len(rows), self.target.device))

    def call(script: Mapping[str, str]) -> Answers:
        seen: Answers = {}
        monkeypatch.setattr(LanguageModel, "max_positions", 1 << 20)
        monkeypatch.setattr(Autoregressive, "start", functools.partialmethod(start, script=script, seen=seen))
        return seen

    return call
