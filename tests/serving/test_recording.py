"""Recorded traces: what a decoder keeps of its rounds, on disk and back, and what is refused."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspec.decoding.generation import make_requests
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import VerifyAll
from dspec.errors import UserError
from dspec.serving.recording import RecordedOn, Recording, read_recording
from dspec.serving.traces import Replay, Round, Trace, record

ABOUT = RecordedOn(
    target="toy",
    drafter="toy drafter",
    temperature=1.0,
    top_p=1.0,
    seed=3,
    concurrency=4,
    slots=2,
    every_position=False,
    dtype="float64",
    threads=1,
    hardware={"cpu": "abacus"},
    git={"sha": None},
    versions={},
)
ROUNDS = (
    Round((0.1, -1e-7), 1, 2, 2, top=(-0.5, -2.0), entropy=(0.3, 0.0)),
    Round((3.0, 1 / 3), 0, 1, 1, top=(-0.1, -0.2), entropy=(0.1, 0.2)),
)
TRACES = (Trace(ROUNDS, "a/1", "problems", 12), Trace((), "b/1", "stories", 7), Trace(ROUNDS[:1], "a/2", "problems", 3))


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "traces.jsonl"
    recording = Recording(ABOUT, TRACES)
    recording.write(path)
    assert read_recording(path) == recording
    assert recording.domains == ["problems", "stories"]
    assert [trace.id for trace in recording.only("problems").traces] == ["a/1", "a/2"]
    with pytest.raises(UserError, match="no recorded answers of poems: the recording has problems, stories"):
        recording.only("poems")
    greedy = Recording(replace(ABOUT, temperature=0.0), (Trace((Round((0.1, 0.2), 0, 1, 2),), "a", "b", 1),))
    greedy.write(path)
    assert read_recording(path) == greedy


def broken(line: int, change: Any) -> Any:
    def write(path: Path) -> None:
        rows = [json.loads(text) for text in path.read_text().splitlines()]
        change(rows[line])
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    return write


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "cannot read recorded traces"),
        (lambda path: path.write_bytes(b"\xff\xfe\xff"), "cannot read recorded traces"),
        (lambda path: path.write_text(""), "line 1 is no recorded answer"),
        (lambda path: path.write_text(path.read_text().splitlines()[0]), "no recorded answers: record them again"),
        (lambda path: path.write_text(path.read_text()[:-9]), "line 4 is no recorded answer"),
        (broken(0, lambda row: row["recording"].pop("drafter")), "line 1 .*drafter"),
        (broken(0, lambda row: row["recording"].update(slots=0)), "line 1 .*slots=0"),
        (broken(0, lambda row: row["recording"].update(temperature=float("nan"))), "line 1 .*temperature=nan"),
        (broken(1, lambda row: row["rounds"]["logits"][0].pop()), "line 2 .*1 values"),
        (broken(1, lambda row: row["rounds"]["top"][1].__setitem__(0, float("inf"))), "line 2 .*not finite"),
        (broken(1, lambda row: row["rounds"]["accepted"].pop()), "line 2 .*longer"),
        (broken(1, lambda row: row["rounds"]["accepted"].__setitem__(1, 2)), "line 2 .*accepted=2"),
        (broken(1, lambda row: row["rounds"]["committed"].__setitem__(0, 0)), "line 2 .*committed=0"),
        (broken(1, lambda row: row["rounds"]["valid"].__setitem__(0, 1.5)), "line 2 .*1.5 is no count"),
        (broken(2, lambda row: row.update(domain=4)), "line 3 .*domain=4"),
        (broken(2, lambda row: row.update(rounds=None)), "line 3 "),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, spoil: Any, message: str) -> None:
    path = tmp_path / "traces.jsonl"
    Recording(ABOUT, TRACES).write(path)
    spoil(path)
    with pytest.raises(UserError, match=message) as refused:
        read_recording(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_keep_what_the_drafter_thought(toys: SimpleNamespace, temperature: float) -> None:
    """Confidence of all slots; of sampled drafts also the likeliest token's log-probability, and the entropy."""
    target = toys.target("qwen3", seed=2)
    draft = toys.draft(target, seed=3, block=4, head="vanilla", confidence=True, scale=0.4)
    texts = toys.prompts(random.Random(0), 3, vocab=11)
    drawn: list[torch.Tensor] = []

    class Watching(DraftProposer):
        def propose(self, *args: Any, **options: Any) -> Any:
            proposal = super().propose(*args, **options)
            if proposal.probs_BJV is not None:
                drawn.append(proposal.probs_BJV[0])
            return proposal

    decoder = Speculative(
        target=target,
        proposer=Watching(draft),
        policy=VerifyAll(),
        record_confidence=True,
        record_distributions=True,
    )
    sampling = Sampling(temperature=temperature, top_p=1.0)
    requests = make_requests(texts, seeds=range(3), sampling=sampling, max_new_tokens=9, stop_ids=[])
    (first, *_) = record(decode(decoder, requests))
    for one, probs in zip(first.rounds, drawn or [None] * 99, strict=False):
        assert len(one.logits) == 4
        assert one.valid <= 4
        if probs is None:
            assert one.top == one.entropy == ()
        else:
            assert one.top == pytest.approx(probs.max(-1).values.log().tolist())
            assert one.entropy == pytest.approx((-(probs * probs.log()).sum(-1)).tolist())
    plain = Speculative(target=target, proposer=DraftProposer(draft), policy=VerifyAll(), record_confidence=True)
    assert all(r.top == () for r in decode(plain, requests)[0].rounds)


def test_a_round_at_each_position_is_replayed_as_it_is() -> None:
    """Also those past a drafted stop: their confidences are what a scheduler would see."""
    rounds = (Round((9.0, -9.0), 1, 1, 2), Round((1.0, 2.0), 0, 1, 2), Round((3.0, 4.0), 1, 1, 1))
    answer = Replay([Trace(rounds)], slots=2, temperatures=None).answer(np.random.default_rng(0))
    assert answer.tokens == 4
    for at, one in enumerate(rounds, 1):
        sure, accepted = answer.draft(at)
        assert accepted == one.accepted
        assert sure == pytest.approx(1 / (1 + np.exp(-np.array(one.logits))))
