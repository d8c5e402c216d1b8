"""Drafter folders: round trips, the peers' formats, damage, misfits, a full disk."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import Sampling, Streams
from dspec.errors import UserError
from dspec.models.checkpoint import config_dict, from_pretrained, save_pretrained
from dspec.models.draft import Draft, DraftConfig
from dspec.models.language_model import LanguageModel
from dspec.models.temperatures import Calibration

GOLDEN = Path(__file__).parent.parent / "golden"
KINDS = [
    ("fill_in", None, False, None),
    ("anchor_first", None, False, None),
    ("anchor_first", None, True, False),
    ("anchor_first", "vanilla", True, True),
    ("anchor_first", "vanilla", True, False),
    ("anchor_first", "gated", False, None),
    ("anchor_first", "rnn", True, True),
]


def _proposals(toys: SimpleNamespace, target: LanguageModel, draft: Draft) -> list[torch.Tensor]:
    proposer, text = toys.Remembering(DraftProposer(draft)), [1, 2, 3, 4]
    found = []
    for sampling in (Sampling(temperature=0.0, top_p=1.0), Sampling(temperature=0.9, top_p=0.9)):
        with torch.inference_mode():
            proposer.begin(target(torch.tensor([text[:-1]]), taps=proposer.tap_ids).features_BLF)
            uniform = None if sampling.greedy else Streams([0], torch.device("cpu")).take(proposer.num_drafts)
            got = proposer.propose([text], sampling=sampling, uniform_BJ=uniform, confidence=True)
        found += [x for x in (got.tokens_BJ, got.probs_BJV, got.confidence_BJ) if x is not None]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("layout", "head", "confidence", "with_markov"), KINDS)
def test_round_trip(
    toys: SimpleNamespace,
    tmp_path: Path,
    layout: str,
    head: str | None,
    confidence: bool,
    with_markov: bool | None,
    dtype: torch.dtype,
) -> None:
    target = toys.target(dtype=dtype)
    made = toys.draft(target, layout=layout, head=head, confidence=confidence, with_markov=with_markov, taps=(2, 0))
    if confidence:
        made.metadata.calibration = Calibration(temperatures=(0.5, 1.0, 1.5, 2.0), temperature=1.0, top_p=0.95)
    made.metadata.prompt_policy = {"template": "chat", "thinking": False}
    save_pretrained(made, tmp_path / "draft", card="# a card\n")
    files = ["README.md", "config.json", "model.safetensors"] + ["sts.json"] * confidence
    assert sorted(p.name for p in (tmp_path / "draft").iterdir()) == files
    assert (tmp_path / "draft" / "README.md").read_text() == "# a card\n"
    read = from_pretrained(tmp_path / "draft", target=target)
    assert read.config.target_layer_ids == (2, 0)
    assert not read.training
    assert read.config.transformer.to_dict() == made.config.transformer.to_dict() | {
        "dtype": read.config.transformer.to_dict()["dtype"]
    }
    for field in dataclasses.fields(DraftConfig):
        if field.name != "transformer":
            assert getattr(read.config, field.name) == getattr(made.config, field.name), field.name
    assert read.metadata == made.metadata
    ours, theirs = made.trainable(), read.trainable()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and theirs[name].dtype == dtype for name in ours)
    assert all(p.requires_grad for p in theirs.values())
    if dtype != torch.bfloat16:  # bfloat16 products crash on some CPUs
        for a, b in zip(_proposals(toys, target, made), _proposals(toys, target, read), strict=True):
            assert torch.equal(a, b)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert ({"embed_tokens.weight", "lm_head.weight"} <= stored.keys()) == (layout == "anchor_first")


def test_shared_weights_are_shared_again_when_equal(toys: SimpleNamespace, tmp_path: Path) -> None:
    target = toys.target()
    save_pretrained(toys.draft(target, head="vanilla"), tmp_path / "d", card="")
    read = from_pretrained(tmp_path / "d", target=target)
    assert read.embed_tokens is target.embed_tokens
    assert read.lm_head is target.lm_head
    other = toys.target(seed=1)  # another target of the same shape: the folder's own copies are kept
    kept = from_pretrained(tmp_path / "d", target=other)
    for name in ("embed_tokens", "lm_head"):
        module = getattr(kept, name)
        assert torch.equal(module.weight, getattr(target, name).weight)
        assert not torch.equal(module.weight, getattr(other, name).weight)
        assert not module.weight.requires_grad
    assert _proposals(toys, other, kept)
    bare = toys.draft(target, layout="fill_in")
    save_pretrained(bare, tmp_path / "z", card="")
    assert from_pretrained(tmp_path / "z", target=other).lm_head is other.lm_head


def test_tied_targets_round_trip(toys: SimpleNamespace, tmp_path: Path) -> None:
    target = toys.target("llama", tie=True)
    assert target.lm_head.weight is target.embed_tokens.weight
    made = toys.draft(target)
    save_pretrained(made, tmp_path / "d", card="")
    read = from_pretrained(tmp_path / "d", target=target)
    assert all(
        torch.equal(a, b) for a, b in zip(_proposals(toys, target, made), _proposals(toys, target, read), strict=True)
    )


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dflash_a"])
def test_peers_formats(name: str, tmp_path: Path) -> None:
    """Reading a peer's folder and writing it again gives the same tensors and all of its config keys."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name / "target", dtype=torch.float32)
    target = LanguageModel(model, None, name=name)
    draft = from_pretrained(GOLDEN / name / "draft", target=target, layout="fill_in" if name == "dflash_a" else None)
    save_pretrained(draft, tmp_path / "d", card="")
    theirs, ours = (json.loads((d / "config.json").read_text()) for d in (GOLDEN / name / "draft", tmp_path / "d"))
    theirs.pop("transformers_version")
    assert theirs == {key: ours[key] for key in theirs}
    assert ours["dspec"]["layout"] == draft.config.layout
    if name == "dflash_a":
        flat = {"mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head"}
        assert not flat & ours.keys()
    before, after = (load_file(d / "model.safetensors") for d in (GOLDEN / name / "draft", tmp_path / "d"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = from_pretrained(tmp_path / "d", target=target)  # now the layout is stored
    assert again.config.layout == draft.config.layout


# ---- damage and misfits


def _refused(folder: Path, target: LanguageModel, words: str, *, layout: str | None = None) -> None:
    with pytest.raises(UserError, match=words) as caught:
        from_pretrained(folder, target=target, layout=layout)
    assert "\n" not in str(caught.value)


@pytest.fixture
def pair(toys: SimpleNamespace, tmp_path: Path) -> tuple[LanguageModel, Path]:
    target = toys.target(dtype=torch.float32)
    save_pretrained(toys.draft(target, head="vanilla", confidence=True), tmp_path / "draft", card="")
    return target, tmp_path / "draft"


def _edit(folder: Path, **change: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw = {k: v for k, v in (raw | change).items() if v != "GONE"}
    (folder / "config.json").write_text(json.dumps(raw))


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_files(pair: tuple[LanguageModel, Path]) -> None:
    target, folder = pair
    _refused(folder.parent / "nothing", target, "pass the draft/ folder of a finished run")
    (folder / "model.safetensors").unlink()
    _refused(folder, target, "model.safetensors is missing.*use another")
    (folder / "config.json").unlink()
    _refused(folder, target, "config.json is missing; pass the draft")


def test_truncated_files(pair: tuple[LanguageModel, Path]) -> None:
    target, folder = pair
    for name in ("model.safetensors", "config.json"):
        content = (folder / name).read_bytes()
        for keep in (0, 1, 7, 8, 9, 60, len(content) // 2, len(content) - 3):
            (folder / name).write_bytes(content[:keep])
            _refused(folder, target, "incomplete, use another")
        (folder / name).write_bytes(b"\xff\xfe" * 40)
        _refused(folder, target, "incomplete, use another")
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text("[1, 2]")
    _refused(folder, target, "JSON object")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": "GONE"}, "block_size"),
        ({"target_layer_ids": 3}, "not a DeepSpec or z-lab drafter config"),
        ({"hidden_size": "wide"}, "not a DeepSpec or z-lab drafter config"),
        ({"dflash_config": [1]}, "not a DeepSpec or z-lab drafter config"),
        ({"markov_head_type": "lstm"}, "vanilla, gated, rnn"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, "sliding-window"),
        ({"target_layer_ids": [0, 3]}, r"layer ids \[3\] are out of range.*layers 0\.\.2"),
        ({"target_layer_ids": [-1, 1]}, r"layer ids \[-1\] are out of range"),
        ({"num_target_layers": 9}, "target of 9 layers.*has 3: use the target it was trained for"),
        ({"hidden_size": 32}, "width 32.*has 16: use the target it was trained for"),
        ({"num_hidden_layers": 3, "layer_types": "GONE"}, "missing or foreign"),
        ({"markov_rank": 0}, "missing or foreign"),
        ({"markov_rank": 7}, "markov_head.markov_w1.weight has shape"),
        ({"architectures": ["Another"], "dspec": {}}, "pass layout=fill_in .z-lab. or anchor_first"),
        ({"dspec": {"layout": "anchor_first", "calibration": {"temperatures": [1.0]}}}, "calibrate again"),
        (
            {"dspec": {"layout": "anchor_first", "calibration": {"temperatures": [1.0], "temperature": 1, "top_p": 1}}},
            "1 STS temperatures for 4 drafts; calibrate again",
        ),
    ],
)
def test_configs_that_do_not_fit(pair: tuple[LanguageModel, Path], change: dict[str, Any], words: str) -> None:
    target, folder = pair
    _edit(folder, **change)
    _refused(folder, target, words)


def test_temperatures_of_another_engine(pair: tuple[LanguageModel, Path]) -> None:
    """sts.json as SGLang writes it counts, whatever config.json says; one that does not fit is refused."""
    target, folder = pair
    sts = {
        "temperatures": [0.5, 1, 2.0, 1.5],
        "dataset": "d",
        "num_samples": 3,
        "ece_before": [0.1],
        "ece_after": [0.0],
    }
    _edit(
        folder,
        dspec={"layout": "anchor_first", "calibration": {"temperatures": [1.0] * 4, "temperature": 0.7, "top_p": 1}},
    )
    (folder / "sts.json").write_text(json.dumps(sts))
    assert from_pretrained(folder, target=target).metadata.calibration == Calibration((0.5, 1.0, 2.0, 1.5), 1.0, 1.0)
    for content, words in [
        ('{"temperatures": [1.0]}', "sts.json holds 1 STS temperatures for 4 drafts"),
        ('{"temperatures": [0.0, 1, 1, 1]}', "sts.json holds no STS temperatures .*positive"),
        ('{"dataset": "d"}', "sts.json holds no STS temperatures"),
        ("[1.0]", "sts.json holds no STS temperatures"),
        ("{", "sts.json holds no STS temperatures"),
    ]:
        (folder / "sts.json").write_text(content)
        _refused(folder, target, words)


def test_tensors_that_do_not_fit(pair: tuple[LanguageModel, Path], toys: SimpleNamespace) -> None:
    target, folder = pair
    good = (folder / "model.safetensors").read_bytes()
    for change, words in (
        (lambda t: t.pop("fc.weight"), "fc.weight"),
        (lambda t: t.update({"rogue.weight": torch.zeros(2)}), "rogue.weight"),
        (lambda t: t.update({"fc.weight": torch.zeros(16, 16)}), r"fc.weight has shape \(16, 16\) instead"),
    ):
        _edit_tensors(folder, change)
        _refused(folder, target, words)
        (folder / "model.safetensors").write_bytes(good)
    _refused(folder, toys.target(vocab=12, dtype=torch.float32), "vocabulary of 11, target 'tiny-qwen3' of 12")
    save_pretrained(toys.draft(target, layout="fill_in"), folder.parent / "z", card="")  # no copy of the LM head in it
    _refused(folder.parent / "z", toys.target(vocab=12, dtype=torch.float32), "vocabulary of 11.*of 12")
    _refused(folder, toys.target(layers=4, dtype=torch.float32), "target of 3 layers.*has 4")
    _refused(folder, toys.target(hidden=32, dtype=torch.float32), "width 16.*has 32")


def test_layouts_are_never_guessed(toys: SimpleNamespace, tmp_path: Path) -> None:
    target = toys.target(dtype=torch.float32)
    folder = tmp_path / "draft"
    save_pretrained(toys.draft(target, layout="fill_in"), folder, card="")
    assert from_pretrained(folder, target=target).config.layout == "fill_in"
    _refused(folder, target, "layout=fill_in, not anchor_first", layout="anchor_first")
    _edit(folder, dspec="GONE")
    _refused(folder, target, "pass layout=fill_in")
    _refused(folder, target, "'other' is unknown; use one of anchor_first, fill_in", layout="other")
    for layout, drafts in (("fill_in", 3), ("anchor_first", 4)):
        assert from_pretrained(folder, target=target, layout=layout).config.num_drafts == drafts
    save_pretrained(toys.draft(target, head="rnn"), folder, card="")
    _edit(folder, dspec="GONE")  # as DeepSpec writes it: its class has one layout
    assert from_pretrained(folder, target=target).config.layout == "anchor_first"
    _refused(folder, target, "layout=anchor_first, not fill_in", layout="fill_in")


# ---- writing


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("limit", [100, 3000, 60000])
def test_disk_full(toys: SimpleNamespace, tmp_path: Path, limit: int) -> None:
    """A limit on file sizes stops the write in config.json, in the tensors, or in the card."""
    resource = pytest.importorskip("resource")
    target = toys.target(dtype=torch.float32)
    save_pretrained(toys.draft(target), tmp_path / "draft", card="old")
    before = _content(tmp_path)
    assert len(before["draft/model.safetensors"]) < 60000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    caught = None
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        save_pretrained(toys.draft(target, seed=1), tmp_path / "draft", card="new" * 30000)
    except UserError as error:
        caught = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught is not None
    assert "\n" not in caught
    assert f"cannot write {tmp_path / 'draft'}" in caught
    assert "what was there before is untouched" in caught
    assert _content(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_interruption_leaves_the_old_folder(
    toys: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = toys.target(dtype=torch.float32)
    save_pretrained(toys.draft(target), tmp_path / "draft", card="old")
    before = _content(tmp_path)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspec.models.checkpoint.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(toys.draft(target, seed=1), tmp_path / "draft", card="new")
    assert _content(tmp_path) == before
    monkeypatch.setattr("dspec.models.checkpoint.save_file", safetensors.torch.save_file)
    save_pretrained(toys.draft(target, seed=1), tmp_path / "draft", card="new")
    assert _content(tmp_path).keys() == before.keys()
    assert _content(tmp_path)["draft/README.md"] == b"new"


def test_a_folder_whose_writer_was_killed_between_its_renames_is_found(pair: tuple[LanguageModel, Path]) -> None:
    target, folder = pair
    before = _content(folder)
    folder.rename(folder.with_name(f".{folder.name}.old"))
    from_pretrained(folder, target=target)
    assert _content(folder) == before


def test_config_names_the_dtype(toys: SimpleNamespace) -> None:
    for dtype in ("bfloat16", "float64"):
        raw = config_dict(toys.draft(toys.target(dtype=getattr(torch, dtype))))
        assert raw["dtype"] == dtype
        json.dumps(raw, allow_nan=False)
