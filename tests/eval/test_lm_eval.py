"""lm-eval's command line with our decoders: prompts, generations and scores of eval.run, and the model's methods."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspec.config.compose import composed, instantiate
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.speculative import Speculative
from dspec.decoding.state import Row, State
from eval import lm_eval as command
from eval.sandbox.sandbox import available_layers


@pytest.fixture(autouse=True)
def _our_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval reads its ten thousand task files at every start."""
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", functools.partial(tasks.TaskManager, include_defaults=False))


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Runs the command line; gives its results and, by task, its samples in the order of the data."""

    def call(*args: str) -> SimpleNamespace:
        out = ["--output_path", str(tmp_path / "lm"), "--log_samples"]
        monkeypatch.setattr(sys, "argv", ["eval.lm_eval", "--model", "dspec", *args, *out])
        command.main()
        (path,) = (tmp_path / "lm").rglob("results_*.json")
        samples = {p.name.removeprefix("samples_").rsplit("_", 1)[0]: p for p in path.parent.glob("samples_*.jsonl")}
        read = {task: [json.loads(line) for line in p.read_text().splitlines()] for task, p in samples.items()}
        ordered = {task: sorted(rows, key=lambda row: row["doc_id"]) for task, rows in read.items()}
        return SimpleNamespace(**json.loads(path.read_text()), samples=ordered)

    return call


def written_by(benchmark: str, i: int, row: dict[str, Any]) -> str:
    """Answers that are right, wrong, or right for one verdict and wrong for another, in turn."""
    if benchmark.startswith("gsm8k"):
        number = row["answer"].rsplit("#### ", 1)[1]
        right = f" {row['answer']}\n\nQuestion: Another?\nAnswer: #### 1"  # stop strings cut the tail
        return [right, f" It is ${number}.", " #### 1234567", f" #### {number}\nor 77", " Who knows?"][i % 5]
    if benchmark == "math500":
        other = f" \\boxed{{\\frac{{{row['answer']}}}{{1}}}}"
        return [f" {row['solution']}\n\nProblem:\n\\boxed{{7}}", other, " \\boxed{-12345}", " Who knows?"][i % 4]
    code = row["canonical_solution"] if benchmark == "humaneval" else row["code"]
    tail = "\nprint(1)" if benchmark == "humaneval" else "\n[DONE]\nnever ("
    return [code + tail, "    return None\n", "while True\n"][i % 3]


def script(benchmark: str, *settings: str) -> dict[str, str]:
    """What `written_by` answers to the first prompts of a benchmark."""
    made = instantiate(composed("eval", [f"benchmark={benchmark}", *settings]).benchmark[benchmark])
    return {item.prompt: written_by(benchmark, i, made._rows[item.id]) for i, item in enumerate(made.items()[:20])}


def agree(theirs: SimpleNamespace, task: str, found: SimpleNamespace, metrics: dict[str, tuple[str, str]]) -> None:
    """Texts and verdicts sample by sample, and the scores; `metrics`: our verdict -> lm-eval's metric and filter."""
    for name, (metric, filter_) in metrics.items():
        rows = [row for row in theirs.samples[task] if row["filter"] == filter_]
        assert [row["resps"] for row in rows] == [[[sample["text"]]] for sample in found.samples]
        verdicts = [bool(row[metric]) for row in rows]
        assert verdicts == [sample["verdicts"][name] for sample in found.samples]
        assert set(verdicts) == {True, False}, f"answers that do not tell {name} apart"
        assert len({tuple(s["verdicts"].values()) for s in found.samples}) > len(metrics), "verdicts that always agree"
        assert theirs.results[task][f"{metric},{filter_}"] == pytest.approx(found.rows[0]["verdicts"][name], abs=1e-12)


GSM8K = {
    "strict exact match": ("exact_match", "strict-match"),
    "flexible exact match": ("exact_match", "flexible-extract"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chat", "flags"), [("false", []), ("true", ["--apply_chat_template", "--fewshot_as_multiturn", "false"])]
)
def test_gsm8k_is_eval_runs(
    real_data: Path, lm_eval: Any, eval_run: Any, scripted: Any, chat: str, flags: list[str]
) -> None:
    settings = [f"benchmark.gsm8k_4shot.chat={chat}"]
    seen = scripted(script("gsm8k_4shot", *settings))
    found = eval_run("benchmark=gsm8k_4shot", "limit=6", *settings)
    in_run = dict(seen)
    seen.clear()
    theirs = lm_eval("--model_args", "target=tiny", "--tasks", "dspec_gsm8k", "--limit", "6", *flags)
    assert (len(seen), seen) == (6, in_run)
    assert [s["tokens"] for s in found.samples] == list(in_run.values())
    agree(theirs, "dspec_gsm8k", found, GSM8K)


TASKS = {
    "gsm8k_zeroshot": ("gsm8k", [], ["flexible exact match", "strict exact match"]),
    "math500": (
        "math500",
        ["benchmark.math500.shots=4", "benchmark.math500.chat=false"],
        ["equivalent", "exact match"],
    ),
    "humaneval": ("humaneval", [], ["pass@1"]),
    "mbpp": ("mbpp", [], ["pass@1"]),
}


@pytest.mark.parametrize(
    "task", ["gsm8k_zeroshot", "humaneval", "mbpp", pytest.param("math500", marks=pytest.mark.slow)]
)
def test_tasks_are_eval_runs_benchmarks(real_data: Path, lm_eval: Any, eval_run: Any, scripted: Any, task: str) -> None:
    benchmark, settings, verdicts = TASKS[task]
    if task in ("humaneval", "mbpp") and "landlock" not in available_layers():
        pytest.skip("no Landlock")
    seen, name = scripted(script(benchmark, *settings)), f"dspec_{task}"
    found = eval_run(f"benchmark={benchmark}", "limit=5", *settings)
    in_run = dict(seen)
    seen.clear()
    flags = ["--apply_chat_template"] if task == "gsm8k_zeroshot" else []
    theirs = lm_eval("--model_args", "target=tiny", "--tasks", name, "--limit", "5", *flags)
    assert (len(seen), seen) == (5, in_run)
    agree(theirs, name, found, {verdict: (verdict, "none") for verdict in verdicts})
    source = found.run["benchmarks"][benchmark]  # data, checksum, and the sandbox's level
    kept = theirs.configs[name]["metadata"]["source"]
    assert kept | {"rows": 5} == source  # lm-eval's --limit comes later
    assert kept["rows"] == kept["rows_in_file"]
    assert ("sandbox" in kept) == (task in ("humaneval", "mbpp"))


def test_lm_evals_own_prompt_and_stops(real_data: Path) -> None:
    """What the tasks' comments say they share with lm-eval's."""
    from eval.benchmarks.mbpp import lm_eval_task

    for name in ("humaneval", "mbpp"):
        benchmark = instantiate(composed("eval", [f"benchmark={name}"]).benchmark[name])
        assert list(benchmark.stop) == lm_eval_task(name)["generation_kwargs"]["until"]
    assert lm_eval_task("humaneval")["doc_to_text"] == "{{prompt}}"


@pytest.mark.slow
def test_counts_are_eval_runs(real_data: Path, lm_eval: Any, eval_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real decoder on the real model: the same tokens, and tpf, tau and nfe in lm-eval's results."""
    started: list[Row] = []
    start = Speculative.start

    def spy(self: Speculative, requests: Any) -> State:
        state = start(self, requests)
        started.extend(state.rows)
        return state

    settings = ["benchmark.gsm8k_4shot.shots=1", "benchmark.gsm8k_4shot.chat=false"]
    monkeypatch.setattr(Speculative, "start", spy)
    found = eval_run(
        "benchmark=gsm8k_4shot",
        "decoder=prompt_lookup",
        "limit=2",
        "benchmark.gsm8k_4shot.max_new_tokens=24",
        *settings,
    )
    in_run = {tuple(row.request.ids): row.generation.tokens for row in started}
    started.clear()
    theirs = lm_eval(
        *("--model_args", "target=tiny,decoder=prompt_lookup", "--tasks", "dspec_gsm8k"),
        *("--num_fewshot", "1", "--limit", "2", "--gen_kwargs", "max_gen_toks=24"),
    )
    in_lm_eval = {tuple(row.request.ids): row.generation.tokens for row in started}
    assert (len(started), in_lm_eval) == (2, in_run)
    (row,) = (row for row in found.rows if row["method"] == "prompt lookup")
    kept = theirs.config["dspec"]["tasks"]["dspec_gsm8k"]
    assert kept == {key: row[key] for key in kept}
    assert {"n", "tpf", "tau", "nfe", "tokens", "acceptance"} <= set(kept)
    assert kept["nfe"] < kept["tokens"]  # some drafts were accepted: the counts could differ from plain AR's
    assert theirs.config["dspec"]["decoder"]["method"] == "prompt lookup"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model_args", "checkpoint=/no/checkpoint"], ["no checkpoint at /no/checkpoint"]),
        (["--model_args", "target=tiny,decoder=nope"], ["decoder/nope", "prompt_lookup"]),
        (["--model_args", "target=tiny,decoder=speculative"], ["drafter"]),
        (["--model_args", "target=tiny,foo=1"], ["foo"]),
        (["--model_args", "target=tiny,limit=3"], ["limit", "--limit"]),
        (["--model_args", "target=tiny", "--batch_size", "auto"], ["batch_size=auto"]),
        (["--model_args", "target=tiny"], ["no data file", "/no/data/gsm8k_train.jsonl"]),
        (["--model_args", "target=tiny", "--tasks", "dspec_gsm9k"], ["dspec_gsm9k", "ls tasks"]),
        (["--model_args", "target=tiny", "--tasks", "dspec_humaneval"], ["/no/data/humaneval.jsonl"]),
        (["--model_args", "target=tiny", "--log_samples"], ["--output_path"]),
        (["--model_args", "target=tiny", "--device", "cuda"], ["--device", "target.device"]),
        (["--model_args", "target=tiny,sed=1"], ["sed", "did you mean seed?"]),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    monkeypatch.setenv("DSPEC_DATA", "/no/data")
    tasks = [] if "--tasks" in args else ["--tasks", "dspec_gsm8k"]
    refused(monkeypatch, capsys, ["--model", "dspec", *args, *tasks], words)


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.lm_eval", *args])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert all(word in error[0] for word in words), error[0]


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused(monkeypatch, capsys, ["--model", "dspec"], ["pip install", "[lm-eval]"])


@pytest.mark.parametrize(
    ("task", "flags", "words"),
    [("gsm8k_zeroshot", [], ["add --apply"]), ("mbpp", ["--apply_chat_template"], ["leave out --apply"])],
)
def test_chat_prompts_are_chat_and_raw_ones_raw(
    real_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str, flags: list[str],
    words: list[str],
) -> None:  # fmt: skip
    args = ["--model", "dspec", "--model_args", "target=tiny", "--tasks", f"dspec_{task}", "--limit", "1", *flags]
    refused(monkeypatch, capsys, args, [f"dspec_{task}", *words])


@pytest.mark.slow
def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, real_data: Path) -> None:
    """A ValueError that is not about lm-eval's arguments is a fault of ours, not of the user's."""

    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(Autoregressive, "start", broken)
    args = ["--model", "dspec", "--model_args", "target=tiny", "--tasks", "dspec_humaneval", "--limit", "1"]
    monkeypatch.setattr(sys, "argv", ["eval.lm_eval", *args])
    with pytest.raises(ValueError, match="a fault"):
        command.main()


def test_a_task_of_lm_evals_own_without_a_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval._cli import HarnessCLI

    def offline(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(HarnessCLI, "execute", offline)
    args = ["--model", "dspec", "--model_args", "target=tiny", "--tasks", "gsm8k"]
    refused(monkeypatch, capsys, args, ["openai/gsm8k", "dspec_gsm8k", "DSPEC_DATA"])


@pytest.mark.slow
def test_as_a_program(real_data: Path, tmp_path: Path) -> None:
    """The whole command line in its own process, lm-eval's own tasks indexed beside ours."""
    args = [
        "--model",
        "dspec",
        "--model_args",
        "target=tiny,decoder=prompt_lookup",
        "--tasks",
        "dspec_humaneval,dspec_gsm8k",
    ]
    few = ["--limit", "1", "--num_fewshot", "1", "--gen_kwargs", "max_gen_toks=4", "--output_path", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "eval.lm_eval", *args, *few], capture_output=True, text=True, check=True
    )
    assert "dspec_humaneval" in done.stdout
    (path,) = tmp_path.rglob("results_*.json")
    found = json.loads(path.read_text())
    assert set(found["results"]) == set(found["config"]["dspec"]["tasks"]) == {"dspec_humaneval", "dspec_gsm8k"}
