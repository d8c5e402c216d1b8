"""The embedded target, the drafter that ships, and those that the recipes train in 500 of their 1,500 steps (slow).

Taus come from batched decoding of the benchmark prompts: the same tokens as prompt by prompt, in less time.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from data.chat import PromptPolicy, prompt_ids
from data.embedded.corpus import corpus
from data.prompts import EmbeddedPrompts
from dspec.config.compose import composed, instantiate
from dspec.decoding.generation import Generation
from dspec.decoding.proposers import DraftProposer, PromptLookupProposer
from dspec.decoding.sampling import Sampling
from dspec.models.checkpoint import from_pretrained
from dspec.models.language_model import LanguageModel, embedded_target
from eval.benchmarks.base import Benchmark
from eval.rows import acceptance, counts

GREEDY, SAMPLED = Sampling(temperature=0.0, top_p=1.0), Sampling(temperature=1.0, top_p=1.0)
POLICY = PromptPolicy(system=None, thinking=False)
SHIPPED = Path(__file__).parents[1] / "dspec" / "assets" / "tiny_dspark"


def benchmarks() -> dict[str, Benchmark]:
    """Those of conf/benchmark/tiny.yaml and tiny_unseen.yaml, with more prompts."""
    counts = {"problems": 100, "problems_unseen": 60, "functions": 80}
    cfg = composed(
        "eval", ["benchmark=[tiny,tiny_unseen]", *(f"benchmark.{name}.count={n}" for name, n in counts.items())]
    )
    made: dict[str, Benchmark] = instantiate(cfg.benchmark)
    return made


def decode(target: LanguageModel, decoder: Any, benchmark: Benchmark) -> list[Generation]:
    prompts = [prompt_ids(target.tokenizer, item.prompt, POLICY) for item in benchmark.items()]
    return decoder.decode(
        prompts,
        max_new_tokens=benchmark.max_new_tokens,
        stop_ids=(target.tokenizer.eos_token_id,),
        seeds=list(range(len(prompts))),
    )


def pooled(target: LanguageModel, decoder: Any) -> list[Generation]:
    return [g for benchmark in benchmarks().values() for g in decode(target, decoder, benchmark)]


@pytest.fixture(scope="session")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of both recipes, trained side by side: half of their data, 500 steps, a small evaluation."""
    root = tmp_path_factory.mktemp("full")
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    environment = os.environ | {"DSPEC_CACHE": str(root / "cache"), "OMP_NUM_THREADS": threads}
    few = [f"benchmark.{name}.count=2" for name in ("problems", "functions")]
    args = [*few, "trainer.max_steps=500", "data.source.train={problems: 1200, functions: 500, stories: 150}"]
    runs = {recipe: root / recipe for recipe in ("dspark", "dflash")}
    command = [sys.executable, "-m", "dspec.train", *args, "callbacks.progress=null"]
    processes = [
        subprocess.Popen([*command, f"recipe={recipe}", f"hydra.run.dir={run}"], env=environment)
        for recipe, run in runs.items()
    ]
    assert [process.wait() for process in processes] == [0, 0]
    return runs


def speculative(toys: SimpleNamespace, target: LanguageModel, draft: Path, sampling: Sampling) -> Any:
    return toys.speculative(
        target=target, proposer=DraftProposer(from_pretrained(draft, target=target)), sampling=sampling
    )


@pytest.mark.slow
def test_target_solves_its_benchmarks_but_not_all(toys: SimpleNamespace, target: LanguageModel) -> None:
    greedy = toys.autoregressive(target=target, sampling=GREEDY)
    scores = {}
    for name, benchmark in benchmarks().items():
        verdicts = [
            benchmark.score(item, target.tokenizer.decode(g.tokens, skip_special_tokens=True))[benchmark.quality]
            for item, g in zip(benchmark.items(), decode(target, greedy, benchmark), strict=True)
        ]
        scores[name] = sum(verdicts) / len(verdicts)
    print(scores)
    assert 0.7 <= scores["problems"] <= 0.97
    assert 0.5 <= scores["functions"] <= 0.97
    assert scores["problems_unseen"] < scores["problems"]


@pytest.mark.slow
def test_dspark_beats_dflash_beats_nothing(
    toys: SimpleNamespace, target: LanguageModel, trained: dict[str, Path]
) -> None:
    for sampling in (GREEDY, SAMPLED):
        taus = {}
        for name, run in trained.items():
            generations = pooled(target, speculative(toys, target, run / "draft", sampling))
            taus[name] = counts(generations)["tau"]
        print(sampling, taus)
        assert taus["dspark"] > taus["dflash"] > 1.5


@pytest.mark.slow
def test_embedded_tasks_are_no_giveaway(toys: SimpleNamespace, target: LanguageModel) -> None:
    """On the drafter that ships, which had all its steps."""
    lookup = toys.speculative(
        target=target,
        proposer=PromptLookupProposer(num_drafts=7, max_ngram=3, device=torch.device("cpu")),
        sampling=GREEDY,
    )
    own = pooled(target, speculative(toys, target, SHIPPED, GREEDY))
    by_lookup = pooled(target, lookup)
    assert [g.tokens for g in by_lookup] == [g.tokens for g in own]  # lossless, whatever drafts
    assert counts(by_lookup)["tau"] < counts(own)["tau"] / 2
    slots = acceptance(own)
    assert slots is not None
    assert 0.6 <= slots["conditional"][0] <= 0.95


@pytest.mark.slow
def test_lossless_in_float64_and_nearly_so_in_float32(
    toys: SimpleNamespace, target: LanguageModel, trained: dict[str, Path]
) -> None:
    double = embedded_target(dtype="float64", device="cpu")
    some = {name: b for name, b in benchmarks().items() if name != "functions"}
    for model, allowed in ((double, 0.0), (target, 0.01)):
        pairs = [
            (a.tokens, b.tokens)
            for benchmark in some.values()
            for a, b in zip(
                decode(model, speculative(toys, model, trained["dspark"] / "draft", GREEDY), benchmark),
                decode(model, toys.autoregressive(target=model, sampling=GREEDY), benchmark),
                strict=True,
            )
        ]
        assert sum(a != b for a, b in pairs) <= allowed * len(pairs)


@pytest.mark.slow
def test_sts_does_no_harm_on_the_report_split(trained: dict[str, Path]) -> None:
    report = json.loads((trained["dspark"] / "results.json").read_text())["calibration"]
    assert report["mean_ece_after"] <= report["mean_ece_before"]
    for slot in report["slots"]:
        assert slot["auc_slot_after"] == slot["auc_slot_before"]


@pytest.mark.slow
def test_no_test_prompt_is_trained_or_calibrated_on() -> None:
    """Hashes of all benchmark prompts against every prompt that a shipped recipe trains or calibrates on."""

    def digests(texts: list[str]) -> set[str]:
        return {hashlib.sha256(text.encode()).hexdigest() for text in texts}

    pages = Path(__file__).parents[1] / "recipes"
    counts = yaml.safe_load((pages / "ar_base.yaml").read_text())["data"]["counts"]
    names = ("dspark", "dflash", "jacobi_forcing", "cllm")
    sources = [yaml.safe_load((pages / f"{name}.yaml").read_text())["data"]["source"] for name in names]
    for seed in range(3):
        made = [EmbeddedPrompts(train=s["train"], calibration=s["calibration"], seed=seed) for s in sources]
        used = [p.text for source in made for split in ("train", "calibration") for p in source.prompts(split)]
        if seed == 0:
            used += [e.prompt for e in corpus(counts=counts, split="train", seed=0)]
        tested = [item.prompt for benchmark in benchmarks().values() for item in benchmark.items()]
        assert len(digests(used)) > 2000
        assert not digests(used) & digests(tested)
    for source in made:
        calibrates = {p.text for p in source.prompts("calibration")}
        assert not calibrates & {p.text for p in source.prompts("train")}
