"""The classes of the lm-eval tasks in this folder: their rows come from $DSPEC_DATA if it is set, else the Hub.

lm-eval loads this file by its path. lm-eval itself runs no model-written code.
"""

import json
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

from data.rows import gsm8k_rows
from dspec.config.compose import composed, instantiate
from dspec.errors import UserError
from eval.benchmarks.base import Benchmark, Item
from eval.benchmarks.mbpp import lm_eval_task


class Gsm8kTask(ConfigurableTask):
    """lm-eval's gsm8k with its own filters and metric; the YAML's keys override its."""

    def __init__(self, config: dict[str, Any]) -> None:
        base = lm_eval_task("gsm8k")
        metadata = base["metadata"] | config["metadata"]
        super().__init__(config={**base, **_without_class(config), "metadata": metadata})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        rows = {split: gsm8k_rows(split) for split in ("train", "test")}
        self.dataset = DatasetDict({split: Dataset.from_list(list(data.rows)) for split, data in rows.items()})
        source = {split: {"origin": data.origin, "sha256": data.sha256} for split, data in rows.items()}
        self.config.metadata["source"] = source


class BenchmarkTask(ConfigurableTask):
    """A benchmark of eval.run as a task: its prompts, stop strings, token budget and verdicts.

    The YAML sets which one (`benchmark`, a file of conf/benchmark) with which `settings`, and names its verdicts.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        config = _without_class(config)
        name, settings = config.pop("benchmark"), config.pop("settings")
        overrides = [f"benchmark.{name}.{key}={json.dumps(value)}" for key, value in settings.items()]
        unsafe = config["metadata"].get("allow_unsafe_code", False)  # lm-eval puts model_args there
        cfg = composed("eval", [f"benchmark={name}", f"allow_unsafe_code={unsafe}", *overrides])
        benchmark: Benchmark = instantiate(cfg.benchmark[name])
        self._benchmark = benchmark

        def verdicts(doc: dict[str, Any], answers: list[str]) -> dict[str, bool]:
            return benchmark.score(Item(doc["id"], doc["prompt"]), answers[0])

        budget = {"until": list(benchmark.stop), "max_gen_toks": benchmark.max_new_tokens, "do_sample": False}
        ours = {
            "output_type": "generate_until",
            "test_split": "test",
            "num_fewshot": 0,  # worked examples are part of the prompt
            "doc_to_text": "prompt",
            "doc_to_target": "",  # known to the benchmark
            "process_results": verdicts,
            "generation_kwargs": budget,
            "metadata": config["metadata"] | {"source": benchmark.source()},
        }
        super().__init__(config={**config, **ours})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        items = [{"id": item.id, "prompt": item.prompt} for item in self._benchmark.items()]
        self.dataset = DatasetDict({"test": Dataset.from_list(items)})

    def fewshot_context(self, doc: dict[str, Any], *, apply_chat_template: bool = False, **how: Any) -> str:
        """Raises UserError if lm-eval's chat setting is not the one that the prompt is written for."""
        if apply_chat_template != self._benchmark.chat:
            add = "is a user turn: add" if self._benchmark.chat else "is completed as it stands: leave out"
            raise UserError(f"the prompt of {self.config.task} {add} --apply_chat_template")
        return str(super().fewshot_context(doc, apply_chat_template=apply_chat_template, **how))


def _without_class(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "class"}
