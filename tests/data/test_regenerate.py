"""Regeneration: nothing lost, nothing doubled, and an interrupted file equals an unbroken one."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from data.regenerate import Response, main, read_responses, regenerate
from dspec.decoding.generation import Generation, Request
from dspec.decoding.sampling import GREEDY, Streams
from dspec.decoding.state import Row, State
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.seeding import prompt_seed

SETTINGS = {"target": "fake", "temperature": 1.0}
PROMPTS = [(f"p{i}", [i] * (1 + i % 5)) for i in range(23)]


class FakeDecoder:
    """Tokens that depend on prompt, seed and the shape of the batch; may die in a given call."""

    def __init__(self, die_at: int | None = None) -> None:
        self.calls, self.die_at, self.prompts = 0, die_at, list[Sequence[int]]()

    def start(self, requests: Sequence[Request]) -> State:
        self.calls += 1
        self.prompts += [r.ids for r in requests]
        if self.calls == self.die_at:
            raise KeyboardInterrupt
        done = [Generation([r.ids[0], r.seed % 97, len(requests)], stopped=True) for r in requests]
        rows = [Row(request, [], generation) for request, generation in zip(requests, done, strict=True)]
        return State(rows, PositionCache(0), Streams([r.seed for r in requests], torch.device("cpu")))


def run(
    path: Path,
    decoder: FakeDecoder,
    *,
    seed: int = 0,
    settings: dict[str, object] | None = None,
    prompts: list[tuple[str, list[int]]] = PROMPTS,
) -> list[Response]:
    return list(
        regenerate(
            path=path,
            settings=settings or SETTINGS,
            prompts=prompts,
            decoder=decoder,  # type: ignore[arg-type]
            sampling=GREEDY,
            stop_ids=(1,),
            max_new_tokens=8,
            batch_size=4,
            seed=seed,
            describe=str,
        )
    )


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("cut", [1, 9, 40, 133, 500])
@pytest.mark.parametrize("die_at", [1, 2, 4, 6])
def test_interrupted_equals_unbroken(tmp_path: Path, die_at: int, cut: int) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    expected = run(whole, FakeDecoder())
    with pytest.raises(KeyboardInterrupt):
        run(broken, FakeDecoder(die_at))
    broken.write_bytes(broken.read_bytes()[:-cut])  # a torn tail, as kill -9 leaves it
    assert run(broken, FakeDecoder()) == expected
    assert sorted(map(str, rows(broken))) == sorted(map(str, rows(whole)))


def test_finished_file_is_only_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first, decoder = run(path, FakeDecoder()), FakeDecoder()
    assert run(path, decoder) == first
    assert decoder.calls == 0
    assert [r.id for r in first] == [name for name, _ in PROMPTS]


@pytest.mark.slow
def test_two_runs_at_once_share_the_file(tmp_path: Path) -> None:
    """The second waits for the first and generates nothing twice."""
    path = tmp_path / "r.jsonl"
    expected = run(tmp_path / "alone.jsonl", FakeDecoder())

    class Slow(FakeDecoder):
        def start(self, requests: Sequence[Request]) -> State:
            time.sleep(0.2)
            return super().start(requests)

    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            run(path, Slow())
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert sorted(map(str, rows(path))) == sorted(map(str, rows(tmp_path / "alone.jsonl")))
    assert run(path, FakeDecoder()) == expected


def test_seed_and_settings_matter(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert run(path, FakeDecoder()) != run(tmp_path / "s.jsonl", FakeDecoder(), seed=1)
    with pytest.raises(UserError, match="other settings"):
        run(path, FakeDecoder(), settings={"target": "another"})
    assert prompt_seed(0, "a") != prompt_seed(0, "b")


def test_malformed_inner_row_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, FakeDecoder())
    lines = path.read_text().splitlines()
    lines[3] = "{oops"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"r\.jsonl, line 4"):
        read_responses(path, SETTINGS)


@pytest.mark.parametrize("first", ["{oops", '{"id": "p0"}', "[]"])
def test_a_malformed_first_row_is_not_to_be_deleted(tmp_path: Path, first: str) -> None:
    """Without it the next row would stand for the settings."""
    path = tmp_path / "r.jsonl"
    run(path, FakeDecoder())
    path.write_text("\n".join([first, *path.read_text().splitlines()[1:]]) + "\n")
    with pytest.raises(UserError, match=r"line 1 is malformed.*move the file away"):
        run(path, FakeDecoder())


def test_a_changed_prompt_is_answered_anew_and_the_others_keep_theirs(tmp_path: Path) -> None:
    path, edited = tmp_path / "r.jsonl", [*PROMPTS]
    before = run(path, FakeDecoder())
    edited[7] = ("p7", [99, 98])
    decoder = FakeDecoder()
    after = run(path, decoder, prompts=edited)
    assert decoder.prompts == [[99, 98]]
    assert (after[7].prompt_tokens, after[7].tokens[0]) == ([99, 98], 99)
    assert [r for i, r in enumerate(after) if i != 7] == [r for i, r in enumerate(before) if i != 7]
    assert run(path, decoder) == before  # the old answer is not lost either
    assert decoder.calls == 1


def test_added_prompts_alone_are_generated(tmp_path: Path) -> None:
    path, more = tmp_path / "r.jsonl", [(f"new{i}", [50 + i] * (1 + i)) for i in range(6)]
    before, decoder = run(path, FakeDecoder()), FakeDecoder()
    after = run(path, decoder, prompts=[*more, *PROMPTS])
    assert sorted(decoder.prompts) == sorted(ids for _, ids in more)
    assert after[6:] == before
    assert [r.id for r in after[:6]] == [name for name, _ in more]


def test_two_files_of_one_name_share_the_cache_in_peace(tmp_path: Path) -> None:
    path, other = tmp_path / "r.jsonl", [(name, [60 + i, i]) for i, (name, _) in enumerate(PROMPTS)]
    decoder = FakeDecoder()
    for _ in range(2):
        for prompts in (PROMPTS, other):
            got = run(path, decoder, prompts=prompts)
            assert [(r.id, r.prompt_tokens) for r in got] == prompts
            assert [r.tokens[0] for r in got] == [ids[0] for _, ids in prompts]
    assert decoder.calls == 12  # six batches of each, once


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("jacobi_forcing", "use python -m data.collect"), ("cllm", "use python -m data.collect"),
     ("ar_base", "there is nothing to regenerate"), ("as_arm", "there is nothing to regenerate")],
)  # fmt: skip
def test_data_that_reads_no_responses_generates_none(
    recipe: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPEC_CACHE", str(tmp_path))
    few = ["data.counts={problems: 40, functions: 20}", "target.vocab_size=300"] if recipe == "ar_base" else []
    monkeypatch.setattr(sys, "argv", ["data.regenerate", f"recipe={recipe}", *few, f"hydra.run.dir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "responses").exists()
