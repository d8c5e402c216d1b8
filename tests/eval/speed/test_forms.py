"""The benchmark of dspec's own forms: each pair computes the same, and the command leaves its numbers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec.models.language_model import LanguageModel, ModelOutput
from eval.speed.forms import __main__ as forms
from eval.speed.forms.__main__ import added_memory, cases, main

SMALL = cases(small=True)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, ModelOutput):
        return [result.hidden_BLD]
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_both_forms_compute_the_same(name: str) -> None:
    pair = SMALL[name][0](torch.float32)
    plain, ours = _tensors(pair.plain()), _tensors(pair.ours())
    assert len(plain) == len(ours) > 0
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["any-subset, 95 % of 64", "ASSD, 128 of 1024"])
def test_without_a_cache_every_pass_computes_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it writes the same tokens, in as many passes."""
    pair, seen = SMALL[name][0](torch.float32), list[tuple[int, bool]]()
    any_subset = LanguageModel.any_subset

    def watched(self: LanguageModel, ids_BL: Tensor, **rest: Any) -> Tensor:
        seen.append((ids_BL.shape[1], rest["cache"] is not None))
        return any_subset(self, ids_BL, **rest)

    monkeypatch.setattr(LanguageModel, "any_subset", watched)
    answers, passes = [], []
    for form in (pair.plain, pair.ours):
        seen.clear()
        answers.append(_tensors(form())[0].tolist())
        passes.append(list(seen))
    plain, ours = passes
    assert answers[0] == answers[1]
    assert len(plain) == len(ours) > 1
    assert not any(cached for _, cached in plain)
    assert all(cached for _, cached in ours)
    assert plain[0][0] == ours[0][0]  # the first pass has nothing to read
    assert plain[-1][0] > ours[-1][0]
    assert sum(width for width, _ in plain) > sum(width for width, _ in ours)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(forms, "check_bfloat16", lambda: None)
    monkeypatch.setattr(forms, "_peak", lambda name, dtype, form, args: {"plain": 80.0, "ours": 20.0}[form])
    threads = str(torch.get_num_threads())
    arguments = ["--small", "--repeats", "2", "--threads", threads, "--out", str(tmp_path / "out.json")]
    main([*arguments, "--only", "loss V=152k", "LM head, 3 rows, V=32000"])
    written = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert written["run"]["config"]["repeats"] == 2
    assert {"git", "versions", "hardware"} <= written["run"].keys()
    rows = {(row["case"], row["dtype"]): row for row in written["rows"]}
    assert len(rows) == 3
    for row in rows.values():
        times = row["milliseconds"]
        assert row["time"] == pytest.approx(times["ours"] / times["plain"])
    assert rows["loss V=152k", "float32"]["memory"] == 0.25
    assert rows["LM head, 3 rows, V=32000", "float32"]["memory"] is None
    assert "below 1 is a gain" in capsys.readouterr().out
    for wrong, words in ((["--only", "nothing"], "no case starts with nothing"), (["--repeats", "0"], "at least 1")):
        with pytest.raises(SystemExit) as end:
            main([*arguments, *wrong])
        assert end.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.skipif(not forms._STATUS.is_file(), reason="no /proc")
def test_added_memory() -> None:
    """A form that needs 64 MiB is seen to."""

    def build(dtype: torch.dtype) -> Any:
        return SimpleNamespace(ours=lambda: torch.ones(2**24, dtype=dtype).sum())

    assert added_memory(build, torch.float32, "ours") > 60
