"""Comparing runs: pooling, pairing by seed and by prompt, and runs that differ in a setting alone."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dspec.errors import UserError
from eval.intervals import student
from eval.reports.comparison import compare, outcomes
from eval.reports.schedules import ablation
from eval.results import SCHEMA, load, pool, pool_rows


def made(
    folder: Path,
    method: str,
    seed: int,
    taus: Sequence[tuple[float, int]],
    *,
    config: dict[str, Any] | None = None,
    right: Sequence[bool] = (True, False),
    trusted: bool | None = True,
) -> Path:
    """A run folder as schema 1 had it, with a benchmark for each (tau, rounds), a prompt for each of `right`, and plain
    AR beside."""
    folder.mkdir()
    rows, samples = [], []
    n = len(right)
    for i, (tau, rounds) in enumerate(taus):
        for name, own in (("speculative", tau), ("autoregressive", None)):
            forwards = rounds if own else round(tau * rounds)
            rows.append({
                "method": method if own else "AR", "target": "tiny", "benchmark": f"b{i}",
                "quality": sum(right) / n, "quality_name": "ok", "n": n,
                "decoder": {"name": name, "temperature": 0.0}, "tau": own, "tpf": own or 1.0,
                "tokens": n + round(tau * rounds), "nfe": forwards + n, "nfe_prefill": n,
                "positions_computed": forwards, "branch_forwards": forwards, "speedup": tau / 2 if own else 1.0,
            })  # fmt: skip
            verdicts = right if own else (True, False)
            samples += [
                {"decoder": name, "benchmark": f"b{i}", "temperature": 0.0, "id": str(n), "verdicts": {"ok": verdict}}
                for n, verdict in enumerate(verdicts)
            ]
    run = {
        "seed": seed,
        "ar_check": {"trusted": trusted},
        "config": {"seed": seed, "data": {"seed": seed}, **(config or {})},
    }
    (folder / "results.json").write_text(json.dumps({"run": run, "rows": rows}))
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, [{"settings": {}}, *samples])) + "\n")
    return folder


def test_metrics_are_pooled_over_rounds(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", "a", 0, [(2.0, 30), (4.0, 10)])
    outcome = outcomes([(folder, load(folder))])["a", 0.0][0]
    assert outcome.metrics == {"tau": 2.5, "tpf": 2.5, "speedup": 1.5}
    assert list(outcome.right.values()) == [True, False] * 2


def test_a_file_of_schema_1_is_read_in_todays_form(tmp_path: Path) -> None:
    """It had no counts of rounds and of the tokens that prefills emitted: one per prompt, whatever the decoder."""
    folder = made(tmp_path / "a", "a", 0, [(2.5, 30)])
    old = json.loads((folder / "results.json").read_text())
    assert "schema" not in old
    assert "baseline" not in old["rows"][0]
    found = load(folder)
    assert found["schema"] == SCHEMA
    speculative, ar = found["rows"]
    assert (speculative["prefill_tokens"], speculative["rounds"]) == (2, 30)
    assert (ar["prefill_tokens"], ar["rounds"]) == (2, 0)
    assert speculative["baseline"] == ar["baseline"] == "autoregressive"
    for row in old["rows"]:
        row["serial"] = "base_autoregressive"  # as later files of schema 1 had it
    (folder / "results.json").write_text(json.dumps(old))
    assert {row["baseline"] for row in load(folder)["rows"]} == {"base_autoregressive"}
    assert pool([speculative])["tau"] == 2.5
    assert pool([ar]) == {**pool([ar]), "tau": None, "tpf": 1.0}
    newer = json.loads((folder / "results.json").read_text()) | {"schema": SCHEMA + 1}
    (folder / "results.json").write_text(json.dumps(newer))
    with pytest.raises(UserError, match="update dspec"):
        load(folder)


def test_a_file_of_schema_2_is_read_in_todays_form(tmp_path: Path) -> None:
    """It said `serial` for `baseline`; its counts are today's."""
    folder = made(tmp_path / "a", "a", 0, [(2.5, 30)])
    old = json.loads((folder / "results.json").read_text()) | {"schema": 2}
    for row in old["rows"]:
        row |= {"serial": "any_subset", "prefill_tokens": 0, "rounds": 7}
    (folder / "results.json").write_text(json.dumps(old))
    found = load(folder)
    assert found["schema"] == SCHEMA
    assert [(row["baseline"], row["prefill_tokens"], row["rounds"]) for row in found["rows"]] == [
        ("any_subset", 0, 7)
    ] * 2
    assert all("serial" not in row for row in found["rows"])
    assert "x any_subset 1.25*" in (text := compare([folder]))  # no table calls that AR
    assert "* any_subset fell behind transformers' generate, or was not timed" in text


def test_whatever_uses_the_gold_length_says_so(tmp_path: Path) -> None:
    """Files from before rows had it say so in the benchmark's provenance."""
    folder = made(tmp_path / "a", "a", 0, [(2.5, 30), (2.0, 30)])
    assert "gold length" not in compare([folder])
    results = json.loads((folder / "results.json").read_text())
    results["run"]["benchmarks"] = {"b0": {"gold_length": False}, "b1": {"gold_length": True}}
    (folder / "results.json").write_text(json.dumps(results))
    assert [(row["benchmark"], row["gold_length"]) for row in load(folder)["rows"][::2]] == [
        ("b0", False),
        ("b1", True),
    ]
    assert "\ngold length, b1: decoders are told how many tokens" in compare([folder])


def test_decoders_whose_passes_are_not_rounds_are_pooled_by_their_own_counts(tmp_path: Path) -> None:
    """A denoising decoder: several passes per round, and a prefill that emits nothing."""
    folder = made(tmp_path / "a", "a", 0, [(2.0, 30), (4.0, 10)])
    results = json.loads((folder / "results.json").read_text()) | {"schema": SCHEMA}
    for row in results["rows"]:
        row |= {"tokens": 90, "prefill_tokens": 0, "nfe": 32, "nfe_prefill": 2, "rounds": 15 if row["tau"] else 0}
        row["baseline"] = "autoregressive"
    (folder / "results.json").write_text(json.dumps(results))
    metrics = outcomes([(folder, load(folder))])["a", 0.0][0].metrics
    assert metrics == {"tau": 180 / 30, "tpf": 180 / 60, "speedup": 1.5}


def test_a_benchmark_weighs_by_its_prompts(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", "a", 0, [(2.0, 30), (4.0, 30)])
    results = json.loads((folder / "results.json").read_text())
    for row in results["rows"]:
        row |= {"n": 6, "quality": 1.0} if row["benchmark"] == "b1" else {"quality": 0.0}
    pooled = pool_rows([row | {"prefill_tokens": 0, "rounds": 1} for row in results["rows"][::2]])
    assert (pooled["speedup"], pooled["quality"]) == ((2 * 1.0 + 6 * 2.0) / 8, 6 / 8)
    nobody_judged = [row | {"prefill_tokens": 0, "rounds": 1, "quality": None} for row in results["rows"]]
    assert pool_rows(nobody_judged)["quality"] is None
    hidden = [row | {"speedup": None} if row["benchmark"] == "b1" else row for row in results["rows"]]
    (folder / "results.json").write_text(json.dumps(results | {"rows": hidden}))
    assert "x AR" not in compare([folder]).splitlines()[2]


def test_two_answers_of_a_decoder_to_a_prompt_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", "a", 0, [(2.0, 10)])
    lines = (folder / "samples.jsonl").read_text().splitlines()
    (folder / "samples.jsonl").write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(UserError, match="two answers to 0"):
        compare([folder])


def test_answers_may_hold_any_character(tmp_path: Path) -> None:
    """Also those at which Python ends a line of text; bytes that are no UTF-8 are named by line."""
    folder = made(tmp_path / "a", "a", 0, [(2.0, 30)])
    path, before = folder / "samples.jsonl", compare([folder])
    first, *rows = path.read_text().splitlines()
    odd = [json.dumps(json.loads(row) | {"text": "a\u2028b\x85c\x1c"}, ensure_ascii=False) for row in rows]
    path.write_text("\n".join([first, *odd, ""]), encoding="utf-8")
    assert compare([folder]) == before
    path.write_bytes(path.read_bytes() + b'{"decoder": "\xff"}\n')
    with pytest.raises(UserError, match=f"line {len(rows) + 2} is malformed"):
        compare([folder])


def test_speedups_over_a_slow_ar_loop_are_marked(tmp_path: Path) -> None:
    folders = [made(tmp_path / "a", "a", 0, [(2.0, 10)]), made(tmp_path / "b", "b", 0, [(3.0, 10)], trusted=None)]
    text = compare(folders)
    assert "x AR 1.00\n" in text
    assert "x AR 1.50*\n" in text
    assert "x AR -0.50*" in text
    assert "* AR fell behind" in text
    assert "*" not in compare(folders[:1])


def test_interval_is_students() -> None:
    mean, low, high = student([1.0, 2.0, 3.0])
    assert mean == 2
    assert math.isclose(high - mean, 4.303 / 3**0.5)
    assert math.isclose(mean - low, high - mean)
    with pytest.raises(UserError, match="1 paired"):
        student([1.0])
    _, _, wide = student([0.0, 1.0] * 6)  # 11 degrees of freedom: 2.201
    assert math.isclose(wide - 0.5, 2.201 * (3 / 11) ** 0.5 / 12**0.5, rel_tol=1e-3)


def test_methods_over_seeds(tmp_path: Path) -> None:
    folders = [
        made(tmp_path / f"{method}{seed}", method, seed, [(2.0 + shift * (1 + seed / 10), 100)], right=right)
        for method, shift, right in (("a", 0.5, [True] * 3 + [False]), ("b", 0.0, [True, False, False, False]))
        for seed in range(3)
    ]
    text = compare(folders)
    assert "a (seed 0, 1, 2)" in text
    assert "tau by seed 0: 2.50, 1: 2.55, 2: 2.60" in text
    # differences 0.50, 0.55, 0.60: 0.55 +- 4.303 * 0.05 / sqrt(3)
    assert (
        "a − b (seed 0, 1, 2)\n      quality % +50.0 (-41.9 to +141.9), 4 prompts\n      tau +0.55 (+0.43 to +0.67)"
        in text
    )
    with pytest.raises(UserError, match="a folder is listed twice"):
        compare([folders[0], folders[0]])
    again = made(tmp_path / "again", "a", 0, [(2.5, 10)])
    with pytest.raises(UserError, match="two runs of 'a' have seed 0"):
        compare([folders[0], again])


def test_plain_ar_of_other_targets_or_prompts_has_its_own_line(tmp_path: Path) -> None:
    """AR of one target on the same prompts stands once beside several methods, any other AR beside it."""
    first = made(tmp_path / "first", "a", 0, [(2.0, 10)], config={"target": "one", "label": "a"})
    for change, name in (({"target": "two"}, "target=two"), ({"n": 5}, "limit=5")):
        other = made(tmp_path / name, "b", 0, [(2.0, 10)], config=dict([name.split("=")]) | {"label": "b"})
        results = json.loads((other / "results.json").read_text())
        results["rows"] = [row | change if row["method"] == "AR" else row for row in results["rows"]]
        (other / "results.json").write_text(json.dumps(results))
        text = compare([first, other])
        ours = [line for line in text.splitlines() if line.startswith("  AR ") and "−" not in line]
        assert len(ours) == 2
        assert any(name in line for line in ours)
    trained = []
    for schedule in ("one", "two"):  # weights that the run trained are its own
        folder = made(tmp_path / schedule, schedule, 0, [(2.0, 10)], config={"schedule": schedule})
        results = json.loads((folder / "results.json").read_text())
        (own,) = [row for row in results["rows"] if row["method"] == "AR"]
        base = own | {"method": "AR base", "decoder": own["decoder"] | {"name": "base_autoregressive"}}
        samples = (folder / "samples.jsonl").read_text().splitlines()
        ar = [json.loads(line) for line in samples[1:] if json.loads(line)["decoder"] == own["decoder"]["name"]]
        copies = [json.dumps(row | {"decoder": "base_autoregressive"}) for row in ar]
        (folder / "samples.jsonl").write_text("\n".join([*samples, *copies]) + "\n")
        (folder / "results.json").write_text(json.dumps(results | {"rows": [*results["rows"], base]}))
        trained.append(folder)
    lines = compare(trained).splitlines()
    assert [line for line in lines if line.startswith("  AR base ") and "−" not in line] == ["  AR base (seed 0)"]
    assert len([line for line in lines if line.startswith("  AR schedule=") and "−" not in line]) == 2


def test_runs_that_differ_in_a_setting_alone(tmp_path: Path) -> None:
    """A sweep over block sizes with one seed: what differs names the runs, once, and AR is no method of its own."""
    folders = [
        made(
            tmp_path / str(size), "dspark", 0, [(2.0, 10)],
            config={"draft": {"block_size": size}, "decoder": {"build": {"block_size": size}}, "resume": str(size)},
        )
        for size in (4, 7)
    ]  # fmt: skip
    text = compare(folders)
    assert "  dspark draft.block_size=4 (seed 0)" in text
    assert "  dspark draft.block_size=4 − dspark draft.block_size=7 (seed 0)" in text
    assert "tau +0.00" in text
    assert text.count("  AR (seed 0)") == 1


def named(folder: Path, *configs: dict[str, Any], method: str = "a") -> list[str]:
    """What distinguishes runs of one method and seed with these configs, in the order of the table."""
    folder.mkdir()
    runs = [made(folder / f"run{i}", method, 0, [(2.0, 10)], config=config) for i, config in enumerate(configs)]
    lines = [line for line in compare(runs).splitlines() if line.startswith(f"  {method} ") and "−" not in line]
    return [line.removeprefix(f"  {method} ").removesuffix(" (seed 0)") for line in lines]


def scored(folder: Path, method: str, seed: int, ppl: Sequence[float], **config: Any) -> Path:
    """A run whose texts have a generative perplexity, and no verdicts; plain AR has neither."""
    made(folder, method, seed, [(2.0, 10)], config=config)
    results = json.loads((folder / "results.json").read_text())
    for row in results["rows"]:
        row["quality"] = row["quality_name"] = None
    (folder / "results.json").write_text(json.dumps(results))
    answer = {"decoder": "speculative", "benchmark": "b0", "temperature": 0.0, "verdicts": {}}
    samples = [answer | {"id": str(i), "scores": {"gen_ppl": p, "nll": p / 10}} for i, p in enumerate(ppl)]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, [{"settings": {}}, *samples])) + "\n")
    return folder


def test_scores_are_compared_by_prompt(tmp_path: Path) -> None:
    runs = [("a", 0, [10.0, 20.0, 30.0]), ("a", 1, [12.0, 22.0, 32.0]), ("b", 0, [9.0, 17.0, 28.0]),
            ("b", 1, [9.0, 19.0, 32.0])]  # fmt: skip
    lines = compare([scored(tmp_path / f"{m}{seed}", m, seed, ppl) for m, seed, ppl in runs]).splitlines()
    # over seeds a has 11, 21, 31: standard error 10 / sqrt(3); b has 9, 18, 30
    assert "      b0: gen_ppl 21.00 ± 5.774, nll 2.100 ± 0.577" in lines
    assert "      b0: gen_ppl 19.00 ± 6.083, nll 1.900 ± 0.608" in lines
    at = lines.index("  a − b (seed 0, 1)")
    # differences 2, 3, 1: 2 +- 4.303 / sqrt(3)
    assert lines[at + 1 : at + 3] == [
        "      b0: gen_ppl +2.000 (-0.484 to +4.484), 3 prompts",
        "      b0: nll +0.200 (-0.048 to +0.448), 3 prompts",
    ]
    assert "prompt (quality, scores)" in lines[-2]
    assert lines[-1] == "scores: mean ± standard error over prompts"


def test_scores_of_prompts_that_only_one_side_has_are_left_out(tmp_path: Path) -> None:
    runs = [scored(tmp_path / "a", "a", 0, [10.0, 20.0, 30.0]), scored(tmp_path / "b", "b", 0, [9.0, 18.0])]
    text = compare(runs)
    assert "b0: gen_ppl +1.500 (-4.853 to +7.853), 2 prompts" in text
    assert "gen_ppl 20.00 ± 5.774" in text
    assert "scores" not in compare([made(tmp_path / "c", "c", 0, [(2.0, 10)])])


def test_settings_that_follow_from_a_class_are_not_named_beside_it(tmp_path: Path) -> None:
    fresh = {"_target_": "x.fresh", "width": 8, "depth": 2, "heads": 3, "vocab": 9, "head": {"_target_": "x.head"}}
    assert named(tmp_path / "a", {"target": {"_target_": "x.shipped"}}, {"target": fresh}) == [
        "target=shipped",
        "target=fresh",
    ]
    wide = [{"target": fresh | {"width": width}} for width in (8, 16)]
    assert named(tmp_path / "b", {"target": {"_target_": "x.shipped"}}, *wide) == [
        "target.width=None target=shipped",
        "target.width=8 target=fresh",
        "target.width=16 target=fresh",
    ]


def test_settings_that_always_differ_together_go_by_the_shortest_name(tmp_path: Path) -> None:
    """Whatever the alphabet says of the names."""
    assert named(
        tmp_path / "a", {"a_much_longer": {"width": 1}, "z": {"n": 1}}, {"a_much_longer": {"width": 2}, "z": {"n": 2}}
    ) == ["z.n=1", "z.n=2"]
    assert named(tmp_path / "b", {"b": 1, "a": 1}, {"b": 2, "a": 2}) == ["a=1", "a=2"]  # as long: by the alphabet


def test_runs_that_differ_in_many_settings_go_by_their_folders(tmp_path: Path) -> None:
    four = [{f"k{i}": i + step * (i + 1) for i in range(4)} for step in (0, 1)]
    assert named(tmp_path / "four", *four) == ["k0=0 k1=1 k2=2 k3=3", "k0=1 k1=3 k2=5 k3=7"]
    five = [config | {"k4": i} for i, config in zip((9, 99), four, strict=True)]
    assert named(tmp_path / "five", *five) == ["run=run0", "run=run1"]


@pytest.mark.parametrize(
    "path",
    [
        "logger.name", "callbacks.progress", "resume", "report._target_", "hydra.job", "label", "benchmark.b0.limit",
        "data.cache_dir", "trainer.log_every_n_steps", "evaluation.warmup", "evaluation.generate_prompts",
        "evaluation.generate_floor", "data.seed",
    ],
)  # fmt: skip
def test_settings_that_make_no_other_method_name_no_run(tmp_path: Path, path: str) -> None:
    """Runs that differ in one of these alone are the same run twice, which is refused."""

    def config(value: int) -> dict[str, Any]:
        part, _, key = path.partition(".")
        return {part: {key: value} if key else value}

    with pytest.raises(UserError, match="two runs of 'a' have seed 0"):
        named(tmp_path / "same", config(1), config(2))


def test_folders_that_hold_no_finished_run(tmp_path: Path) -> None:
    whole = made(tmp_path / "a", "a", 0, [(2.0, 10)])
    killed = (whole / "results.json").read_text().replace('"seed": 0,', '"seed": 0, "complete": false,', 1)
    for text, words in (
        ("{}", "not a run's results.json"), ("{", "not a run's results.json"), ("[]", "not a run's results.json"),
        (killed, "not finished"),
    ):  # fmt: skip
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "results.json").write_text(text)
        for program in (lambda f: compare([f]), lambda f: ablation([f], decoder="jacobi_single")):
            with pytest.raises(UserError, match=words):
                program(folder)
    with pytest.raises(UserError, match=r"results\.json is missing"):
        compare([tmp_path / "none"])
    (whole / "samples.jsonl").unlink()
    with pytest.raises(UserError, match=r"samples\.jsonl is missing"):
        compare([whole])
    with pytest.raises(UserError, match="not a run with a noise schedule"):
        ablation([whole], decoder="jacobi_single")


def test_the_schedules_table_keeps_temperatures_apart(tmp_path: Path) -> None:
    rows = [
        {"method": "m", "benchmark": "b", "decoder": {"name": name, "temperature": t}, "quality": quality, "n": 10,
         "tokens": 110, "nfe": 60, "nfe_prefill": 10, "tau": 2.0, "tpf": 2.0, "speedup": 1.5}
        for t, quality in ((0.0, 0.5), (1.0, 0.2)) for name in ("jacobi_single", "base_jacobi_single")
    ]  # fmt: skip
    config = {"method": {"schedule": {"_target_": "dspec.jacobi_forcing.noise.RandomSchedule"}, "window": None}}
    (tmp_path / "results.json").write_text(json.dumps({"run": {"seed": 0, "config": config}, "rows": rows}))
    cells = ablation([tmp_path], decoder="jacobi_single")
    assert cells == [
        ["Random", "–", "0", "50.0", "0.500", "50.0", "0.500"],
        ["Random", "–", "1", "20.0", "0.500", "20.0", "0.500"],
    ]
