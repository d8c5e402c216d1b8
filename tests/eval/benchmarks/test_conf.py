"""Every benchmark that ships builds from its YAML and keeps the protocol; how many prompts it asks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspec.config.compose import CONF, composed, instantiate
from eval.benchmarks.base import Benchmark, Item

# ROCStories is the user's own file: test_text_infilling.py; nothing is decoded in the others: tests/eval/test_score.py
ELSEWHERE = ("stories_infilling", "lambada", "hellaswag")
FILES = sorted(path for path in (CONF / "benchmark").glob("*.yaml") if path.stem not in ELSEWHERE)
SCORED = ("wikitext_95", "stories_95", "stories_40", "fables_1of5", "fables_3of5")  # without verdicts
NEEDS = {
    "math": "math_verify",
    "math500": "math_verify",
    "mbpp": "lm_eval",
    "humanevalplus": "evalplus",
    "mbppplus": "evalplus",
    "fables_infilling": "rouge_score",
}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_benchmark_builds(
    path: Path, real_data: Path, judge: Any, tmp_path: Path, write: Callable[..., None]
) -> None:
    write(tmp_path / "my.jsonl", *({"prompt": f"q{i}", "answer": i} for i in range(21)))
    own = [f"benchmark.jsonl.path={tmp_path}/my.jsonl"] if path.stem == "jsonl" else []
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    assert path.read_text().startswith("# ")
    for name, node in composed("eval", [f"benchmark={path.stem}", *own]).benchmark.items():
        benchmark: Benchmark = instantiate(node, **({"judge": judge} if "judge" in node else {}))
        items, source = benchmark.items(), benchmark.source()
        assert len({item.id for item in items}) == len(items) == source["rows"] > 20
        assert all(item.prompt.strip() or item.response or item.parts for item in items)
        assert set(source) >= {"origin", "sha256", "rows", "prompt"}
        json.dumps(source)
        verdicts = benchmark.score(Item(items[0].id, items[0].prompt), "no idea")
        assert not any(verdicts.values())
        assert (benchmark.quality in verdicts) == (name not in ("mt_bench", "stories", *SCORED))
        assert all(isinstance(stop, str) and stop for stop in benchmark.stop)


def test_both_embedded_benchmarks_run_functions_under_the_same_limits() -> None:
    """They are written twice: an include would be one more file that each recipe is composed from."""
    judges = [
        composed("eval", [f"benchmark={name}"]).benchmark[functions].judge
        for name, functions in (("tiny", "functions"), ("tiny_infilling", "filled_functions"))
    ]
    assert judges[0] == judges[1]


@pytest.mark.parametrize(
    ("base", "overrides", "count"),
    [
        ("eval", [], 100),
        ("eval", ["limit=500"], 500),
        ("eval", ["limit=12"], 12),
        ("eval", ["evaluation.limit=500"], 500),
        ("eval", ["benchmark.gsm8k.limit=12"], 12),
        ("eval", ["benchmark.gsm8k.limit=700"], 700),
        ("eval", ["benchmark.gsm8k.limit=null"], 1319),
        ("eval", ["limit=9999"], 1319),
        ("speed", ["limit=500"], 500),
        ("search", ["limit=500"], 500),
        ("train", [], 100),
        ("train", ["evaluation.limit=500"], 500),
        ("train", ["benchmark.gsm8k.limit=5"], 5),
    ],
)
def test_the_limit_is_what_was_said(
    folder: Path, write: Callable[..., None], base: str, overrides: list[str], count: int
) -> None:
    write(folder / "gsm8k_test.jsonl", *({"question": f"q{i}", "answer": f"#### {i}"} for i in range(1319)))
    cfg = composed(base, ["benchmark=gsm8k", *overrides])
    asked = instantiate(cfg.benchmark.gsm8k).items()
    said = cfg.evaluation.limit if "evaluation" in cfg else cfg.limit
    assert len(asked[:said]) == count  # which is what eval/evaluate.py and eval/search.py take
    assert [item.id for item in asked[:3]] == ["gsm8k/test/00000", "gsm8k/test/00001", "gsm8k/test/00002"]


@pytest.mark.slow
def test_a_run_evaluates_as_many_as_the_limit_says(
    folder: Path, write: Callable[..., None], eval_run: Any, scripted: Any
) -> None:
    write(folder / "gsm8k_test.jsonl", *({"question": f"q{i}", "answer": f"#### {i}"} for i in range(520)))
    scripted({"q": "1"})
    found = eval_run("benchmark=gsm8k", "limit=500")
    assert len({sample["id"] for sample in found.samples}) == found.rows[0]["n"] == 500
    assert found.run["benchmarks"]["gsm8k"]["rows"] == 500


def test_a_seed_draws_as_many_as_the_limit_says(folder: Path, write: Callable[..., None]) -> None:
    write(folder / "gsm8k_test.jsonl", *({"question": f"q{i}", "answer": f"#### {i}"} for i in range(300)))
    cfg = composed("eval", ["benchmark=gsm8k", "limit=9", "benchmark.gsm8k.seed=1"])
    asked = instantiate(cfg.benchmark.gsm8k).items()
    assert len(asked) == 9
    assert asked[-1].id > "gsm8k/test/00100"
