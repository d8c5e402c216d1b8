"""Running specs: what is decoded, timed, written down and resumed."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data.chat import PromptPolicy
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.speculative import Speculative
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, embedded_target
from eval.benchmarks.base import Item
from eval.decoders import DecoderSpec, build_ar, on_base, prompt_lookup
from eval.evaluate import Evaluation
from eval.reports.table import gate_note, table
from eval.samples import SampleLog, read_samples

POLICY = PromptPolicy(system=None, thinking=False)


class Echo:
    """A benchmark whose verdict is whether there was an answer."""

    quality = "answered"
    chat = True

    def __init__(self, prompts: Sequence[str], max_new_tokens: int = 12, stop: tuple[str, ...] = ()) -> None:
        self._prompts, self.max_new_tokens, self.stop = prompts, max_new_tokens, stop

    def items(self) -> list[Item]:
        return [Item(f"echo/{i}", text) for i, text in enumerate(self._prompts)]

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        return {"answered": bool(answer), "long": len(answer) > 20}

    def continuous_scores(self, item: Item, answer: str) -> dict[str, float]:
        return {"characters": float(len(answer))} if answer else {}

    def source(self) -> dict[str, Any]:
        return {"origin": "this test"}


def evaluation(floor: float, **change: Any) -> Evaluation:
    options = {
        "temperatures": [0.0, 1.0], "top_p": 1.0, "batch_size": 1, "limit": None, "warmup": 1,
        "generate_prompts": 2, "generate_floor": floor, "seed": 0,
    }  # fmt: skip
    return Evaluation(**(options | change))


def never() -> LanguageModel:
    raise AssertionError("the base is not loaded")


LOOKUP = prompt_lookup(label="prompt lookup", weights="trained", base=never, num_drafts=4, max_ngram=2)
SPECS = {
    "autoregressive": DecoderSpec(label="AR", build=build_ar),
    "lookup": LOOKUP,
}
PROMPTS = ["Tom has 3 pens.", "Say one two one two one two.", "def f(a, b):", "Ann had 7 apples.", "Once upon a time"]


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


def run(
    target: LanguageModel, path: Path, evaluation: Evaluation, echo: Echo, settings: dict[str, Any] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return evaluation.rows(
        target=target,
        draft=None,
        specs=SPECS,
        benchmarks={"echo": echo},
        policy=POLICY,
        stop_ids=target.stop_ids,
        samples=path,
        settings=settings or {"seed": 0},
    )


def written(path: Path) -> list[dict[str, Any]]:
    """The file's rows without timings."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_rows_and_table(target: LanguageModel, tmp_path: Path) -> None:
    rows, check = run(target, tmp_path / "a.jsonl", evaluation(0.0), Echo(PROMPTS[:2]))
    assert check["trusted"]
    assert [(r["method"], r["decoder"]["temperature"]) for r in rows] == [
        ("AR", 0.0), ("prompt lookup", 0.0), ("AR", 1.0), ("prompt lookup", 1.0),
    ]  # fmt: skip
    assert rows[0]["speedup"] == 1
    assert rows[1]["mismatches"] == 0
    assert rows[2]["mismatches"] is None
    assert rows[1]["tokens"] == rows[0]["tokens"]
    assert rows[0]["verdicts"] == {"answered": 1.0, "long": rows[0]["verdicts"]["long"]}
    scored = [len(s["text"]) for s in map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines()[1:5])]
    assert rows[0]["scores"]["characters"]["mean"] == sum(scored[::2]) / 2
    assert rows[0]["scores"]["characters"]["n"] == 2
    assert (rows[0]["baseline"], rows[1]["baseline"], rows[1]["lossless"]) == ("autoregressive", "autoregressive", True)
    text = table(rows, trusted=True)
    assert "echo, T=0, 2 prompts, answered" in text
    assert "prompt lookup" in text
    # a slow AR loop makes every speedup look good: each is marked, none hidden
    rows, check = run(target, tmp_path / "b.jsonl", evaluation(1e9, temperatures=[0.0]), Echo(PROMPTS[:2]))
    assert check["trusted"] is False
    assert table(rows, trusted=check["trusted"]).count("*") == len(rows) == 2
    rows, check = run(
        target, tmp_path / "c.jsonl", evaluation(0.9, temperatures=[0.0], generate_prompts=0), Echo(PROMPTS[:2])
    )
    assert (check["trusted"], check["ar_over_generate"]) == (None, None)
    assert "not timed" in gate_note(check, rows)


def test_a_benchmark_without_quality_shows_none(target: LanguageModel, tmp_path: Path) -> None:
    talk = Echo(PROMPTS[:2])
    talk.quality, talk.score = "", lambda item, answer: {}  # type: ignore[method-assign]
    rows, _ = run(target, tmp_path / "a.jsonl", evaluation(0.0, temperatures=[0.0]), talk)
    assert (rows[0]["quality"], rows[0]["quality_name"], rows[0]["n"]) == (None, None, 2)
    assert "–" in table(rows, trusted=True)


@pytest.mark.slow
def test_options_change_what_is_done(target: LanguageModel, tmp_path: Path) -> None:
    def tokens(name: str, echo: Echo | None = None, **change: Any) -> list[list[int]]:
        run(target, tmp_path / name, evaluation(0.0, **change), echo or Echo(PROMPTS))
        return [row["tokens"] for row in written(tmp_path / name)[1:]]

    sampled = tokens("base", temperatures=[1.0])
    assert len(sampled) == 10
    assert sampled != tokens("seed", temperatures=[1.0], seed=5)
    assert sampled != tokens("top_p", temperatures=[1.0], top_p=0.3)
    assert len(tokens("limit", temperatures=[1.0], limit=2)) == 4
    raw = Echo(PROMPTS)
    raw.chat = False
    assert tokens("chat", temperatures=[0.0]) != tokens("raw", raw, temperatures=[0.0])


@pytest.mark.slow
def test_batches_give_what_single_prompts_give(tmp_path: Path) -> None:
    double = embedded_target(dtype="float64", device="cpu")
    found = []
    for size in (1, 2, 5):
        path = tmp_path / f"{size}.jsonl"
        rows, _ = run(double, path, evaluation(0.0, batch_size=size), Echo(PROMPTS))
        by_key = {}
        for row in written(path)[1:]:
            passes = [p[:2] + p[3:] for p in row["passes"]]  # how wide a pass was depends on the batch
            by_key[row["temperature"], row["decoder"], row["id"]] = row["tokens"], passes
        found.append(by_key)
        assert rows[1]["batch_size"] == size
        assert len(by_key) == 20
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_stop_strings_cut_text_and_tokens_alike(target: LanguageModel, tmp_path: Path) -> None:
    run(target, tmp_path / "whole", evaluation(0.0, temperatures=[0.0]), Echo(PROMPTS, 40))
    whole = {(r["decoder"], r["id"]): r for r in written(tmp_path / "whole")[1:]}
    stop = whole["lookup", "echo/0"]["text"][12:16]
    run(target, tmp_path / "cut", evaluation(0.0, temperatures=[0.0]), Echo(PROMPTS, 40, (stop,)))
    shortened = 0
    for row in written(tmp_path / "cut")[1:]:
        full = whole[row["decoder"], row["id"]]
        assert row["text"] == full["text"].split(stop)[0]
        assert row["tokens"] == full["tokens"][: len(row["tokens"])]
        decoded = target.tokenizer.decode(row["tokens"], skip_special_tokens=True)
        before = target.tokenizer.decode(row["tokens"][:-1], skip_special_tokens=True)
        if stop in full["text"]:
            shortened += 1
            assert row["stopped"]
            assert stop in decoded
            assert stop not in before  # not a token more than it takes
    assert shortened >= 2


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2])
def test_resuming_gives_the_unbroken_file(target: LanguageModel, tmp_path: Path, batch_size: int) -> None:
    """The file is cut at many places, as a kill would: the rest is decoded again, nothing twice."""
    bench, whole = evaluation(0.0, batch_size=batch_size), tmp_path / "whole.jsonl"
    expected_rows, _ = run(target, whole, bench, Echo(PROMPTS))
    raw, rng = whole.read_bytes(), random.Random(0)
    for at in [0, 5, len(raw) - 1, len(raw), *(rng.randrange(len(raw)) for _ in range(8))]:
        path = tmp_path / f"{at}.jsonl"
        path.write_bytes(raw[:at])
        rows, _ = run(target, path, bench, Echo(PROMPTS))
        assert written(path) == written(whole)
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected_rows]


@pytest.mark.slow
def test_killed_at_random_moments(target: LanguageModel, tmp_path: Path) -> None:
    """kill -9 at least ten times, each time after another while; what is resumed in the end is the unbroken file."""
    bench, path = evaluation(0.0, generate_prompts=1, warmup=0), tmp_path / "killed.jsonl"
    echo = Echo([f"{text} {i}" for i in range(3) for text in PROMPTS], 8)
    run(target, tmp_path / "whole.jsonl", bench, echo)
    kills, rng = 0, random.Random(3)
    while kills < 10:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                run(target, path, bench, echo)
            os._exit(0)
        # wait until it has written something new, then a little more
        size = path.stat().st_size if path.is_file() else 0
        while os.waitpid(child, os.WNOHANG) == (0, 0) and (path.stat().st_size if path.is_file() else 0) == size:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        kills += 1
    run(target, path, bench, echo)
    assert written(path) == written(tmp_path / "whole.jsonl")


def test_resuming_with_other_settings_or_a_broken_file_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run(target, path, evaluation(0.0, limit=1), Echo(PROMPTS))
    with pytest.raises(UserError, match="another seed"):
        run(target, path, evaluation(0.0), Echo(PROMPTS), {"seed": 1})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "{}\n", *lines[1:]]))
    with pytest.raises(UserError, match="line 2 is malformed"):
        run(target, path, evaluation(0.0), Echo(PROMPTS))


def test_bad_evaluations_are_refused_before_any_work(target: LanguageModel) -> None:
    only = {"lookup": SPECS["lookup"]}
    for specs, benchmark, words in (
        (only, Echo(["a"]), "autoregressive"),
        (SPECS, Echo([]), "no prompts"),
        (SPECS, Echo(["long " * 2000]), r"^echo/0: .* exceed the context .*benchmark\.e\.max_new_tokens"),
    ):
        with pytest.raises(UserError, match=words):
            evaluation(0.0).encode_prompts(target=target, specs=specs, benchmarks={"e": benchmark}, policy=POLICY)
    for change in ({"limit": 0}, {"batch_size": 0}, {"temperatures": []}):
        with pytest.raises(UserError, match=r"at least (1|one)"):
            evaluation(0.0, **change)


def test_two_runs_in_one_folder_are_refused(target: LanguageModel, tmp_path: Path) -> None:
    path, bench = tmp_path / "a.jsonl", evaluation(0.0, temperatures=[0.0], generate_prompts=0)
    with SampleLog(path, {}), pytest.raises(UserError, match="another run is writing"):
        run(target, path, bench, Echo(PROMPTS[:2]))
    run(target, path, bench, Echo(PROMPTS[:2]))
    doubled = path.read_text() + "".join(path.read_text().splitlines(keepends=True)[1:3])
    path.write_text(doubled)
    with pytest.raises(UserError, match="two answers of autoregressive to echo/0"):
        run(target, path, bench, Echo(PROMPTS[:2]))
    with pytest.raises(UserError, match="two answers"):
        read_samples(path)
    assert path.read_text() == doubled  # nothing lost


def test_resuming_on_other_data_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    path, bench = tmp_path / "a.jsonl", evaluation(0.0, temperatures=[0.0], generate_prompts=0)
    run(target, path, bench, Echo(PROMPTS[:3]))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"other prompts of echo .*echo/1"):
        run(target, path, bench, Echo([PROMPTS[0], "edited", PROMPTS[2]]))
    with pytest.raises(UserError, match="the limit can grow, not shrink"):
        run(target, path, bench, Echo(PROMPTS[:2]))
    other = Echo(PROMPTS[:3])
    other.source = lambda: {"sha256": "of another answer"}  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"another data\.echo\.sha256"):
        run(target, path, bench, other)
    assert path.read_bytes() == before


def test_resuming_with_another_drafter_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    """The drafter's weights count, and so does whether there is one."""
    drafters = [None, torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]

    def go(path: Path, draft: Any) -> None:
        evaluation(0.0, temperatures=[0.0], generate_prompts=0, warmup=0, limit=1).rows(
            target=target, draft=draft, specs={"autoregressive": SPECS["autoregressive"]},
            benchmarks={"echo": Echo(PROMPTS, 2)}, policy=POLICY, stop_ids=target.stop_ids, samples=path, settings={},
        )  # fmt: skip

    for i, first in enumerate(drafters):
        path = tmp_path / f"{i}.jsonl"
        go(path, first)
        go(path, first)
        for other in drafters[:i] + drafters[i + 1 :]:
            with pytest.raises(UserError, match=r"another weights\.draft"):
                go(path, other)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_limit_can_grow(target: LanguageModel, tmp_path: Path, batch_size: int) -> None:
    path, options = tmp_path / "a.jsonl", {"temperatures": [0.0], "generate_prompts": 0, "batch_size": batch_size}
    run(target, path, evaluation(0.0, limit=2, **options), Echo(PROMPTS), {"evaluation": {"limit": 2}})
    first = path.read_bytes()
    rows, _ = run(target, path, evaluation(0.0, limit=5, **options), Echo(PROMPTS), {"evaluation": {"limit": 5}})
    assert path.read_bytes().startswith(first)
    assert [row["n"] for row in rows] == [5, 5]
    whole, _ = run(target, tmp_path / "b.jsonl", evaluation(0.0, **options), Echo(PROMPTS))
    assert [row["tokens"] for row in whole] == [row["tokens"] for row in rows]


@pytest.mark.slow
def test_rows_are_handed_on_as_they_are_done(target: LanguageModel, tmp_path: Path) -> None:
    grown: list[int] = []

    def go(echo: Echo) -> None:
        evaluation(0.0, generate_prompts=0).rows(
            target=target, draft=None, specs=SPECS, benchmarks={"one": Echo(PROMPTS[:1]), "two": echo},
            policy=POLICY, stop_ids=target.stop_ids, samples=tmp_path / "a.jsonl", settings={},
            on_rows=lambda rows, check: grown.append(len(rows)),
        )  # fmt: skip

    broken = Echo(PROMPTS[:1])
    broken.score = lambda item, answer: {}["stop"]  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        go(broken)
    assert grown == [0, 2, 4]  # none at first, both temperatures of the first benchmark
    go(Echo(PROMPTS[:1]))
    assert grown == [0, 2, 4, 6, 8]  # never fewer than before


def test_each_decoder_goes_first_in_its_turn(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for cls in (Autoregressive, Speculative):

        def start(self: Any, requests: Any, whole: Any = cls.start) -> Any:
            order.append(type(self).__name__)
            return whole(self, requests)

        monkeypatch.setattr(cls, "start", start)
    run(target, tmp_path / "a", evaluation(0.0, temperatures=[0.0], generate_prompts=0, warmup=0), Echo(PROMPTS[:3]))
    assert order == ["Autoregressive", "Speculative", "Speculative", "Autoregressive", "Autoregressive", "Speculative"]
    assert [row["decoder"] for row in written(tmp_path / "a")[1:]] == ["autoregressive", "lookup"] * 3


@pytest.mark.slow
def test_each_spec_stands_against_the_baseline_of_its_own_weights(tmp_path: Path) -> None:
    """A method that trains the target: the base beside it, each with its own mismatches, and two speedups."""
    trained, base = (embedded_target(dtype="float32", device="cpu") for _ in range(2))
    with torch.no_grad():
        trained.embed_tokens.weight.mul_(1.3)
    own = {"base": lambda: base, "build": build_ar}
    specs = {
        "base_autoregressive": DecoderSpec(
            label="AR base", build=partial(on_base, **own), baseline="base_autoregressive"
        ),
        "base_lookup": DecoderSpec(
            label="base, lookup",
            build=partial(on_base, base=lambda: base, build=LOOKUP.build),
            baseline="base_autoregressive",
        ),
        **SPECS,
    }
    options = {"draft": None, "benchmarks": {"echo": Echo(PROMPTS)}, "policy": POLICY, "stop_ids": base.stop_ids}
    settings = {"samples": tmp_path / "samples.jsonl", "settings": {}, **options}
    rows, _ = evaluation(0.0, temperatures=[0.0]).rows(target=trained, specs=specs, **settings)
    by_name = {row["decoder"]["name"]: row for row in rows}
    assert all(row["mismatches"] == 0 for row in rows)
    assert by_name["base_lookup"]["tokens"] == by_name["base_autoregressive"]["tokens"]
    texts = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()[1:]]
    of_trained, of_base = (
        [row["tokens"] for row in texts if row["decoder"] == name] for name in ("autoregressive", "base_autoregressive")
    )
    assert of_trained != of_base  # the weights do differ
    assert by_name["base_autoregressive"]["speedup"] == by_name["base_autoregressive"]["speedup_vs_base_ar"] == 1
    assert by_name["autoregressive"]["speedup"] == 1 != by_name["autoregressive"]["speedup_vs_base_ar"]
    assert "x base" in table(rows, trusted=True)
    alone = [row for row in rows if row["decoder"]["name"].startswith("base_")]
    assert "x base" not in table([alone[0]], trusted=True)
    del specs["base_autoregressive"]
    with pytest.raises(UserError, match="must contain base_autoregressive"):
        evaluation(0.0).rows(target=trained, specs=specs, **settings)
