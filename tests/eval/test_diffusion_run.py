"""Decoders of diffusion LMs through `python -m eval.run`, and what rows say of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspec.decoding.generation import Generation, Pass
from dspec.errors import UserError
from eval.ranks import own_folder
from eval.results import pool, reference
from eval.rows import filled_per_pass, prompt_counts, prompts_per_pass


@pytest.mark.slow
def test_without_plain_ar(eval_run: Callable[..., SimpleNamespace]) -> None:
    """A diffusion LM has no AR to be compared with: its baseline is its own most confident token per pass."""
    lopa = "decoder.lopa_block_causal"
    done = eval_run(
        "decoder=[diffusion,d2f,lopa_block_causal]", "decoder.d2f.block_size=8", f"{lopa}.block_size=8",
        f"{lopa}.branches=2", "benchmark=tiny", "benchmark.problems.count=2", "benchmark.functions.count=1",
        "benchmark.problems.max_new_tokens=24", "benchmark.functions.max_new_tokens=16",
    )  # fmt: skip
    assert [row["decoder"]["name"] for row in done.rows] == ["diffusion", "d2f", "lopa_block_causal"] * 2
    assert {row["baseline"] for row in done.rows} == {row["reference"] for row in done.rows} == {"diffusion"}
    assert [row["lossless"] for row in done.rows] == [True, False, False] * 2
    assert done.run["ar_check"]["trusted"] is None  # nothing to time against generate
    plain = done.rows[0]
    assert plain["slots_filled"] == plain["nfe"]
    assert plain["tpf_paper"] == 1.0
    for row in done.rows:
        assert row["tpf"] == row["tpf_with_prefill"] == row["tokens"] / row["nfe"] <= row["tpf_paper"]
        key = (row["benchmark"], row["decoder"]["name"])
        own = [s for s in done.samples if (s["benchmark"], s["decoder"]) == key]
        assert len(row["filled_per_pass"]) == len(row["prompts_per_pass"]) == max(len(s["passes"]) for s in own)
        filled = zip(row["filled_per_pass"], row["prompts_per_pass"], strict=True)
        assert sum(mean * prompts for mean, prompts in filled) == pytest.approx(row["tokens"])
    lopa = done.rows[2]
    assert lopa["branch_forwards"] > lopa["nfe"]
    assert lopa["decoder"]["branches"] == 2


@pytest.mark.slow
def test_the_final_tables_page(eval_run: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    """Teacher and student (here the same weights), all compared with the teacher at one token per pass."""
    few = [f"benchmark.{name}" for name in ("problems", "functions")]
    done = eval_run(
        "recipe=sweeps/diffusion_table", *(f"{name}.count=2" for name in few),
        *(f"{name}.max_new_tokens=16" for name in few), "evaluation.generate_prompts=0",
    )  # fmt: skip
    assert {row["reference"] for row in done.rows} == {"base_diffusion"}
    written = json.loads((tmp_path / "run" / "curves.json").read_text())
    (points,) = written["points"].values()
    names = ["base_diffusion", "base_fast_dllm", "diffusion", "fast_dllm", "d2f", "lopa"]
    assert [p["decoder"] for p in points] == [*names, "lopa_block_causal", "base_causal"]
    assert {p["n"] for p in points} == {4}
    by_name = {p["decoder"]: p for p in points}
    assert by_name["base_diffusion"]["tpf"] == by_name["diffusion"]["tpf"] == 1
    assert by_name["base_fast_dllm"]["tpf"] == by_name["fast_dllm"]["tpf"]
    lopa = [row for row in done.rows if row["decoder"]["name"] == "lopa"]
    assert by_name["lopa"]["branches_per_pass"] == sum(r["branch_forwards"] for r in lopa) / sum(r["nfe"] for r in lopa)
    assert by_name["lopa"]["branches_per_pass"] > 1 == by_name["d2f"]["branches_per_pass"]
    assert {path.name for path in (tmp_path / "run" / "plots").iterdir()} == {
        "frontier_T0.png", "filled_per_pass_T0.png",
    }  # fmt: skip


def test_what_papers_count() -> None:
    passes = [Pass("decode", 1, filled=2), Pass("decode", 0, filled=0, beyond=3), Pass("decode", 2, filled=1)]
    made = Generation(tokens=[1, 2, 3], stopped=True, passes=passes)
    found = pool([prompt_counts(made), prompt_counts(made)])
    assert (found["slots_filled"], found["tpf_paper"], found["tpf"]) == (12, 2.0, 1.0)
    old = {key: value for key, value in prompt_counts(made).items() if key != "slots_filled"}
    assert pool([old])["tpf_paper"] == 1.0
    ar = Generation(tokens=[1, 2], passes=[Pass("prefill", 1), Pass("decode", 1)])
    assert prompt_counts(ar)["slots_filled"] == 2
    assert filled_per_pass([ar]) is None
    short = Generation(tokens=[1], passes=[Pass("decode", 1, filled=1)])
    assert filled_per_pass([made, short]) == [1.5, 0, 1]
    assert prompts_per_pass([short, made]) == [2, 1, 1]
    assert Pass(*passes[1].to_row()) == passes[1]


def test_the_teachers_diffusion_is_what_a_students_row_refers_to() -> None:
    assert reference(["d2f", "diffusion", "base_diffusion"]) == "base_diffusion"
    assert reference(["d2f", "diffusion"]) == "diffusion"
    assert reference(["autoregressive", "diffusion"]) == "autoregressive"


@pytest.mark.slow
def test_branches_over_ranks_of_torchrun(tmp_path: Path) -> None:
    """Two ranks give the answers of one process; only the first one writes."""
    lopa = "decoder.lopa"
    common = [
        "target=tiny", "decoder=[diffusion,lopa]", f"{lopa}.block_size=8", f"{lopa}.branches=2", "benchmark=tiny",
        "benchmark.problems.count=2", "benchmark.functions.count=1", "benchmark.problems.max_new_tokens=16",
        "benchmark.functions.max_new_tokens=16", "evaluation.temperatures=[0.0,1.0]", "evaluation.generate_prompts=0",
        "evaluation.warmup=0",
    ]  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    answers = []
    for name, launcher, more in (("one", [], []), ("two", torchrun, [f"{lopa}.process_timeout_s=60"])):
        command = [sys.executable, *launcher, "-m", "eval.run", *common, *more, f"hydra.run.dir={tmp_path / name}"]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=300, capture_output=True)
        _, *samples = map(json.loads, (tmp_path / name / "samples.jsonl").read_text().splitlines())
        answers.append([(s["decoder"], s["id"], s["temperature"], s["tokens"]) for s in samples])
        assert (tmp_path / name / "table.md").is_file()
    assert sorted(answers[0]) == sorted(answers[1])
    assert len(answers[0]) == 12


def test_other_ranks_write_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "samples.jsonl").write_text("old\n")
    (tmp_path / "results.json").write_text("{}")
    with own_folder(tmp_path) as folder:
        assert folder == tmp_path
    monkeypatch.setenv("RANK", "1")
    with own_folder(tmp_path) as folder:
        assert folder != tmp_path
        assert (folder / "samples.jsonl").read_text() == "old\n"
        assert (folder / "results.json").read_text() == "{}"  # an AR loop is timed once
    assert not folder.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_stops_the_ranks_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """One line from the first; nothing of the others stays."""
    before = signal.getsignal(signal.SIGTERM)
    for name, value in (("RANK", str(rank)), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, value)
    ended: type[BaseException] = SystemExit if rank else UserError
    try:
        with pytest.raises(ended) as stopped, own_folder(tmp_path) as folder:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert folder.exists() is (rank == 0)
    assert str(stopped.value) == "143" if rank else f"resume={tmp_path}" in str(stopped.value)
