"""The infill command: holes of a text, and one clear line for what cannot be filled in."""

import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.chat import PromptPolicy
from dspec.decoding.any_subset.decoder import AnySubset, AnySubsetConfig
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY, Sampling
from dspec.errors import UserError
from dspec.models.language_model import ASSETS, embedded_any_subset, embedded_target
from eval.benchmarks.embedded_infilling import FilledProblems
from eval.infill import main, parse
from eval.prompts import encode

TINY = ASSETS / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)  # type: ignore[no-any-return]


def test_holes_stand_where_they_are_marked(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = parse(tokenizer, "Tom has [MASK:2] pens[MASK].", task=None, room=40)
    assert prompt.max_new_tokens == 3
    assert prompt.positions is not None
    assert sorted(prompt.positions) == list(range(len(prompt.positions)))
    filled = prompt.response([-1, -2, -3])
    head, middle, end = (tokenizer(part)["input_ids"] for part in ("Tom has ", " pens", "."))
    assert filled == [*head, -1, -2, *middle, -3, *end]
    turn = parse(tokenizer, "[MASK:4]", task="How many?", room=40)
    assert turn.response([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert turn.start == len(turn.ids)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no hole", "has no hole"),
        ("[MASK:3]", "no visible token"),
        ("a [MASK:0] b", "hole of no tokens"),
        ("a [MASK:000] b", "hole of no tokens"),
        ("a [MASK: 3] b [MASK:1]", r"'\[MASK: 3\]' is no hole"),
        ("a [MASK:-3] b [MASK:1]", r"'\[MASK:-3\]' is no hole"),
        ("a [MASK:\u0663] b [MASK:1]", "is no hole"),
        ("a [MASK:1] b [MASK", r"'\[MASK' is no hole"),
        ("a <|mask|> [MASK:1]", r"shows the mask token <\|mask\|>"),
        ("a [MASK:39] b", r"more tokens than fit \(40\)"),
        ("a [MASK:1]" + " b" * 39, r"more tokens than fit \(40\)"),
        ("a [MASK:99999999999] b", "more tokens than fit"),
        ("a [MASK:" + "9" * 5000 + "] b", "more tokens than fit"),
        ("a \udcff [MASK:1]", r"not UTF-8 \(character 2\)"),  # a byte of the command line
    ],
)
def test_what_cannot_be_filled(tokenizer: PreTrainedTokenizerBase, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(tokenizer, text, task=None, room=40)


def test_the_largest_text_that_fits(tokenizer: PreTrainedTokenizerBase) -> None:
    """One token less in the hole than the first text that does not; without an end of the context there is a limit."""
    visible = len(tokenizer("a ")["input_ids"]) + len(tokenizer(" b")["input_ids"])
    prompt = parse(tokenizer, f"a [MASK:{40 - visible}] b", task=None, room=40)
    assert prompt.max_new_tokens == 40 - visible
    with pytest.raises(UserError, match="more tokens than fit"):
        parse(tokenizer, f"a [MASK:{41 - visible}] b", task=None, room=40)
    with pytest.raises(UserError, match="more tokens than fit"):
        parse(tokenizer, "a [MASK:99999999999] b", task=None, room=sys.maxsize)
    with pytest.raises(UserError, match="not UTF-8"):
        parse(tokenizer, "a [MASK:1]", task="\udcff", room=40)


def test_settings_reach_the_decoder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and passes are those of a decoder with the same settings."""
    model, task = embedded_any_subset(dtype="float32", device="cpu"), "Tom has 3 pens and buys 4. How many has he?"
    # with 11 tokens the bonus token saves a pass
    text = "First, Tom has 3 + 4 = 7 pens. [MASK:11] #### 7"
    prompt, printed = parse(model.tokenizer, text, task=task, room=1024), set()
    for draft, drafts, temperature, seed in (("model", 5, 0.0, 0), ("bigrams", 5, 0.0, 0), ("model", 1, 0.0, 0),
                                             ("model", 5, 1.5, 0), ("model", 5, 1.5, 1)):  # fmt: skip
        config = AnySubsetConfig(num_drafts=drafts, drafted_by=draft, bonus=True, tolerance=0.0)
        sampling = Sampling(temperature=temperature, top_p=1.0)
        request = prompt.request(sampling=sampling, seed=seed, stop_ids=(), stop=None)
        [wanted] = decode(AnySubset(target=model, config=config), [request])
        settings = ["--drafted-by", draft, "--num-drafts", drafts, "--temperature", temperature, "--seed", seed]
        monkeypatch.setattr(sys, "argv", ["infill", text, "--task", task, *map(str, settings)])
        main()
        out = capsys.readouterr().out
        assert out == (
            f"{model.tokenizer.decode(prompt.response(wanted.tokens))}\n11 tokens in {wanted.nfe} forward passes\n"
        )
        printed.add(out)
    assert len(printed) == 5  # each setting shows


def test_a_drafter_is_no_model_to_fill_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:4] pens.", "--model", str(ASSETS / "tiny_dspark")])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    [line] = capsys.readouterr().err.splitlines()[-1:]
    assert "tiny_dspark' are not those of a language model (confidence_head.proj.bias is missing, or no part" in line
    assert "a drafter is given by checkpoint=" in line


def test_a_runs_folder_is_as_good_as_its_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(ASSETS / "tiny_as_arm")
    shown = []
    for model in ([], ["--model", str(tmp_path)], ["--model", str(tmp_path / "target")]):
        monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:4] pens.", *model])
        main()
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:4] pens.", "--model", str(TINY)])
    main()
    filled, count = capsys.readouterr().out.splitlines()[-2:]
    assert filled.startswith("Tom has")
    assert filled.endswith("pens.")
    assert count.startswith("4 tokens in ")
    monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:4] pens.", "--model", str(TINY), "--num-drafts", "0"])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert "num_drafts" in capsys.readouterr().err
    for seed in (-(2**63) - 1, 2**64):
        monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:4] pens.", "--seed", str(seed)])
        with pytest.raises(SystemExit) as error:
            main()
        assert error.value.code == 2
        assert f"--seed {seed} must lie" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:1024] pens."])
    with pytest.raises(SystemExit) as error:
        main()
    assert "more tokens than fit (1024)" in capsys.readouterr().err  # the model's context


def test_the_model_that_ships(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It drafts well enough that a held-out solution takes at least 10 % fewer passes than tokens, and fills in the
    same tokens one at a time; the base, which was not trained for this, fills in others."""
    model = embedded_any_subset(dtype="float32", device="cpu")
    benchmark = FilledProblems(count=4, hidden=0.4, holes="random", seed=0)
    policy = PromptPolicy(system=None, thinking=False)
    prompts = [encode(model.tokenizer, benchmark, item, policy) for item in benchmark.items()]
    requests = [p.request(sampling=GREEDY, seed=0, stop_ids=(), stop=None) for p in prompts]
    filled = {}
    for drafts in (1, 5):
        config = AnySubsetConfig(num_drafts=drafts, drafted_by="model", bonus=False, tolerance=0.0)
        filled[drafts] = decode(AnySubset(target=model, config=config), requests)
    assert [g.tokens for g in filled[5]] == [g.tokens for g in filled[1]]
    tokens = sum(len(g.tokens) for g in filled[5])
    assert sum(g.nfe for g in filled[1]) == tokens
    assert sum(g.nfe for g in filled[5]) <= 0.9 * tokens
    base = AnySubset(target=embedded_target(dtype="float32", device="cpu"), config=config)
    hidden = [len(p.positions or ()) - len(p.ids) for p in prompts]
    assert [len(g.tokens) for g in decode(base, requests)] == hidden
    assert [g.tokens for g in decode(base, requests)] != [g.tokens for g in filled[5]]
    monkeypatch.setattr(sys, "argv", ["infill", "Tom has [MASK:2] pens."])
    main()
    assert "forward passes" in capsys.readouterr().out
