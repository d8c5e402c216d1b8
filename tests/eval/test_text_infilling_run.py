"""`python -m eval.run` on a benchmark without verdicts: scores in samples, rows and tables, and the comparison."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.reports.samplers import main
from eval.rows import mean_and_error


def test_scores_from_samples_to_the_comparison(
    eval_run: Callable[..., SimpleNamespace],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoders = "decoder=[any_subset,assd,sigma_gpt]"
    found = eval_run(decoders, "benchmark=tiny_text_infilling", "~benchmark.stories_95", "benchmark.stories_40.count=2")
    by_name: dict[str, Any] = {row["decoder"]["name"]: row for row in found.rows}
    assert list(by_name) == ["any_subset", "assd", "sigma_gpt"]
    for name, row in by_name.items():
        samples = [s for s in found.samples if s["decoder"] == name]
        assert len(samples) == row["n"] == 2
        assert row["quality"] is None
        assert list(row["scores"]) == ["gen_ppl", "nll", "entropy"]
        for score, got in row["scores"].items():
            assert got == pytest.approx(mean_and_error([s["scores"][score] for s in samples]))
    assert by_name["assd"]["scores"] == by_name["any_subset"]["scores"]  # greedy: the same texts
    assert [row["lossless"] for row in by_name.values()] == [True, True, False]
    assert found.run["benchmarks"]["stories_40"]["gold_length"]
    assert all(row["gold_length"] is True for row in found.rows)
    shown, folder = capsys.readouterr().out, tmp_path / "run"
    assert "gen_ppl" in shown
    assert "stories_40, T=0, 2 prompts, gold length" in shown
    assert "gen_ppl" in (folder / "table.md").read_text()
    assert "gen_ppl_mean" in (folder / "table.csv").read_text()

    monkeypatch.setattr(sys, "argv", ["eval.samplers", str(folder)])
    main()
    assert "sigma-GPT (biased)~" in capsys.readouterr().out
    _, assd, _ = json.loads((folder / "samplers.json").read_text())["samplers"]
    assert assd["measures"]["gen_ppl"]["paired"] == {"difference": 0, "n": 2, "t_p": 1, "wilcoxon_p": 1}
    assert assd["measures"]["nfe"]["paired"]["difference"] < 0


def test_a_folder_of_no_run_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.samplers", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == f"error: {tmp_path}/results.json is missing: pass folders of finished runs\n"
