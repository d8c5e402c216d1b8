"""Every benchmark that ships builds from its YAML and keeps the protocol."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspec.config import CONF, instantiate
from eval.benchmarks.base import Benchmark, Item

FILES = sorted((CONF / "benchmark").glob("*.yaml"))
NEEDS = {
    "math": "math_verify",
    "math500": "math_verify",
    "mbpp": "lm_eval",
    "humanevalplus": "evalplus",
    "mbppplus": "evalplus",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_benchmark_builds(path: Path, shared: Path, judge: Any) -> None:
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    text = path.read_text()
    assert text.startswith("# ")
    for name, node in yaml.safe_load(text).items():
        benchmark: Benchmark = instantiate(node | ({"judge": judge} if "judge" in node else {}))
        items, source = benchmark.items(), benchmark.source()
        assert len({item.id for item in items}) == len(items) == source["rows"] > 20
        assert all(item.prompt.strip() for item in items)
        assert set(source) >= {"origin", "sha256", "rows", "prompt"}
        json.dumps(source)
        verdicts = benchmark.score(Item(items[0].id, items[0].prompt), "no idea")
        assert not any(verdicts.values())
        assert (benchmark.quality in verdicts) == (name != "mt_bench")
        assert all(isinstance(stop, str) and stop for stop in benchmark.stop)
