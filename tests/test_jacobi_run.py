"""recipe=jacobi_forcing on a small scale: collect, train, evaluate, export; LoRA; a moving average over a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dspec.decoding.sampling import Sampling
from dspec.models.language_model import LanguageModel, embedded_target, load_language_model
from dspec.train import main
from eval.reports.schedules import ablation
from eval.run import main as evaluate

SMALL = [
    "recipe=jacobi_forcing",
    "data.source.train={problems: 12, functions: 6, stories: 0}",
    "data.source.calibration={problems: 0, functions: 0}",
    "data.regeneration.max_new_tokens=32",
    "data.regeneration.batch_size=9",
    "data.validation=2",
    "data.batch_size=2",
    "data.row_length=130",  # seven batches an epoch
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_train_steps=2",
    "benchmark.problems.count=2",
    "benchmark.functions.count=1",
    "evaluation.generate_prompts=1",
    "evaluation.generate_floor=0",
    "evaluation.warmup=0",
    "callbacks.progress=null",
]
FEW = ["decoder=[base_autoregressive,base_jacobi_single,autoregressive,jacobi_single]"]
MOVING = ["method/teacher=ema"]
LORA = ["method/tuning=lora", "method.tuning.rank=2"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(args: list[str], cache: Path, out: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPEC_CACHE", str(cache))
        patch.setattr(sys, "argv", ["dspec.train", *SMALL, *args, f"hydra.run.dir={out}"])
        main()
    return out


@pytest.mark.slow
def test_the_whole_recipe(cache: Path, tmp_path: Path) -> None:
    loads: list[LanguageModel] = []
    with pytest.MonkeyPatch.context() as patch:
        load = lambda **how: loads.append(embedded_target(**how)) or loads[-1]  # noqa: E731
        patch.setattr("dspec.models.language_model.embedded_target", load)
        out = run([], cache, tmp_path / "run")
    assert len(loads) == 2  # the one that is trained, and one base for five decoders
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert len(rows) == 10 * 2
    by_name = {row["decoder"]["name"]: row for row in rows if row["benchmark"] == "problems"}
    for name, row in by_name.items():
        baseline = by_name["base_autoregressive" if name.startswith("base_") else "autoregressive"]
        assert row["tokens"] == baseline["tokens"]
        assert row["mismatches"] == 0
        assert row["tpf"] >= 1
        assert row["branch_forwards"] >= row["nfe"] - row["nfe_prefill"]
    assert by_name["base_jacobi"]["branch_forwards"] > by_name["base_jacobi_multiblock"]["branch_forwards"]
    base, trained = embedded_target(dtype="float32", device="cpu"), out / "target"
    exported = load_language_model(path=str(trained), name="t", dtype="float32", device="cpu", mask_token=None)
    assert not torch.equal(exported.embed_tokens.weight, base.embed_tokens.weight)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()[1:]]
    wanted = [s["text"] for s in samples if (s["decoder"], s["benchmark"]) == ("autoregressive", "problems")]
    with pytest.MonkeyPatch.context() as patch:  # what is written is what was evaluated
        args = [f"checkpoint={out}", "decoder=jacobi", "decoder.jacobi.block_size=6", "benchmark=tiny"]
        small = [a for a in SMALL if a.startswith(("benchmark", "evaluation"))]
        again = ["eval.run", *args, *small, "evaluation.temperatures=[0.0]", f"hydra.run.dir={tmp_path / 'again'}"]
        patch.setattr(sys, "argv", again)
        evaluate()
    samples = [json.loads(line) for line in (tmp_path / "again" / "samples.jsonl").read_text().splitlines()[1:]]
    for decoder in ("autoregressive", "jacobi"):
        assert [s["text"] for s in samples if (s["decoder"], s["benchmark"]) == (decoder, "problems")] == wanted
    assert [line[0] for line in ablation([out], decoder="jacobi_single")] == ["Random"]


@pytest.mark.slow
def test_a_moving_average_over_lora_survives_a_kill(toys: SimpleNamespace, cache: Path, tmp_path: Path) -> None:
    """Bit-exactly: adapters, their mean and the drawn states go on where the last checkpoint stood."""
    args = [*FEW, *MOVING, *LORA, "method/schedule=random"]
    whole = run(args, cache, tmp_path / "whole")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "dspec.train", *SMALL, *args, f"hydra.run.dir={out}"]
    environment = os.environ | {"DSPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (out / "checkpoints" / "last.ckpt").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    assert any(name.startswith("method.teacher.") for name in saved)
    assert all("lora_" in name for name in saved)
    run([*args, f"resume={out}"], cache, out)
    one, other = (load_file(path / "target" / "model.safetensors") for path in (whole, out))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any("lora_" in name for name in one)
    base = embedded_target(dtype="float32", device="cpu")
    tuned = load_language_model(path=str(whole / "target"), name="t", dtype="float32", device="cpu", mask_token=None)
    assert torch.equal(base.embed_tokens.weight, tuned.embed_tokens.weight)  # adapters alone were trained
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(base.model.get_parameter(weight), tuned.model.get_parameter(weight))
    greedy = toys.autoregressive(target=tuned, sampling=Sampling(temperature=0.0, top_p=1.0))
    assert greedy.decode([[5, 6]], max_new_tokens=3, stop_ids=(), seeds=[0])[0].tokens
