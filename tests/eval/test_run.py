"""python -m eval.run: what it takes, what it leaves, and how it refuses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspec.config.compose import ROOT
from dspec.models.checkpoint import save_pretrained
from dspec.models.draft import build_draft
from dspec.models.language_model import embedded_target
from eval.run import main
from eval.samples import read_samples

Run = Callable[..., Path]
SMALL = [
    "limit=2", "evaluation.temperatures=[0.0]", "evaluation.generate_prompts=1", "evaluation.generate_floor=0.0",
    "benchmark.problems.max_new_tokens=24", "benchmark.functions.max_new_tokens=24",
]  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def call(*args: str, name: str = "run") -> Path:
        where = [] if any(a.startswith("resume=") for a in args) else [f"hydra.run.dir={tmp_path / name}"]
        monkeypatch.setattr(sys, "argv", ["eval.run", *args, *where])
        main()
        return tmp_path / name

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with an untrained drafter."""
    target = embedded_target(dtype="float32", device="cpu")
    draft = build_draft(
        target=target, num_layers=1, intermediate_size=None, block_size=4, layout="anchor_first", num_taps=2,
        target_layer_ids=None, markov_head_type="vanilla", markov_rank=8, confidence_head=True,
        confidence_head_with_markov=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("run")
    save_pretrained(draft, folder / "draft", card="made by a test")
    node = {"_target_": "dspec.models.language_model.embedded_target", "dtype": "float32", "device": "cpu"}
    config = {
        "target": node,
        "method": {},
        "label": "mine",
        "data": {"policy": {"system": "Be brief.", "thinking": False}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained the target's own weights, in blocks of 5."""
    folder = tmp_path_factory.mktemp("jacobi")
    target = embedded_target(dtype="float32", device="cpu")
    with torch.no_grad():
        target.model.get_decoder().layers[1].mlp.down_proj.weight.zero_()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    node = {"_target_": "dspec.models.language_model.embedded_target", "dtype": "float32", "device": "cpu"}
    data = {"block_size": 5, "policy": {"system": None, "thinking": False}}
    (folder / "config.json").write_text(json.dumps({"target": node, "method": {}, "label": "JF", "data": data}))
    return folder


def results(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**json.loads((folder / "results.json").read_text()))


def test_a_target_alone(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    unseen = ["benchmark=[tiny,tiny_unseen]", "benchmark.problems_unseen.max_new_tokens=24"]
    folder = run("target=tiny", "decoder=prompt_lookup", *unseen, *SMALL)
    found = results(folder)
    assert [(r["method"], r["benchmark"], r["n"]) for r in found.rows] == [
        (method, benchmark, 2)
        for benchmark in ("problems", "functions", "problems_unseen")
        for method in ("AR", "prompt lookup")  # AR comes along by itself: speeds refer to it
    ]
    assert found.run["benchmarks"]["problems"]["rows"] == 50
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 1 + 3 * 2 * 2
    assert "prompt lookup" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_brings_its_target_label_and_policy(run: Run, checkpoint: Path) -> None:
    found = results(run(f"checkpoint={checkpoint}", "decoder=speculative", "benchmark=tiny", *SMALL))
    assert {r["method"] for r in found.rows} == {"AR", "mine"}
    assert found.run["prompt_policy"]["system"] == "Be brief."
    assert all(r["mismatches"] == 0 for r in found.rows)
    bare = results(
        run(
            f"checkpoint={checkpoint / 'draft'}",
            "target=tiny",
            "decoder=speculative",
            "benchmark=tiny",
            *SMALL,
            name="b",
        )
    )
    assert {r["target"] for r in bare.rows} == {"tiny"}


ONE = [*SMALL, "limit=1", "~benchmark.functions", "evaluation.generate_prompts=0"]


@pytest.mark.slow
def test_a_trained_target_stands_beside_its_base(run: Run, trained: Path) -> None:
    own = "decoder=[base_autoregressive,autoregressive,jacobi_single]"
    folder = run(f"checkpoint={trained}", own, "benchmark=tiny", *ONE)
    base, ar, jacobi = results(folder).rows
    assert [row["method"] for row in (base, ar, jacobi)] == ["AR base", "AR", "Jacobi Forcing, Jacobi"]
    assert jacobi["decoder"]["block_size"] == 5  # as it was trained
    samples = {s.decoder: s.generation.tokens for s in read_samples(folder / "samples.jsonl")}
    alone = run("target=tiny", "benchmark=tiny", *ONE, name="alone")
    (only,) = read_samples(alone / "samples.jsonl")
    assert samples["base_autoregressive"] == only.generation.tokens
    assert samples["autoregressive"] == samples["jacobi_single"] != only.generation.tokens


OLD_RUNS = Path(__file__).parent / "old_runs"  # config.json as runs at commit 9238894 wrote it


@pytest.mark.slow
def test_a_drafter_of_an_old_run_is_evaluated(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Its config names modules and classes that have moved since."""
    shutil.copytree(checkpoint / "draft", tmp_path / "old" / "draft")
    shutil.copy(OLD_RUNS / "dspark.json", tmp_path / "old" / "config.json")
    found = results(run(f"checkpoint={tmp_path / 'old'}", "decoder=speculative", "benchmark=tiny", *ONE))
    assert [(row["method"], row["target"], row["mismatches"]) for row in found.rows] == [
        ("AR", "tiny", 0), ("DSpark", "tiny", 0),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_target_of_an_old_run_is_evaluated(run: Run, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "target", tmp_path / "old" / "target")
    shutil.copy(OLD_RUNS / "jacobi_forcing.json", tmp_path / "old" / "config.json")
    own = "decoder=[base_autoregressive,autoregressive,jacobi_single]"
    found = results(run(f"checkpoint={tmp_path / 'old'}", own, "benchmark=tiny", *ONE))
    assert [row["method"] for row in found.rows] == ["AR base", "AR", "Jacobi Forcing, Jacobi"]
    assert found.rows[2]["decoder"]["block_size"] == 8  # as it was trained


@pytest.mark.slow
def test_block_size_and_dtype_of_a_run_can_be_overridden(run: Run, trained: Path) -> None:
    size = "decoder.jacobi_single.block_size=3"
    more = [size, "+target.dtype=float64", "benchmark=tiny", *ONE]
    found = results(run(f"checkpoint={trained}", "decoder=jacobi_single", *more))
    assert found.rows[1]["decoder"]["block_size"] == 3
    assert found.run["dtype"] == "float64"


@pytest.mark.slow
def test_a_folder_alone_resumes_and_its_limit_grows(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("target=tiny", "decoder=prompt_lookup", "benchmark=tiny", *ONE)
    before = (folder / "samples.jsonl").read_bytes()
    (folder / "results.json").unlink()
    run(f"resume={folder}")
    assert (folder / "samples.jsonl").read_bytes() == before
    run(f"resume={folder}", "limit=2")
    assert (folder / "samples.jsonl").read_bytes().startswith(before)
    assert {row["n"] for row in results(folder).rows} == {2}
    with pytest.raises(SystemExit):
        run(f"resume={folder}", "limit=2", "seed=1")
    assert "another" in capsys.readouterr().err
    run(f"resume={folder}", "limit=2")  # what was refused left no trace


@pytest.mark.slow
def test_what_a_killed_run_leaves(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """results.json has the benchmarks that were done and says that it is not complete."""
    with monkeypatch.context() as patch:
        patch.setattr("eval.benchmarks.embedded.Functions.score", lambda *_: {}["killed"])
        with pytest.raises(KeyError):
            run("target=tiny", "benchmark=tiny", *SMALL, "limit=1")
    left = results(tmp_path / "run")
    assert [row["benchmark"] for row in left.rows] == ["problems"]
    assert left.run["complete"] is False
    run(f"resume={tmp_path / 'run'}")
    whole = results(tmp_path / "run")
    assert whole.rows[:1] == left.rows
    assert whole.run["complete"] is True


@pytest.mark.slow
def test_resume(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("target=tiny", "benchmark=tiny", *SMALL)
    before = (folder / "samples.jsonl").read_bytes()
    (folder / "samples.jsonl").write_bytes(before[:-300])
    run(f"resume={folder}", "target=tiny", "benchmark=tiny", *SMALL)
    after = (folder / "samples.jsonl").read_text().splitlines()
    for old, new in zip(before.decode().splitlines(), after, strict=True):
        assert {**json.loads(old), "seconds": 0} == {**json.loads(new), "seconds": 0}
    with pytest.raises(SystemExit):
        run(f"resume={folder}", "target=tiny", "benchmark=tiny", *SMALL, "seed=1")
    assert "another" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["benchmark=tiny"], ["target=", "checkpoint="]),
        (["target=tiny"], ["benchmark"]),
        (["target=tiny", "benchmark=nope"], ["benchmark/nope", "gsm8k"]),
        (["target=tiny", "benchmark=tiny", "decoder=speculative"], ["drafter"]),
        (["target=tiny", "benchmark=tiny", "decoder=nope"], ["decoder/nope", "prompt_lookup"]),
        (["target=tiny", "benchmark=tiny", "limit=0"], ["limit=0"]),
        (["target=tiny", "benchmark=tiny", "+foo=1"], ["foo"]),
        (["checkpoint=/no/checkpoint", "benchmark=tiny"], ["no checkpoint at /no/checkpoint"]),
        (["checkpoint=.", "benchmark=tiny"], ["neither draft/ nor target/"]),
        (["target=tiny", "benchmark=tiny", "limt=5"], ["unknown key limt", "limit?"]),
        (["target=tiny", "benchmark=tiny", "+limt=5"], ["unknown key limt", "limit?"]),
        (["target=tiny", "benchmark=tiny", "evaluation.batchsize=5"], ["evaluation.batch_size?"]),
        (["target=tiny", "benchmark=tiny", "limit=abc"], ["limit=abc", "integer"]),
        (["target=tiny", "benchmark=tiny", "seed=x"], ["seed=x", "integer"]),
        (["target=tiny", "benchmark=tiny", "evaluation.temperatures=0.0"], ["evaluation.temperatures=[0.0]"]),
        (["target=tiny", "benchmark=tiny", "evaluation.temperatures=[]"], ["temperatures=[]", "at least one"]),
        (["target=tiny", "benchmark=tiny", "evaluation.batch_size=0"], ["evaluation.batch_size=0", "at least 1"]),
        (["checkpoint=torn", "benchmark=tiny"], ["torn/config.json is not JSON"]),
        (["checkpoint=without", "benchmark=tiny"], ["without/config.json is missing", "target.path=without/target"]),
        (["checkpoint=trained", "target=tiny", "benchmark=tiny"], ["leave target= out"]),
        (["checkpoint=texts", "benchmark=tiny"], ["texts/config.json is missing, or not a run's"]),
        (["resume=sub"], ["conf/train.yaml", "conf/eval.yaml"]),
    ],
)
def test_bad_input_is_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    args: list[str], words: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, config in (
        ("torn", "{"),
        ("without", "{}"),
        ("trained", '{"method": {}, "target": {}}'),
        ("texts", '{"method": "D2F", "target": {}}'),
    ):
        (tmp_path / name / "target").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "sub" / ".hydra").mkdir(parents=True)
    (tmp_path / "sub" / ".hydra" / "overrides.yaml").write_text("[]")
    (tmp_path / "sub" / ".hydra" / "hydra.yaml").write_text("hydra: {job: {config_name: train}}")
    with pytest.raises(SystemExit) as exit_:
        run(*args)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words)


def test_missing_data_names_the_path_that_was_tried(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path / "data"))
    with pytest.raises(SystemExit):
        run("target=tiny", "benchmark=gsm8k")
    assert str(tmp_path / "data" / "gsm8k_test.jsonl") in capsys.readouterr().err


@pytest.mark.slow
def test_help_lists_what_an_evaluation_takes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("--help")
    assert not exit_.value.code
    text = capsys.readouterr().out
    choices = text.split("== Config ==")[0]
    assert "prompt_lookup" in choices
    assert "gsm8k" in choices
    assert "trainer" not in choices  # nor any other group of the training job
    assert "generate_prompts" in choices  # what a key means


@pytest.mark.slow
@pytest.mark.parametrize("program", ["run", "speed.__main__", "search.__main__"])
def test_a_mistake_needs_no_torch(tmp_path: Path, program: str) -> None:
    """What is refused before torch is imported is refused at once."""
    mistakes = ["limit=abc", "limt=5", "checkpoint=/no/such", "benchmark=jsonl", "benchmark.problems.count=x"]
    mistakes += {
        "run": ["evaluation.top_p=2"],
        "speed.__main__": ["speed.repeats=0", "speed.tokens=[2,1]", "speed.price_per_hour=-1"],
        "search.__main__": ["search.blocks=[]", "search.block_sizes=[1]", "search.matrix=x"],
    }[program]
    first = ["recipe=sweeps/jacobi_config"] if program.startswith("search") else []
    code = f"""
import sys
from eval.{program} import main
for mistake in {mistakes}:
    benchmark = [] if mistake.startswith("benchmark=") else ["benchmark=tiny"]
    sys.argv = ["eval", *{first}, "target=tiny", *benchmark, mistake]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 2 and "torch" not in sys.modules, mistake
    else:
        raise AssertionError(mistake)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(mistakes)


@pytest.mark.slow
def test_a_refused_command_leaves_the_folders_own(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("target=tiny", "benchmark=tiny", *ONE)
    with pytest.raises(SystemExit):
        run("target=tiny", "benchmark=tiny", *ONE, "seed=1")
    assert "another" in capsys.readouterr().err
    run(f"resume={folder}")
    assert results(folder).run["seed"] == 0


@pytest.mark.slow
def test_a_grown_limit_comes_along_when_the_run_is_resumed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the grown run was killed before its first batch, and of a command that was accepted in its place."""
    folder = run("target=tiny", "benchmark=tiny", *ONE)
    with monkeypatch.context() as patch:
        patch.setattr("eval.samples.SampleLog.add", lambda *_: {}["killed"])
        with pytest.raises(KeyError):
            run(f"resume={folder}", "limit=2")
    run(f"resume={folder}")
    assert {row["n"] for row in results(folder).rows} == {2}
    run("target=tiny", "benchmark=tiny", *ONE, "limit=3")  # in the same folder, by its name
    run(f"resume={folder}")
    assert {row["n"] for row in results(folder).rows} == {3}


@pytest.mark.slow
def test_a_resumed_run_keeps_what_its_ar_loop_was_found_to_be(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["target=tiny", "benchmark=tiny", *ONE, "evaluation.generate_prompts=1"]
    folder = run(*args)
    before = results(folder).run["ar_check"]
    assert before["ar_over_generate"] > 0
    monkeypatch.setattr("eval.evaluate.against_generate", lambda *_, **__: {}["measured again"])
    run(f"resume={folder}")
    assert results(folder).run["ar_check"] == before
    (folder / "samples.jsonl").unlink()  # then nothing was timed beside it
    with pytest.raises(KeyError, match="measured again"):
        run(f"resume={folder}")


def test_a_run_folder_below_a_file_is_one_line(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below/it"):
        with pytest.raises(SystemExit) as stop:
            run("target=tiny", "benchmark=tiny", name=name)
        assert stop.value.code == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert "is a file; choose another one" in error
