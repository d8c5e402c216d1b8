"""Bad input gets one line with the mend and exit code 2, before anything is trained."""

import shutil
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig

from dspec.config import run_folder
from dspec.config.checks import known_keys
from dspec.config.compose import CONF, composed, entry_point
from dspec.config.old_names import check_arguments
from dspec.errors import UserError
from dspec.train import main

Failing = Callable[..., str]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Failing:
    """Runs the job, expects exit code 2 and returns its one line."""

    def call(*args: str) -> str:
        monkeypatch.setenv("DSPEC_CACHE", str(tmp_path / "cache"))
        where = [] if any(a.startswith("resume=") for a in args) else [f"hydra.run.dir={tmp_path / 'run'}"]
        monkeypatch.setattr(sys, "argv", ["dspec.train", *args, *where])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return call


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["recipe=dsprak"], ["dsprak", "dspark", "dflash", "ar_base"]),
        (["target=nope"], ["target/nope", "tiny", "smollm2_135m"]),
        (["recipe=dspark", "sed=1"], ["sed"]),
        (["recipe=dspark", "+foo=1"], ["foo", "seed"]),
        (["recipe=dspark", "+method.num_anchor=3"], ["num_anchor"]),
        (["recipe=dspark", "method.num_anchrs=3"], ["num_anchrs"]),
        (["recipe=dspark", "+trainer.max_stps=3"], ["max_stps"]),
        (["recipe=dspark", "draft.layout=both"], ["layout", "anchor_first", "fill_in"]),
        (["recipe=dspark", "draft.layout=fill_in"], ["fill_in", "anchor_first"]),
        (["recipe=dspark", "draft.markov_head_type=lstm"], ["lstm", "vanilla", "gated", "rnn"]),
        (["recipe=dspark", "draft.target_layer_ids=[0,99]"], ["99", "out of range", "0..5"]),
        (["recipe=dspark", "draft.num_taps=9"], ["num_taps=9"]),
        (["recipe=dspark", "draft.markov_head_type=null", "draft.confidence_head=false"], ["confidence_head"]),
        (
            ["recipe=dflash", "draft.markov_head_type=vanilla", "draft.markov_rank=8"],
            ["without heads", "recipe=dspark"],
        ),
        (["recipe=dspark", "calibration.max_new_tokens=5"], ["calibration.max_new_tokens=5", "draft slots"]),
        (["recipe=dspark", "target=hf", "target.path=/no/such"], ["/no/such"]),
        (["recipe=dspark", "data=jsonl", "benchmark=tiny", "data.source.path=/no/such.jsonl"], ["/no/such.jsonl"]),
        (["recipe=dspark", "resume=/no/such/run"], ["nothing to resume", "/no/such/run"]),
        (["recipe=dspark", "benchmark.problems.max_new_tokens=2000"], ["max_new_tokens", "context"]),
        (["recipe=dspark", "target.dtype=float8"], ["float8"]),
        (["recipe=dspark", "draft=null"], ["draft"]),
        (["recipe=dspark", "data.source.calibration={problems: 3, functions: 0}"], ["3 calibration prompts"]),
        (["recipe=dspark", "evaluation.temperatures=[0.0,0.0]"], ["has a duplicate temperature"]),
        (["recipe=dspark", "evaluation.generate_floor=abc"], ["generate_floor=abc must be a number"]),
        (["recipe=dspark", "evaluation.top_p=0"], ["evaluation.top_p=0 must be above 0"]),
        (["recipe=dspark", "evaluation.top_p=1.5"], ["at most 1"]),
        (["recipe=dspark", "optimizer.optimizer.lr=-1.0"], ["optimizer.optimizer: Invalid learning rate"]),
        (["recipe=dspark", "decoder.speculative.confidence_threshold=2"], ["2"]),
        (["recipe=dflash", "decoder.speculative.confidence_threshold=0.5"], ["confidence head"]),
        (["recipe=dspark", "seed=-1"], ["seed=-1 must be an integer of at least 0"]),
        (["recipe=dspark", "seed=8589934592"], ["below 2**32"]),
        (["recipe=dspark", "trainer.devices=2", "trainer.strategy=ddp_spawn"], ["use trainer.strategy=ddp"]),
        (["recipe=dspark", "target.dtype=bfloat16"], ["trainer.precision=bf16-mixed", "target.dtype=float32"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else None,
)
def test_one_line_and_exit_code_2(failing: Failing, args: list[str], words: list[str]) -> None:
    line = failing(*args)
    for word in words:
        assert word in line
    assert not Path("/no/such/run").exists()  # what is not there is not made


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["recipe=dspark", "data=jsonl", "benchmark=tiny"],
            ["data.source.path is not set: pass data.source.path="],
        ),
        (["recipe=dspark", "target=hf"], ["target.path is not set"]),
        (["recipe=dspark", "trainer.max_steps=abc"], ["trainer.max_steps=abc must be an integer"]),
        (["recipe=dspark", "trainer.max_steps=-3"], ["trainer.max_steps=-3 must be an integer"]),
        (["recipe=dspark", "method.num_anchors=0.5"], ["method.num_anchors=0.5 must be an integer"]),
        (["recipe=dspark", "method/teacher=ema"], ["unknown key method.teacher: DSpark takes no teacher"]),
        (["recipe=jacobi_forcing", "decoder=[autoregressive,speculative]"], ["needs a drafter", "recipe=dspark"]),
        (["recipe=dspark", "draft=null", "decoder=[autoregressive,refined_once]"], ["refined_once needs a drafter"]),
        (["recipe=dspark", "decoder=speculative"], ["use decoder=[autoregressive,speculative]"]),
        (["recipe=dspark", "data.validation=-5"], ["data.validation=-5 must be an integer of at least 0"]),
        (["recipe=dspark", "optimizer.warmup=2"], ["optimizer.warmup=2", "fraction"]),
        (["recipe=dspark", "optimizer.cycles=0"], ["optimizer.cycles=0"]),
        (["recipe=dspark", "~trainer"], ["the config has no trainer"]),
        (["recipe=dspark", "seed=1.5"], ["seed=1.5 must be an integer"]),
        (["recipe=dspark", "optimizer.cycles=0"], ["optimizer.cycles=0 must be an integer"]),
        (["recipe=dspark", "report=null"], ["report=null: a run needs it"]),
        (["recipe=dspark", "decoder.speculative=null"], ["decoder.speculative=null"]),
        (["recipe=dspark", "page=dflash"], ["page=dflash", "recipe=<name>"]),
        (["recipe=dspark", "real=dflash_gsm8k"], ["use scale=pretrained"]),
        (["recipe=dspark", "page_scale=dflash_pretrained"], ["use recipe=<name>"]),
        (["recipe=ar_base", "scale=pretrained"], ["recipes/ar_base.yaml has no numbers for pretrained targets"]),
        (["recipe=as_arm", "method.draft_depth=1.5"], ["method.draft_depth=1.5 must be an integer"]),
        (["recipe=as_arm", "decoder=[assd]"], ["assd is measured against any_subset", "decoder=[any_subset,assd]"]),
        (["recipe=as_arm", "decoder.assd.bonus=3"], ["decoder.assd.bonus=3 must be true or false"]),
        (["recipe=dspark", "data.sort_window=x"], ["data.sort_window=x must be an integer or null"]),
        (["recipe=dspark", "method.ce_weight=null"], ["method.ce_weight=null must be a number"]),
        (
            ["recipe=dspark", "data.regeneration.temperature=hot"],
            ["data.regeneration.temperature=hot must be a number"],
        ),
        (["recipe=dspark", "optimizer.optimizer.betas=[0.9]"], ["optimizer.optimizer.betas=[0.9] must be a list of 2"]),
        (["recipe=jacobi_forcing", "draft.layout=x"], ["draft.layout"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else None,
)
def test_a_mistake_in_the_config_needs_no_model(
    failing: Failing, args: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspec.train._task", None)
    monkeypatch.setattr("dspec.models.language_model.load_language_model", None)
    line = failing(*args)
    for word in words:
        assert word in line


def test_a_mistyped_choice_shows_the_choices_alone(failing: Failing) -> None:
    line = failing("recipe=dspark", "target=tinny")
    assert "tiny_fresh" in line
    assert "search path" not in line


def test_a_mistyped_key_shows_no_inner_groups(failing: Failing) -> None:
    line = failing("recipe=dspark", "qqq=1")
    assert "seed" in line
    assert not {"page", "page_scale", "scale", "recipe", "hydra"} & set(line.replace(",", " ").split())


@pytest.mark.parametrize("args", [["hardware=gpu"], ["target.device=cuda"]])
def test_a_gpu_that_is_not_there(failing: Failing, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert "torch sees no CUDA GPU here" in failing("recipe=dspark", *args)


def test_mistyped_key_in_a_yaml_of_ones_own(failing: Failing, tmp_path: Path) -> None:
    folder = tmp_path / "own" / "recipe"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /target: tiny\nsead: 3\n")
    assert "sead" in failing("--config-dir", str(tmp_path / "own"), "recipe=mine")
    (folder / "mine.yaml").write_text("# @package _global_\nmethod:\n  nm_anchors: 3\n")
    assert "nm_anchors" in failing("--config-dir", str(tmp_path / "own"), "recipe=mine")


def test_gsm8k_without_data(failing: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    assert str(tmp_path) in failing("recipe=dspark", "data=gsm8k")


def test_ranks_of_torchrun_ask_rank_0_anew_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store outlives its ranks: a restarted one that is first must wait, not read the old answer."""
    held: dict[str, bytes] = {}

    class Store:
        def __init__(self, host: str, port: int, *, is_master: bool) -> None:
            assert (host, port, is_master) == ("here", 5, False)

        def set(self, key: str, value: str) -> None:
            held[key] = value.encode()

        def get(self, key: str) -> bytes:
            return held[key]

    monkeypatch.setattr("torch.distributed.TCPStore", Store)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    for name, value in (
        ("WORLD_SIZE", "2"), ("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "5"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)

    def agreed(rank: int, restart: int, clock: str) -> str:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        return run_folder._agreed(clock)

    assert [agreed(0, 0, "one"), agreed(1, 0, "late")] == ["one", "one"]
    with pytest.raises(KeyError):  # the real store waits here until rank 0 has set it
        agreed(1, 1, "early")
    assert [agreed(0, 1, "two"), agreed(1, 1, "later")] == ["two", "two"]


def test_ranks_agree_on_when_their_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks the clock at another moment; what they agree on names their folder."""
    for name in ("DSPEC_STARTED", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    moments = iter(datetime(2026, 1, 1, 0, 0, second) for second in range(60))
    monkeypatch.setattr(run_folder, "datetime", SimpleNamespace(now=lambda: next(moments)))
    assert run_folder.started() == run_folder.started() == "2026-01-01_00-00-00"  # and what it starts inherits it
    monkeypatch.delenv("DSPEC_STARTED")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"set hydra\.run\.dir=<folder>"):
        run_folder.started()
    for name, value in (("SLURM_STEP_ID", "3"), ("SLURM_JOB_ID", "17"), ("SLURM_STEP_NUM_TASKS", "2")):
        monkeypatch.setenv(name, value)
    assert run_folder.started() == "slurm-17.3"


OLD = [
    (["recipe=dspark", "method=dflash"], ["recipe=dflash"]),
    (["method=dspark,dflash", "-m"], ["recipe=dspark,dflash"]),
    (["recipe=dspark", "draft=none"], ["draft=null"]),
    (["recipe=dspark", "draft=dflash"], ["recipe=dflash", "draft.<key>="]),
    (["recipe=dspark", "optimizer=tiny"], ["optimizer.<key>=", "data=tiny"]),
    (["recipe=dspark", "trainer=gsm8k"], ["trainer.<key>=", "hardware=cpu|gpu", "data=gsm8k"]),
    (["recipe=jacobi_forcing", "trajectories=gsm8k"], ["data=gsm8k"]),
    (["recipe=ar_base", "data=tiny_corpus"], ["recipe=ar_base"]),
    (["recipe=dspark", "calibration=none"], ["calibration=null"]),
    (["recipe=dflash", "calibration=sts"], ["recipe=dspark"]),
    (["recipe=dspark", "evaluation=default"], ["leave it out"]),
    (["recipe=dspark", "callbacks=default"], ["leave it out"]),
    (["recipe=dspark", "callbacks/progress=none"], ["callbacks.progress=null"]),
    (["recipe=jacobi_forcing", "method/teacher=same_pass"], ["method/teacher=stop_gradient"]),
    (["recipe=jacobi_forcing", "method/teacher=moving"], ["method/teacher=ema"]),
    (["recipe=jacobi_forcing", "method.tuning.share=1"], ["method.tuning.interpolation"]),
    (["recipe=as_arm", "method.lookahead=1"], ["method.draft_depth"]),
    (["decoder=[diffusion,confidence_threshold]"], ["decoder=[diffusion,fast_dllm]"]),
    (["decoder=[diffusion]", "decoder.confidence_threshold.threshold=0.7"], ["decoder.fast_dllm.threshold"]),
    (["recipe=jacobi_forcing", "decoder.jacobi.build.plan.blocks=3"], ["decoder.jacobi.blocks"]),
    (["recipe=dspark", "decoder.speculative.build.sequential_head=false"], ["decoder.speculative.sequential_head"]),
    (["recipe=dspark", "decoder.speculative.method=mine"], ["decoder.speculative.label"]),
    (["recipe=as_arm", "decoder.assd_ngram.draft=ngram"], ["decoder.assd_ngram.drafted_by", "bigrams (was ngram)"]),
    (["recipe=dspark", "benchmark.problems_unseen.count=5"], ["benchmark=[tiny,tiny_unseen]"]),
]  # fmt: skip


@pytest.mark.parametrize(("args", "words"), OLD, ids=lambda value: value[-1])
def test_an_old_spelling_names_the_new_one(failing: Failing, args: list[str], words: list[str]) -> None:
    line = failing(*args)
    for word in words:
        assert word in line


@pytest.mark.slow
def test_old_names_in_a_yaml_of_ones_own(failing: Failing, tmp_path: Path) -> None:
    folder = tmp_path / "own" / "recipe"
    folder.mkdir(parents=True)
    for text, words in {
        "defaults:\n  - override /method: dspark\n": [
            "method is no longer a config group",
            "defaults: [dspark, _self_]",
        ],
        "defaults:\n  - override /optimizer: tiny\n": ["optimizer is no longer a config group"],
        "defaults: [jacobi_forcing, _self_]\nmethod: {tuning: {share: 0.5}}\n": ["method.tuning.interpolation"],
        "method: {_target_: dspec.noise.Random}\n": ["dspec.jacobi_forcing.noise.RandomSchedule"],
    }.items():
        (folder / "mine.yaml").write_text(f"# @package _global_\n{text}")
        line = failing("--config-dir", str(tmp_path / "own"), "recipe=mine")
        for word in words:
            assert word in line


def test_an_old_run_cannot_be_resumed_in_its_old_spelling(failing: Failing, tmp_path: Path) -> None:
    hydra = tmp_path / "old" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "hydra.yaml").write_text("hydra: {job: {config_name: train}}")
    (hydra / "overrides.yaml").write_text("- recipe=dspark\n- optimizer=tiny\n")
    assert "optimizer.<key>=" in failing(f"resume={tmp_path / 'old'}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hydra", None),
        ("hydra", "hydra: {job: "),
        ("hydra", "hydra: 3"),
        ("overrides", None),
        ("overrides", "{a: [}"),
        ("overrides", "seed=1"),
        ("overrides", "- {seed: 1}"),
    ],
)
def test_a_damaged_command_is_not_resumed(failing: Failing, tmp_path: Path, name: str, text: str | None) -> None:
    hydra = tmp_path / "old" / ".hydra"
    hydra.mkdir(parents=True)
    stored = {"hydra": "hydra: {job: {config_name: train}}", "overrides": "- recipe=dspark\n"} | {name: text}
    for file, content in stored.items():
        if content is not None:
            (hydra / f"{file}.yaml").write_text(content)
    line = failing(f"resume={tmp_path / 'old'}")
    assert f".hydra/{name}.yaml is missing or damaged" in line
    assert "delete" in line


def test_choices_of_ones_own_are_not_old_ones(tmp_path: Path) -> None:
    """The user's folder has optimizer/mine.yaml: optimizer=mine is theirs, optimizer=tiny is the old one."""
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("lr: 1\n")
    for folder in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)],
                   [f"hydra.searchpath=[file://{tmp_path}]"]):  # fmt: skip
        check_arguments([*folder, "+optimizer=mine"])
        with pytest.raises(UserError, match=r"optimizer\.<key>="):
            check_arguments([*folder, "optimizer=tiny"])
    with pytest.raises(UserError, match=r"optimizer\.<key>="):
        check_arguments(["optimizer=mine"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["target=smollm2_135m"], True),
        (["target=hf", "target.path=tinyllama"], True),
        (["target=tinyllama", "hydra.searchpath=[file://{own}]"], True),  # not the embedded tiny
        (["target=smollm2_135m", "scale=pretrained"], False),
        (["target=smollm2_135m", "data=gsm8k"], False),
        (["recipe=ar_base", "target=smollm2_135m"], False),  # has no other numbers
        (["recipe=as_arm", "target=xlnet_tiny"], False),  # fresh and tiny
        (["target=tiny_as_arm"], False),
        (["recipe=d2f", "target=tiny_diffusion"], False),
        ([], False),
    ],
)
def test_a_pretrained_target_with_the_embedded_ones_numbers_is_said(
    args: list[str], said: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[DictConfig] = []
    (tmp_path / "target").mkdir()
    shutil.copy(CONF / "target" / "smollm2_135m.yaml", tmp_path / "target" / "tinyllama.yaml")
    args = [arg.format(own=tmp_path) for arg in args]
    monkeypatch.setattr(sys, "argv", ["dspec.train", *args, f"hydra.run.dir={tmp_path / 'run'}"])
    entry_point(config="train")(ran.append)()
    lines = [line for line in capfd.readouterr().out.splitlines() if "scale=pretrained" in line]
    assert len(ran) == 1
    assert len(lines) == int(said)


@pytest.mark.parametrize(
    ("args", "ordered"),
    [
        (["--config-dir", "C", "resume=r", "seed=1"], ["--config-dir", "C", "resume=r", "seed=1"]),
        (["resume=r", "--cfg", "job", "seed=1"], ["--cfg", "job", "resume=r", "seed=1"]),
        (["-m", "seed=0,1", "--config-dir=C", "+a=1"], ["-m", "--config-dir=C", "seed=0,1", "+a=1"]),
        (["~logger", "-cd", "C", "recipe=mine"], ["-cd", "C", "~logger", "recipe=mine"]),
    ],
)
def test_options_stand_before_overrides(args: list[str], ordered: list[str]) -> None:
    """Hydra's parser refuses overrides that an option splits, as stored ones and --config-dir did on resume."""
    assert run_folder._options_first(args) == ordered


@pytest.mark.parametrize("arg", ["logger=null", "target=null", "benchmark=null", "scale=null", "decoder=[]"])
def test_a_group_needs_a_choice(arg: str) -> None:
    group = arg.partition("=")[0]
    with pytest.raises(UserError, match=f"{group} needs one of its choices"):
        check_arguments([arg])
    check_arguments(["draft=null", "calibration=null", "resume=null"])


@pytest.mark.parametrize(("program", "absent"), [("score", {"layout", "policy"}), ("search", {"layout", "label"})])
def test_programs_have_no_key_that_does_nothing(program: str, absent: set[str]) -> None:
    assert not known_keys(program) & absent


@pytest.mark.parametrize(("hardware", "device"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_hardware_places_trainer_and_target(hardware: str, device: str) -> None:
    """hardware=cpu left a target whose file says cuda there."""
    cfg = composed("train", ["recipe=dspark", "target=qwen3_4b", f"hardware={hardware}", "hydra.run.dir=OUT"])
    assert (cfg.trainer.accelerator, cfg.target.device) == (device, device)


def test_the_sandboxs_limits(failing: Failing) -> None:
    """Those of the embedded functions are equal, those of other programs a key like all others."""
    both = ["target=tiny", "benchmark=[tiny,tiny_infilling]", "judge.sandbox.cpu_seconds=3"]
    cfg = composed("eval", both)
    limits = [cfg.benchmark[name].judge for name in ("functions", "filled_functions")]
    assert limits[0] == limits[1] != cfg.judge
    assert cfg.judge.sandbox.cpu_seconds == 3
