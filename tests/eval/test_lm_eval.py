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
import torch

from dspec.config import composed, instantiate
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.base import Generation
from dspec.decoding.speculative import Speculative
from dspec.errors import UserError
from eval import lm_eval as command
from eval.sandbox import available_layers

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def _our_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval reads its ten thousand task files at every start."""
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", functools.partial(tasks.TaskManager, include_defaults=False))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    if not SHARED.is_dir():
        pytest.skip("no ../shared")
    monkeypatch.setenv("DSPEC_DATA", str(SHARED))


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


@pytest.mark.parametrize(
    ("chat", "flags"), [("false", []), ("true", ["--apply_chat_template", "--fewshot_as_multiturn", "false"])]
)
def test_gsm8k_is_eval_runs(
    shared: None, lm_eval: Any, eval_run: Any, scripted: Any, chat: str, flags: list[str]
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
def test_tasks_are_eval_runs_benchmarks(shared: None, lm_eval: Any, eval_run: Any, scripted: Any, task: str) -> None:
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
    assert kept == source | ({"rows": 1319} if benchmark == "gsm8k" else {})  # eval.run stops at its 100
    assert ("sandbox" in kept) == (task in ("humaneval", "mbpp"))


def test_lm_evals_own_prompt_and_stops(shared: None) -> None:
    """What the tasks' comments say they share with lm-eval's."""
    from eval.benchmarks.mbpp import lm_eval_task

    for name in ("humaneval", "mbpp"):
        benchmark = instantiate(composed("eval", [f"benchmark={name}"]).benchmark[name])
        assert list(benchmark.stop) == lm_eval_task(name)["generation_kwargs"]["until"]
    assert lm_eval_task("humaneval")["doc_to_text"] == "{{prompt}}"


def test_counts_are_eval_runs(shared: None, lm_eval: Any, eval_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real decoder on the real model: the same tokens, and tpf, tau and nfe in lm-eval's results."""
    decode, tokens = Speculative.decode, []

    def spy(self: Speculative, prompts: Any, **how: Any) -> list[Generation]:
        done = decode(self, prompts, **how)
        tokens.extend((tuple(ids), g.tokens) for ids, g in zip(prompts, done, strict=True))
        return done

    settings = ["benchmark.gsm8k_4shot.shots=1", "benchmark.gsm8k_4shot.chat=false"]
    monkeypatch.setattr(Speculative, "decode", spy)
    found = eval_run(
        "benchmark=gsm8k_4shot",
        "decoder=prompt_lookup",
        "limit=2",
        "benchmark.gsm8k_4shot.max_new_tokens=24",
        *settings,
    )
    in_run = dict(tokens)
    tokens.clear()
    theirs = lm_eval(
        *("--model_args", "target=tiny,decoder=prompt_lookup", "--tasks", "dspec_gsm8k"),
        *("--num_fewshot", "1", "--limit", "2", "--gen_kwargs", "max_gen_toks=24"),
    )
    assert (len(tokens), dict(tokens)) == (2, in_run)
    (row,) = (row for row in found.rows if row["method"] == "prompt lookup")
    kept = theirs.config["dspec"]["tasks"]["dspec_gsm8k"]
    assert kept == {key: row[key] for key in kept}
    assert {"n", "tpf", "tau", "nfe", "tokens", "acceptance"} <= set(kept)
    assert kept["nfe"] < kept["tokens"]  # some drafts were accepted: the counts could differ from plain AR's
    assert theirs.config["dspec"]["decoder"]["method"] == "prompt lookup"


WINDOW = 24


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The embedded target in fp64 as lm-eval's model, with a context of 24 tokens where a test asks for it."""
    from eval.lm_model import DspecLM

    return DspecLM(**{"target": "tiny", "target.dtype": "float64", "batch_size": 2})


def request(kind: str, *arguments: Any, task: str = "t") -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=(task, 0, 1))


def naive(lm: Any, context: list[int], scored: list[int]) -> tuple[float, bool]:
    """One forward of transformers' own model a token, on the last WINDOW tokens before the last one scored."""
    total, greedy = 0.0, True
    whole = [*context, *scored]
    start = max(0, len(whole) - 1 - lm.max_length)
    for i in range(len(context), len(whole)):
        with torch.no_grad():
            law = lm.target.model(torch.tensor([whole[start:i]])).logits[0, -1].double().log_softmax(-1)
        total += float(law[whole[i]])
        greedy &= int(law.argmax()) == whole[i]
    return total, greedy


def test_loglikelihood(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = lm.tokenizer
    story = "Tom has 4 apples and buys 3 more. He eats 2 of them. How many apples are left? "
    ids = tokenizer(story)["input_ids"]
    (written,) = lm.generate_until([request("generate_until", story, {"until": [], "max_gen_toks": 6})])
    assert written
    pairs = [("A fox", " ran away"), ("", "A fox ran away"), ("A fox ", "ran"), (story * 3, "Five."), (story, written)]
    found = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    expected = []
    for context, continuation in pairs:
        kept = context.rstrip()
        before = tokenizer(kept)["input_ids"] if kept else [lm.prefix_token_id]
        after = tokenizer(context + continuation)["input_ids"][len(before) if kept else 0 :]
        expected.append(naive(lm, before, after))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-9)
    monkeypatch.setattr(lm.target.model.config, "max_position_embeddings", WINDOW)
    assert len(ids) > WINDOW  # the context is cut on the left
    (cut,) = lm._loglikelihood_tokens([(None, ids, ids[:5])])
    assert cut == pytest.approx(naive(lm, ids, ids[:5]), abs=1e-9)
    assert abs(cut[0] - naive(lm, ids[1:][-WINDOW + 5 :], ids[:5])[0]) > 1e-6  # one token less of context is seen
    with pytest.raises(UserError, match="do not fit"):
        lm._loglikelihood_tokens([(None, ids[:1], ids[: WINDOW + 1])])


def test_is_greedy(lm: Any) -> None:
    prompt = lm.tokenizer("Once upon a time")["input_ids"]
    lm.generate_until([request("generate_until", "Once upon a time", {"until": [], "max_gen_toks": 5})])
    best = lm._generations["t"][0].tokens
    ((value, greedy),) = lm._loglikelihood_tokens([(None, prompt, best)])
    assert greedy
    for i in range(len(best)):  # one token off anywhere
        other = [*best[:i], (best[i] + 1) % lm.target.vocab_size, *best[i + 1 :]]
        ((worse, greedy),) = lm._loglikelihood_tokens([(None, prompt, other)])
        assert not greedy
        assert worse != value


@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 7])
def test_loglikelihood_rolling(lm: Any, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Every token is scored once; a window holds WINDOW inputs, the last one reaches back as far as it can."""
    monkeypatch.setattr(lm.target.model.config, "max_position_embeddings", WINDOW)
    text = "The lion and the mouse were walking by the river when a hunter came, and the mouse ran into the grass. " * 4
    ids = lm.tokenizer(text)["input_ids"][:tokens]
    text = lm.tokenizer.decode(ids)
    assert lm.tok_encode(text, add_special_tokens=False) == ids
    expected = 0.0
    for i in range(tokens):
        end = min((i // WINDOW + 1) * WINDOW, tokens)
        context = [lm.prefix_token_id, *ids[:i]] if i < WINDOW else ids[end - WINDOW - 1 : i]
        expected += naive(lm, context, [ids[i]])[0]
    ((found),) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    assert found == pytest.approx(expected, abs=1e-8)


def test_stop_strings_cut_text_and_tokens_alike(lm: Any) -> None:
    prompts = ["Tom has 4 apples and buys 3 more. How many has he?", "Write a function that adds two numbers."]
    free = lm.generate_until([request("generate_until", p, {"until": [], "max_gen_toks": 40}) for p in prompts])
    lm._generations.clear()
    for prompt, text in zip(prompts, free, strict=True):
        stop = text[len(text) // 2 :][:4]
        until = ["never in it", stop]
        (cut,) = lm.generate_until([request("generate_until", prompt, {"until": until, "max_gen_toks": 40})])
        assert cut == text[: text.index(stop)]
        (generation,) = lm._generations.pop("t")
        assert stop in lm.tokenizer.decode(generation.tokens)
        assert stop not in lm.tokenizer.decode(generation.tokens[:-1])
        assert generation.stopped


def test_order_batches_and_settings(lm: Any) -> None:
    """Answers come in the order asked whatever the batches; each request has its own budget and stop strings."""
    asked = [
        request("generate_until", "The fox said: " * n, {"until": until, "max_gen_toks": budget}, task=task)
        for n, until, budget, task in [
            (3, [], 6, "a"),
            (1, ["e"], 9, "b"),
            (2, [], 6, "a"),
            (1, [], 6, "b"),
            (4, "o", 9, "b"),
        ]
    ]
    together = lm.generate_until(asked)
    assert {task: len(done) for task, done in lm._generations.items()} == {"a": 2, "b": 3}
    assert together == [text for one in asked for text in lm.generate_until([one])]
    assert len(set(together)) > 2


def test_long_prompts_lose_their_beginning(
    lm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As lm-eval has it: the answer's budget stays whole."""
    monkeypatch.setattr(lm.target.model.config, "max_position_embeddings", WINDOW)
    text = "The lion and the mouse were walking by the river when a hunter came, and the mouse ran into the grass."
    how = {"until": [], "max_gen_toks": 4}
    end = lm.tokenizer.decode(lm.tokenizer(text)["input_ids"][-(WINDOW - 4) :])
    assert lm.tok_encode(end) == lm.tok_encode(text)[-(WINDOW - 4) :]
    assert lm.generate_until([request("generate_until", end, how)]) != [""]
    assert not caplog.records
    lm.generate_until([request("generate_until", text, how)])
    first, second = lm._generations["t"]
    assert (first.tokens, len(caplog.records)) == (second.tokens, 1)
    with pytest.raises(UserError, match="leaves no room"):
        lm.generate_until([request("generate_until", text, how | {"max_gen_toks": WINDOW})])


def test_a_text_without_context_follows_the_bos_token(lm: Any) -> None:
    assert lm.prefix_token_id == lm.tokenizer.eos_token_id  # the embedded target has no other
    lm.tokenizer.bos_token = lm.tokenizer.convert_ids_to_tokens(9)
    assert lm.prefix_token_id == 9


def test_repeated_samples_differ_and_seeds_repeat(lm: Any) -> None:
    how = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    asked = [request("generate_until", "Once upon a time", how)] * 3  # lm-eval repeats the very request
    first = lm.generate_until(asked)
    assert len(set(first)) == 3
    assert lm.generate_until(asked) == first
    lm.seed += 1
    assert lm.generate_until(asked) != first


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
    shared: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str, flags: list[str],
    words: list[str],
) -> None:  # fmt: skip
    args = ["--model", "dspec", "--model_args", "target=tiny", "--tasks", f"dspec_{task}", "--limit", "1", *flags]
    refused(monkeypatch, capsys, args, [f"dspec_{task}", *words])


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, shared: None) -> None:
    """A ValueError that is not about lm-eval's arguments is a fault of ours, not of the user's."""

    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(Autoregressive, "decode", broken)
    args = ["--model", "dspec", "--model_args", "target=tiny", "--tasks", "dspec_humaneval", "--limit", "1"]
    monkeypatch.setattr(sys, "argv", ["eval.lm_eval", *args])
    with pytest.raises(ValueError, match="a fault"):
        command.main()


@pytest.mark.slow
def test_as_a_program(shared: None, tmp_path: Path) -> None:
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
