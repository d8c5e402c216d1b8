"""python -m eval.speed: its numbers on what can be counted by hand, what it leaves, and how it refuses."""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.decoding.any_subset.decoder import AnySubset, AnySubsetConfig
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Pass, Request, make_requests
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import GREEDY
from dspec.decoding.state import State
from dspec.errors import UserError
from dspec.models.checkpoint import save_pretrained
from dspec.models.draft import build_draft
from dspec.models.language_model import embedded_target
from dspec.spans import Profile, span
from eval.rows import counts
from eval.samples import Sample
from eval.speed.__main__ import main
from eval.speed.costs import achieved_over_ideal, draft_cost, round_profile, speeds, tau_by_position, verify_cost
from eval.speed.tables import cost_table, position_text, round_tables, speed_table, untrusted_notes

CPU = torch.device("cpu")
SMALL = {"tokens": [1, 2, 5], "contexts": [3, 9], "repeats": 2, "seed": 0}


def _greedy(prompts: Sequence[Sequence[int]], tokens: int) -> list[Request]:
    return make_requests(prompts, seeds=[0] * len(prompts), sampling=GREEDY, max_new_tokens=tokens, stop_ids=())


def sample(batch: int, tokens: int, seconds: float) -> Sample:
    return Sample(
        benchmark="b",
        temperature=0.0,
        decoder="d",
        batch=batch,
        id=f"{batch}/{tokens}",
        prompt_sha256="",
        text="",
        verdicts={},
        generation=Generation(tokens=[0] * tokens),
        seconds=seconds,
    )


def test_spans_nest_and_cost_nothing_unheard() -> None:
    with span("unheard"):
        pass
    with Profile(CPU) as profile:
        with span("a"):
            with span("b"):
                pass
            with span("b"):
                pass
        with pytest.raises(ZeroDivisionError), span("c"):
            _ = 1 // 0
    assert list(profile.seconds) == ["a/b", "a", "c"]
    assert profile.seconds["a"] >= profile.seconds["a/b"] > 0
    assert profile.path == []  # an error leaves no span open


PREFILL = Pass("prefill", 1)


def Round(drafted: int, accepted: int, valid: int, committed: int) -> Pass:  # noqa: N802  the tests' shorthand
    return Pass("verify", drafted=drafted, accepted=accepted, valid=valid, committed=committed)


def test_speeds_by_hand() -> None:
    rows = [sample(0, 10, 2.0), sample(0, 20, 2.0), sample(1, 30, 1.0)]  # 15/s and 30/s
    found = speeds(rows, price_per_hour=36.0)
    assert found == pytest.approx(
        {"average": 20, "max": 30, "top10": 22.5, "seconds_per_sample": 1.0, "latency": 1.5}
        | {"price_per_million": 0.01 / 20 * 1e6}
    )
    assert speeds(rows, price_per_hour=None)["price_per_million"] is None
    many = speeds([sample(i, 1 + i, 1.0) for i in range(20)], price_per_hour=None)
    assert many["top10"] == pytest.approx(sum(range(11, 21)) / 10)


def test_tau_by_position_by_hand() -> None:
    ended = Generation(
        tokens=[0] * 9,
        stopped=True,
        passes=[PREFILL, Round(4, 2, 4, 3), Round(4, 0, 4, 1), Round(4, 1, 4, 2), Round(4, 2, 2, 2)],
    )  # fmt: skip  rounds begin at 1, 4, 5, 7 and give 3, 1, 2 and (the stop was a draft) 2
    plain = Generation(tokens=[0] * 3, passes=[PREFILL, Round(4, 1, 2, 2)])
    assert tau_by_position([ended, plain], width=4) == [
        {"start": 0, "rounds": 2, "tau": 2.5},
        {"start": 4, "rounds": 3, "tau": pytest.approx(5 / 3)},
    ]
    (whole,) = tau_by_position([ended, plain], width=100)
    assert whole["tau"] == pytest.approx(counts([ended, plain])["tau"])


def test_tau_by_position_adds_up_to_tau(toys: SimpleNamespace) -> None:
    target, draft = toys.markov_pair(noise=0.01)
    texts = toys.prompts(random.Random(0), 4, vocab=24)
    stops = [toys.ar(target, texts, 12)[0][7]]
    decoder = toys.speculative(target=target, proposer=DraftProposer(draft), sampling=toys.GREEDY)
    generations = decoder.decode(texts, max_new_tokens=20, stop_ids=stops, seeds=[0] * 4)
    bins = tau_by_position(generations, width=5)
    rounds = sum(b["rounds"] for b in bins)
    assert rounds == sum(len(g.rounds) for g in generations)
    assert sum(b["rounds"] * b["tau"] for b in bins) / rounds == pytest.approx(counts(generations)["tau"])


def test_a_round_is_the_sum_of_its_spans(toys: SimpleNamespace) -> None:
    target, draft = toys.markov_pair(noise=0.01)
    texts = toys.prompts(random.Random(0), 3, vocab=24)
    lines = {}
    for name, decoder in {
        "ar": toys.autoregressive(target=target, sampling=toys.GREEDY),
        "on": toys.speculative(target=target, proposer=DraftProposer(draft), sampling=toys.GREEDY),
        "refined": toys.speculative(
            target=target, proposer=DraftProposer(draft, refinement_passes=2), sampling=toys.GREEDY
        ),
    }.items():
        line = round_profile(decoder.decoder, _greedy(texts, 12), device=CPU, batch_size=1)
        outer = [ms for path, ms in line["spans"].items() if "/" not in path]
        assert sum(outer) + line["between spans"] == pytest.approx(line["milliseconds"])
        assert min(*outer, line["between spans"], line["unsynchronised"]) > 0
        assert 0 < line["spans"]["target/attention"] < line["spans"]["target"]
        lines[name] = line
    assert lines["ar"]["rounds"] == 3 * 11
    assert lines["on"]["rounds"] < 3 * 11
    drafted = {"draft", "draft LM head", "sequential head", "draft context", "bookkeeping"}
    assert drafted <= lines["on"]["spans"].keys() - lines["ar"]["spans"].keys()
    with pytest.raises(UserError, match="no round to profile"):
        round_profile(decoder.decoder, _greedy(texts, 1), device=CPU, batch_size=1)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("diffusion", {"tokens_per_step": 1, "block_size": None, "attention": None}),
        ("d2f", {"block_size": 8, "append_ratio": 0.1, "activate_ratio": 0.95, "threshold": 0.9}),
    ],
)
def test_diffusion_decoding_has_no_prefill(toys: SimpleNamespace, kind: str, settings: dict[str, Any]) -> None:
    """All of its passes are rounds; a request for one token would be shorter than a block."""
    decoder = toys.build_decoder(kind, target=toys.target(vocab=24), **settings)
    requests = _greedy(toys.prompts(random.Random(0), 2, vocab=20), 8)
    line = round_profile(decoder, requests, device=CPU, batch_size=1)
    assert line["rounds"] == sum(g.nfe for g in decode(decoder, requests))
    outer = [ms for path, ms in line["spans"].items() if "/" not in path]
    assert sum(outer) + line["between spans"] == pytest.approx(line["milliseconds"])
    assert min(line["spans"]["target"], line["spans"]["target LM head"], line["unsynchronised"]) > 0


def test_filling_in_is_profiled_at_the_positions_asked_for(toys: SimpleNamespace) -> None:
    """Positions are cut with the tokens where only the first token is wanted."""
    target = toys.target()
    holes = [replace(r, positions=[0, 3, 5, 1, 2, 4, 6]) for r in _greedy([[1, 2, 3], [4, 5, 6]], 4)]
    config = AnySubsetConfig(num_drafts=1, drafted_by="model", bonus=False, tolerance=0.0)
    assert round_profile(AnySubset(target=target, config=config), holes, device=CPU, batch_size=2)["rounds"] == 2 * 3


def test_rounds_are_profiled_at_the_batch_size_in_use(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share a pass: the spans of each pass are counted once, its rounds once a row."""
    target, batches = toys.target(), []
    start = Autoregressive.start

    def seen(self: Autoregressive, requests: Sequence[Request]) -> State:
        batches.append((len(requests), requests[0].max_new_tokens))
        return start(self, requests)

    monkeypatch.setattr(Autoregressive, "start", seen)
    line = round_profile(
        Autoregressive(target=target), _greedy([[1], [2, 3], [4], [5], [6]], 7), device=CPU, batch_size=2
    )
    assert line["rounds"] == 5 * 6
    assert [size for size, new in batches if new == 1] == [2, 2, 1]
    assert {size for size, _ in batches} == {1, 2}


def test_ideal_speedup_by_hand() -> None:
    base = {"spans": {"target": 3.0, "target LM head": 1.0, "sampling": 9.0}}
    own = {"spans": {"target": 4.0, "target LM head": 1.0, "draft": 2.0, "sequential head": 1.0, "bookkeeping": 7.0}}
    assert achieved_over_ideal(4.0, 1.5, base, own) == pytest.approx(
        {"T_ar": 4.0, "T_verify": 5.0, "T_draft": 3.0, "ideal": 2.0, "achieved": 0.75}
    )


def test_costs_of_every_size(toys: SimpleNamespace) -> None:
    target = toys.target(positions=16)
    for layout, sizes in (("anchor_first", [1, 2, 5]), ("fill_in", [2, 5])):
        draft = toys.draft(target, block=4, layout=layout, head="rnn" if layout == "anchor_first" else None)
        found = draft_cost(target, draft, **SMALL)
        assert [(line["context"], line["tokens"]) for line in found] == [(c, k) for c in (3, 9) for k in sizes]
        assert all(line["ratio"] == 1 for line in found if line["tokens"] == sizes[0])
        assert all((line["sequential_head"] > 0) == (layout == "anchor_first") for line in found)
        assert draft.config.block_size == 4  # measured at other sizes, left as it was
    found = verify_cost(target, **SMALL)
    assert [(line["context"], line["tokens"]) for line in found] == [(c, k) for c in (3, 9) for k in (1, 2, 5)]
    for line in found:
        least = next(other for other in found if other["context"] == line["context"])
        whole = (line["attention"] + line["rest"] + line["lm_head"]) / (least["forward"] + least["lm_head"])
        assert line["ratio"] == pytest.approx(whole)
    for wrong in ({"tokens": [1, 8]}, {"contexts": [12]}, {"tokens": [2, 1]}, {"contexts": [0]}):
        with pytest.raises(UserError, match=r"speed\.contexts"):
            verify_cost(target, **SMALL | wrong)


def test_the_tables_fit_80_columns() -> None:
    methods = ["AR", "mine, K=2 + recycling", "mine, refined once", "mine, refined twice", "prompt lookup"]
    spans = {"target": 12.34, "target/attention": 3.21, "target LM head": 4.56, "draft context": 1.23}
    rounds = [
        {"method": m, "baseline": "autoregressive", "benchmark": "problems_unseen", "batch_size": 16,
         "spans": spans, "between spans": 0.5,
         "milliseconds": 123.45, "unsynchronised": 120.0,
         "ideal": None if m == "AR" else {"ideal": 2.5, "achieved": 0.8}}
        for m in methods
    ]  # fmt: skip
    bins = [{"start": 32 * i, "rounds": 1234, "tau": 12.34} for i in range(16)]
    speeds = [
        {"method": m, "benchmark": "problems_unseen", "temperature": 1.0, "quality": 1.0, "tau": 12.34,
         "baseline": "autoregressive",
         "speedup": 12.34, "average": 12345.6, "max": 12345.6, "top10": 12345.6, "seconds_per_sample": 123.456,
         "price_per_million": 123.45, "tau_by_position": bins}
        for m in methods
    ]  # fmt: skip
    costs = [
        {"context": c, "tokens": k, "attention": 123.45, "rest": 1234.56, "lm_head": 123.45, "ratio": 123.45}
        for c in (64, 4096) for k in (1, 256)
    ]  # fmt: skip
    texts = [
        speed_table(speeds, trusted=False),
        round_tables(rounds, trusted=False),
        cost_table("verify K tokens", costs, ("attention", "rest", "lm_head")),
        position_text(speeds, 32),
    ]
    for text in texts:
        assert max(map(len, text.splitlines())) <= 80
    assert texts[0].count("12.34*") == len(methods)
    assert texts[1].count("2.50*") == len(methods) - 1
    assert "*" not in speed_table(speeds, trusted=True) + round_tables(rounds, trusted=True)
    assert untrusted_notes(speeds, trusted=True) == ""
    others = [line | {"baseline": "diffusion"} for line in speeds]  # AR's check says nothing of it
    text = speed_table(others, trusted=True)
    assert "x diffusion" in text
    assert "AR" not in text.splitlines()[0]
    assert text.count("12.34*") == len(methods)
    assert round_tables([r | {"baseline": "diffusion"} for r in rounds], trusted=True).count("2.50*") == 4
    assert untrusted_notes(others, trusted=True).startswith("* diffusion cannot be timed")
    assert texts[1].count("between spans") == 2  # four decoders abreast, the fifth below
    assert "verify K tokens after L=4096 tokens, ms" in texts[2]
    assert texts[3].count("480+: 12.34 (1234)") == len(methods)


FEW = [
    "limit=2", "evaluation.generate_prompts=1", "evaluation.generate_floor=0.0", "evaluation.warmup=1",
    "benchmark.problems.max_new_tokens=24", "~benchmark.functions",
    "speed.tokens=[1,4]", "speed.contexts=[8]", "speed.repeats=1", "speed.position_width=8",
]  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["eval.speed", *FEW, *args, f"hydra.run.dir={folder}"])
    main()
    return json.loads((folder / "speed.json").read_text())


@pytest.mark.slow
def test_report_of_a_drafter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    target = embedded_target(dtype="float32", device="cpu")
    draft = build_draft(
        target=target, num_layers=1, intermediate_size=None, block_size=4, layout="anchor_first", num_taps=2,
        target_layer_ids=None, markov_head_type="vanilla", markov_rank=8, confidence_head=False,
        confidence_head_with_markov=False,
    )  # fmt: skip
    save_pretrained(draft, tmp_path / "draft", card="made by a test")
    args = ("target=tiny", f"checkpoint={tmp_path / 'draft'}", "label=mine", "speed.price_per_hour=3")
    found = call(monkeypatch, tmp_path / "run", *args)
    assert [line["method"] for line in found["speeds"]] == ["AR", "mine", "mine, refined once", "mine, refined twice"]
    assert all(line["quality"] is not None and line["price_per_million"] > 0 for line in found["speeds"])
    passes = {line["method"]: line["spans"].get("draft", 0.0) for line in found["rounds"]}
    assert passes["AR"] == 0.0 < passes["mine"]
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["decoder"].get("refinement_passes") for row in rows] == [None, None, 1, 2]
    assert all(row["mismatches"] == 0 for row in rows)
    assert {p.name for p in (tmp_path / "run" / "plots").iterdir()} >= {
        "rounds.png", "costs.png", "tau_by_position.png",
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert "sequential head" in shown
    assert "verify K tokens" in shown


@pytest.mark.slow
def test_report_without_a_drafter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = call(monkeypatch, tmp_path, "target=tiny", "decoder=prompt_lookup")
    assert [line["method"] for line in found["speeds"]] == ["AR", "prompt lookup"]
    assert found["draft_cost"] == []
    assert "lookup" in found["rounds"][1]["spans"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["target=tiny"], ["needs a drafter"]),
        (["target=tiny", "decoder=prompt_lookup", "speed.repeats=0"], ["speed.repeats=0", "at least 1"]),
        (["target=tiny", "decoder=prompt_lookup", "speed.price_per_hour=-1"], ["price_per_hour", "above 0"]),
        (["target=tiny", "decoder=prompt_lookup", "speed.contexts=[4096]"], ["4096", "1024 positions"]),
        (["target=tiny", "decoder=prompt_lookup", "+speedd.x=1"], ["unknown key speedd"]),
    ],
)
def test_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, args: list[str], words: list[str]
) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, tmp_path, *args)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert all(word in line for word in words), line
