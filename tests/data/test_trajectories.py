"""Trajectories: what is stored is what decoding went through, kills and reruns, statistics, and every option."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.chat import PromptPolicy
from data.collect import describe, statistics
from data.prompts import EmbeddedPrompts
from data.trajectories import Trajectories, collect, read_shard, trace, write_shard
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig, JacobiState
from dspec.decoding.sampling import GREEDY, Sampling
from dspec.errors import UserError
from dspec.jacobi_forcing.packing import Trajectory
from dspec.models.language_model import LanguageModel, embedded_target
from dspec.seeding import prompt_seed
from dspec.tuning import LoRA

POLICY = PromptPolicy(system=None, thinking=False)
SMALL = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 20, "batch_size": 4}


def config(n: int) -> JacobiConfig:
    return JacobiConfig(block_size=n, blocks=1, activation=1.0, pool_size=0, candidates=0)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


def module(target: LanguageModel, tmp_path: Path, **changes: Any) -> Trajectories:
    settings: dict[str, Any] = {
        "source": EmbeddedPrompts(train={"problems": 8}, calibration={}, seed=0), "policy": POLICY,
        "regeneration": SMALL, "cache_dir": str(tmp_path), "batch_size": 2, "max_length": 200, "sort_window": 4,
        "validation": 1, "seed": 0, "block_size": 6, "row_length": 120,
    }  # fmt: skip
    return Trajectories(target=target, **(settings | changes))


@pytest.mark.parametrize("seed", range(3))
def test_states_are_those_that_decoding_went_through(toys: SimpleNamespace, seed: int) -> None:
    """Each state is one Jacobi update of the one before, behind the verified text; the last one is plain AR's text."""
    of, n = toys.target(toys.FAMILIES[seed], seed=seed, scale=0.4), 5
    prompts = [(str(i), [1 + i, 2, 3][: 1 + i]) for i in range(3)]
    greedy = toys.jacobi(target=of, sampling=toys.GREEDY, config=config(n))
    samples = trace(greedy.decoder, prompts, max_new_tokens=17, stop_ids=[4], sampling=GREEDY, seed=seed)
    serial = toys.autoregressive(target=of, sampling=toys.GREEDY).decode(
        [ids for _, ids in prompts], max_new_tokens=17, stop_ids=[4], seeds=[0] * 3
    )
    moved = 0
    for (_, ids), sample, expected in zip(prompts, samples, serial, strict=True):
        assert sample.prompt_P.tolist() == ids
        assert sample.response_R.tolist() == expected.tokens  # cut behind the stop token
        assert [t for states in sample.blocks for t in states[-1]] == expected.tokens
        before = list(ids)
        for states in sample.blocks:
            length = len(states[-1])
            assert {len(state) for state in states} == {length}
            for state, following in itertools.pairwise(states[:-1]):
                logits = of.logits(of(torch.tensor([[*before, *state]])).hidden_BLD[0])
                predicted = logits.argmax(-1)[len(before) - 1 : -1].tolist()
                assert following == predicted
                moved += state != following
            before += states[-1]
    assert moved >= 3


@pytest.mark.parametrize("seed", range(3))
def test_no_state_is_lost(toys: SimpleNamespace, seed: int) -> None:
    """One state a pass and the fixed point; the first one is the draft that a block is opened with, its noisiest."""
    of, n, new = toys.target(toys.FAMILIES[seed], seed=seed, scale=0.4), 5, 17
    greedy = toys.jacobi(target=of, sampling=toys.GREEDY, config=config(n))
    for prompt in ([1], [2, 3], [3, 2, 3]):
        (sample,) = trace(greedy.decoder, [("x", prompt)], max_new_tokens=new, stop_ids=[4], sampling=GREEDY, seed=seed)
        own = {"max_new_tokens": new, "stop_ids": [4], "seeds": [prompt_seed(seed, "x")]}
        (generation,) = greedy.decode([prompt], **own)
        assert sum(len(states) - 1 for states in sample.blocks) == generation.forwards
        first = JacobiState(prompt, generation.tokens[0], config=config(n), limit=new, seed=prompt_seed(seed, "x"))
        assert sample.blocks[0][0] == first.block(0)[: len(generation.tokens)]


def lists(sample: Trajectory) -> tuple[list[int], list[int], list[list[list[int]]]]:
    return sample.prompt_P.tolist(), sample.response_R.tolist(), sample.blocks


def test_shard_round_trip(tmp_path: Path) -> None:
    samples = [
        Trajectory.from_lists([1, 2, 3], [4, 5, 6, 7], [[[0, 5, 1], [4, 5, 6]], [[2], [7]]], block_size=3),
        Trajectory.from_lists([9], [8, 8, 8], [[[8, 8, 8]]], block_size=3),
    ]
    write_shard(tmp_path / "a.safetensors", ["x", "y"], samples)
    back = read_shard(tmp_path / "a.safetensors", block_size=3)
    assert list(back) == [("x", (1, 2, 3)), ("y", (9,))]
    assert [lists(s) for s in back.values()] == [lists(s) for s in samples]
    for one, two in zip(*(vars(sample).values() for sample in back.values()), strict=True):
        assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()  # views of the file, not copies
    with pytest.raises(UserError, match=r"blocks of 3 tokens, not data.block_size=4: collect again"):
        read_shard(tmp_path / "a.safetensors", block_size=4)
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-9])
    with pytest.raises(UserError, match="delete it and run again"):
        read_shard(tmp_path / "b.safetensors", block_size=3)


PROMPTS = [(f"p{i}", [1 + i, 2]) for i in range(7)]


def gather(toys: SimpleNamespace, folder: Path, prompts: Any = PROMPTS, *, seed: int = 0) -> list[Any]:
    of = toys.target(seed=1, scale=0.4)
    samples = collect(
        folder,
        {"some": "settings"},
        prompts,
        Jacobi(target=of, config=config(4)),
        sampling=GREEDY,
        stop_ids=[4],
        max_new_tokens=12,
        batch_size=2,
        seed=seed,
    )
    return [lists(sample) for sample in samples]


def test_collected_once_and_gaps_filled(toys: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}

    whole, written = gather(toys, tmp_path / "a"), files()
    assert len(written) == 5  # settings and four batches
    for name in sorted(written.keys() - {"settings.json"}):
        (tmp_path / "a" / name).unlink()
        assert gather(toys, tmp_path / "a") == whole
        assert files() == written
    assert gather(toys, tmp_path / "b", seed=1) != whole
    assert [s[1] for s in gather(toys, tmp_path / "c", seed=1)] == [s[1] for s in whole]
    monkeypatch.setattr("data.trajectories.trace", None)  # all is there: nothing is decoded
    assert gather(toys, tmp_path / "a") == whole
    assert gather(toys, tmp_path / "a", PROMPTS[2:5]) == whole[2:5]
    (tmp_path / "a" / "settings.json").write_text('{"some": "other"}')
    with pytest.raises(UserError, match="other settings"):
        gather(toys, tmp_path / "a")


def test_what_a_killed_writer_left_is_cleared(toys: SimpleNamespace, tmp_path: Path) -> None:
    gather(toys, tmp_path / "a")
    before = sorted(p.name for p in (tmp_path / "a").iterdir())
    (tmp_path / "a" / f".{before[0]}.4711.tmp").write_bytes(b"half")
    gather(toys, tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == before


def test_added_and_changed_prompts_alone_are_decoded(
    toys: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, decoded = gather(toys, tmp_path / "a"), []

    def watched(decoder: Jacobi, prompts: Any, **options: Any) -> list[Trajectory]:
        decoded.extend(prompts)
        return trace(decoder, prompts, **options)

    monkeypatch.setattr("data.trajectories.trace", watched)
    changed = [("new", [3]), *PROMPTS[:3], ("p3", [9, 9]), *PROMPTS[4:]]
    got = gather(toys, tmp_path / "a", changed)
    assert sorted(decoded) == [("new", [3]), ("p3", [9, 9])]
    assert [s[0] for s in got] == [ids for _, ids in changed]
    assert got[1:4] + got[5:] == whole[:3] + whole[4:]
    assert gather(toys, tmp_path / "a") == whole
    assert len(decoded) == 2


def test_full_disk_is_one_line(toys: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.trajectories.save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        gather(toys, tmp_path / "a")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["settings.json"]


@pytest.mark.slow
def test_kill_and_rerun_gives_an_unbroken_runs_files(tmp_path: Path) -> None:
    """kill -9 in the middle of the command line's job."""

    def start(cache: Path) -> subprocess.Popen[bytes]:
        small = [
            "data.source.train={problems: 24, functions: 0, stories: 0}",
            "data.regeneration.max_new_tokens=24",
            "data.validation=2",
        ]
        command = [sys.executable, "-m", "data.collect", "recipe=jacobi_forcing", *small]
        environment = os.environ | {"DSPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        run = [*command, "data.regeneration.batch_size=2", f"hydra.run.dir={cache}/run"]
        return subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def files(cache: Path) -> dict[str, bytes]:
        whole = (cache / "trajectories").glob("*/[!.]*")  # a killed write leaves its hidden scratch file
        return {p.name: p.read_bytes() for p in whole}

    killed = start(tmp_path / "killed")
    deadline = time.monotonic() + 120
    while len(files(tmp_path / "killed")) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert 4 <= len(files(tmp_path / "killed")) < 13
    for cache in ("killed", "whole"):
        out, _ = start(tmp_path / cache).communicate()
        assert b"24 trajectories" in out
        assert b"passes per token" in out
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert len(files(tmp_path / "whole")) == 13


def batches(data: Trajectories) -> list[list]:
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader())
    return [[b.ids_BL.tolist(), b.states_NKn.tolist()] for loader in loaders for b in loader]


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 5},
        {"row_length": 300},
        {"batch_size": 1},
        {"max_length": 50},
        {"sort_window": None},
        {"validation": 3},
        {"seed": 1},
        {"regeneration": SMALL | {"max_new_tokens": 12}},
        {"regeneration": SMALL | {"temperature": 1.0}},
        {"regeneration": SMALL | {"temperature": 1.0, "top_p": 0.2}},
    ],
    ids=str,
)
def test_every_option_changes_the_batches(target: LanguageModel, tmp_path_factory: Any, change: dict[str, Any]) -> None:
    cache = tmp_path_factory.getbasetemp() / "trajectories"  # collected once
    base, changed = batches(module(target, cache)), batches(module(target, cache, **change))
    assert base == batches(module(target, cache))
    assert base != changed


def test_held_out_trajectories_are_not_trained_on(target: LanguageModel, tmp_path_factory: Any) -> None:
    """Each usable one is in one of the two sets; of each loader's batches the prompts say whose they are."""
    data = module(target, tmp_path_factory.getbasetemp() / "trajectories", validation=3, batch_size=1, max_length=10**6)
    data.setup("fit")
    trained, held_out = (
        sorted(
            tuple(ids[(document == number) & (block < 0)].tolist())
            for batch in loader
            for ids, document, block in zip(batch.ids_BL, batch.document_BL, batch.block_BL, strict=True)
            for number in range(int(document.max()) + 1)
        )
        for loader in (data.train_dataloader(), data.val_dataloader())
    )
    prompts = [tuple(t.prompt_P.tolist()) for t in data.trajectories()]
    assert held_out == sorted(prompts[:3])
    assert set(trained) <= set(prompts[3:])
    assert len(trained) >= 3  # the last batch may be left out


def test_ranks_share_the_rows(target: LanguageModel, tmp_path_factory: Any) -> None:
    cache = tmp_path_factory.getbasetemp() / "trajectories"

    def rows(rank: int, ranks: int, batch: int) -> list[set[str]]:
        data = module(target, cache, batch_size=batch)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=ranks, current_epoch=0)
        data.setup("fit")
        loaded = [{str(ids[document >= 0].tolist()) for ids, document in zip(b.ids_BL, b.document_BL, strict=True)}
                  for b in data.train_dataloader()]  # fmt: skip
        with (
            pytest.raises(UserError, match="1 validation rows are too few for 2 ranks") if ranks > 1 else nullcontext()
        ):
            data.val_dataloader()
        return loaded

    whole, first, second = rows(0, 1, 2), rows(0, 2, 1), rows(1, 2, 1)
    assert len(whole) == len(first) == len(second) >= 2
    assert [one | two for one, two in zip(first, second, strict=True)] == whole
    assert not any(one & two for one, two in zip(first, second, strict=True))


def test_the_cache_is_keyed_by_what_matters(target: LanguageModel, tmp_path: Path) -> None:
    base = module(target, tmp_path)
    changes: list[dict[str, Any]] = [
        {"block_size": 5},
        {"seed": 1},
        {"regeneration": SMALL | {"batch_size": 2}},
        {"policy": PromptPolicy(system="Be brief.", thinking=False)},
    ]
    others = [module(target, tmp_path, **change).folder for change in changes]
    assert len({base.folder, *others}) == 5
    more = EmbeddedPrompts(train={"problems": 9}, calibration={}, seed=0)
    for change in ({"row_length": 99}, {"batch_size": 1}, {"max_length": 50}, {"validation": 0}, {"source": more}):
        assert module(target, tmp_path, **change).folder == base.folder


def test_long_samples_are_cut_at_whole_blocks(target: LanguageModel, tmp_path: Path) -> None:
    data = module(target, tmp_path)
    sample = data.trajectories()[0]
    P = len(sample.prompt_P)
    assert lists(data._within(sample)) == lists(sample)
    cut = module(target, tmp_path, max_length=P + 15)._within(sample)
    assert lists(cut) == (sample.prompt_P.tolist(), sample.response_R[:12].tolist(), sample.blocks[:2])
    whole = P + len(sample.response_R)
    assert lists(module(target, tmp_path, max_length=whole)._within(sample)) == lists(sample)
    assert len(module(target, tmp_path, max_length=whole - 1)._within(sample).response_R) < len(sample.response_R)
    for length in (P + 5, P, P - 1):
        assert lists(module(target, tmp_path, max_length=length)._within(sample))[1:] == ([], [])


def test_bad_input_gets_one_line(target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="regeneration must set"):
        module(target, tmp_path, regeneration=None)
    empty = SMALL | {"max_new_tokens": 1}  # responses of one token: nothing behind the prefill
    with pytest.raises(UserError, match="0 of 8 responses are longer than one token"):
        module(target, tmp_path, regeneration=empty).setup("fit")
    with pytest.raises(UserError, match="block_size >= 2"):
        module(target, tmp_path, block_size=1).trajectories()
    bare = embedded_target(dtype="float32", device="cpu")
    bare.tokenizer.eos_token = None
    monkeypatch.setattr(bare.model.generation_config, "eos_token_id", None)
    with pytest.raises(UserError, match="no end-of-text token"):
        module(bare, tmp_path).trajectories()


def test_adapters_do_not_change_the_key(tmp_path: Path) -> None:
    """`data.collect` ahead of training has no adapters yet; training with LoRA finds what it wrote."""
    base = embedded_target(dtype="float32", device="cpu")
    data = module(base, tmp_path)
    before = data.folder
    LoRA(rank=2, alpha=4, modules="all-linear", interpolation=1.0).prepare(base)
    assert data.folder == before


def test_statistics_by_hand() -> None:
    states = [
        [1, 9, 9, 9],
        [1, 2, 9, 4],
        [1, 2, 3, 9],
        [1, 2, 3, 4],
    ]  # the last pass verifies [1, 2, 3, 4]'s last token
    stats = statistics([Trajectory.from_lists([0], [1, 2, 3, 4], [states], block_size=4)], bins=4)
    assert stats["passes_per_token"] == 1.0  # three passes, three tokens behind the prefill's
    assert stats["noise_ratio"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert stats["ngram"] == pytest.approx(1 / 3)  # the 4 in the second state
    assert stats["stability"] == 0  # which the third one lost
    kept = [[1, 9, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    stats = statistics([Trajectory.from_lists([0], [1, 2, 3, 4], [kept], block_size=4)], bins=4)
    assert (stats["ngram"], stats["stability"]) == (2, 1)
    assert "passes per token: 0.667" in describe(stats)


def test_statistics_of_the_embedded_base(target: LanguageModel, tmp_path: Path) -> None:
    data = module(target, tmp_path)
    stats = statistics(data.trajectories(), bins=8)
    assert 0.5 < stats["passes_per_token"] <= 1
    assert sum(stats["noise_ratio"]) == pytest.approx(1)
    assert 0 <= stats["stability"] < 1
    settings = json.loads((data.folder / "settings.json").read_text())
    assert settings["block_size"] == 6
    assert {"target_sha256", "prompt_policy", "regeneration", "seed", "stop_ids"} <= settings.keys()
    assert Sampling(temperature=settings["regeneration"]["temperature"], top_p=1.0).greedy


@pytest.mark.slow
def test_settings_name_the_dtype_that_the_target_came_in(tmp_path: Path) -> None:
    """A method trains in float32: what is collected then, or ahead by data.collect, must have one key."""
    target = embedded_target(dtype="bfloat16", device="cpu")
    own = module(target, tmp_path)
    before = own.settings()
    target.to(torch.float32)
    assert own.settings() == before
    assert before["dtype"] == "torch.bfloat16"
