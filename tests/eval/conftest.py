"""eval.run on the embedded target with a decoder whose answers a test writes."""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.base import Generation, Limits
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

    def decode(self: Autoregressive, prompts: Any, *, script: Mapping[str, str], seen: Answers, **how: Any) -> Any:
        tokenizer, done = self.target.tokenizer, []
        limits = Limits(**{key: value for key, value in how.items() if key != "seeds"})
        for ids in prompts:
            text = tokenizer.decode(ids)
            answer = next(script[prompt] for prompt in sorted(script, key=len, reverse=True) if prompt in text)
            generation = Generation(prefill_tokens=1, prefill_forwards=1)
            generation.emit([*tokenizer(answer)["input_ids"], limits.stop_ids[0]], limits)
            generation.forwards = len(generation.tokens) - 1
            seen[tuple(ids)] = generation.tokens
            done.append(generation)
        return done

    def call(script: Mapping[str, str]) -> Answers:
        seen: Answers = {}
        monkeypatch.setattr(LanguageModel, "max_positions", 1 << 20)
        monkeypatch.setattr(Autoregressive, "decode", functools.partialmethod(decode, script=script, seen=seen))
        return seen

    return call
