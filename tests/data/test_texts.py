"""Streams of texts: what a row holds, what each rank reads, and that a resumed stream goes on at the same row."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from datasets import IterableDataset
from lightning.pytorch.callbacks import ModelCheckpoint

from data.chat import PromptPolicy
from data.loaders import RankInfo
from data.texts import PackedTexts, Texts, TextStream, encoded, for_validation
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, embedded_target

END = [3]
COUNT = 23


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "texts.jsonl", [f"{'a b ' * (i % 5)}text number {i}." for i in range(COUNT)])


def written(path: Path, texts: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(path: Path) -> Texts:
    return Texts(path=str(path), repo=None, config=None, split="train", field="text")


def stream(target: LanguageModel, path: Path, **changes: Any) -> PackedTexts:
    settings: dict[str, Any] = {
        "separators": END, "row_length": 16, "window": 5, "validation_share": 0.1, "seed": 0,
        "rank_info": RankInfo(0, 1),
    }  # fmt: skip
    return PackedTexts(texts_of(path), target.tokenizer, **(settings | changes))


def module(target: LanguageModel, path: Path, **changes: Any) -> TextStream:
    settings: dict[str, Any] = {
        "policy": PromptPolicy(system=None, thinking=False), "separators": None, "row_length": 16, "batch_size": 2,
        "window": 5, "validation": 2, "validation_share": 0.3, "seed": 0,
    }  # fmt: skip
    return TextStream(target=target, source=texts_of(path), **(settings | changes))


def documents(of: PackedTexts, tokens: int) -> list[tuple[int, ...]]:
    """The documents in so many tokens of a stream, the last one cut."""
    flat = [token for row in islice(iter(of), -(-tokens // of.row_length)) for token in row][:tokens]
    ends = [i for i, token in enumerate(flat) if token == END[0]]
    return [tuple(flat[a + 1 : b]) for a, b in zip([-1, *ends[:-1]], ends, strict=True)]


def expected(target: LanguageModel, path: Path, *, validation_share: float = 0.1) -> list[tuple[int, ...]]:
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    kept = [text for text in texts if not for_validation(text, validation_share)]
    assert len(kept) < len(texts)
    return [tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in kept]


def test_an_epoch_has_each_training_document_once(target: LanguageModel, file: Path) -> None:
    """Whole, with its separator behind it, and in another order in the next epoch."""
    wanted = expected(target, file)
    size = sum(len(ids) + 1 for ids in wanted)
    found = documents(stream(target, file), 2 * size)
    first, second = found[: len(wanted)], found[len(wanted) :]
    assert sorted(first) == sorted(second) == sorted(wanted)
    assert first != second
    assert wanted not in (first, second)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_documents(target: LanguageModel, file: Path, ranks: int) -> None:
    """Disjoint, and all together."""
    wanted, found = expected(target, file), list[tuple[int, ...]]()
    for rank in range(ranks):
        part = stream(target, file, rank_info=RankInfo(rank, ranks))
        several = documents(part, 600)
        assert len(several) > 2 * len(set(several)) > 0  # more than two epochs
        found += set(several)
    assert sorted(found) == sorted(wanted)


class Files(Texts):
    """A data set of several files, as those of the Hub are."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(path=None, repo="a/b", config=None, split="train", field="text")
        self.paths = [str(path) for path in paths]

    def stream(self) -> IterableDataset:
        return IterableDataset.from_generator(rows_of, gen_kwargs={"paths": self.paths})


def rows_of(paths: list[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from (json.loads(line) for line in Path(path).read_text().splitlines())


def of_files(target: LanguageModel, file: Path, count: int, **changes: Any) -> PackedTexts:
    """The file's texts in so many files."""
    lines = file.read_text().splitlines(keepends=True)
    paths = [file.with_name(f"part{i}.jsonl") for i in range(count)]
    for i, path in enumerate(paths):
        path.write_text("".join(lines[i::count]))
    made = stream(target, file, **changes)
    made.source = Files(paths)
    return made


@pytest.mark.parametrize("files", [2, 3])
def test_ranks_share_several_files(target: LanguageModel, file: Path, files: int) -> None:
    """Whole files where that is fair."""
    found = []
    for rank in range(2):
        found += set(documents(of_files(target, file, files, rank_info=RankInfo(rank, 2)), 600))
    assert sorted(found) == sorted(expected(target, file))


@pytest.mark.parametrize("done", [1, 4, 5, 11, 30])
@pytest.mark.parametrize(("row_length", "files"), [(5, 1), (16, 1), (60, 1), (16, 4)])
def test_a_resumed_stream_goes_on_at_the_same_row(
    target: LanguageModel, file: Path, row_length: int, files: int, done: int
) -> None:
    """Within documents, windows and epochs, from a state that went through a file."""
    settings: dict[str, Any] = {"row_length": row_length, "rank_info": RankInfo(1, 2)}
    whole = list(islice(iter(of_files(target, file, files, **settings)), done + 20))
    first = of_files(target, file, files, **settings)
    assert list(islice(iter(first), done)) == whole[:done]
    resumed = of_files(target, file, files, **settings)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert list(islice(iter(resumed), 20)) == whole[done:]


@pytest.mark.parametrize(
    "change", [{"row_length": 8}, {"window": 3}, {"seed": 1}, {"separators": [3, 3]}, {"validation_share": 0.6}],
    ids=lambda change: ", ".join(change),
)  # fmt: skip
def test_every_option_changes_the_rows(target: LanguageModel, file: Path, change: dict[str, Any]) -> None:
    base, other = (list(islice(iter(stream(target, file, **c)), 12)) for c in ({}, change))
    assert base != other
    assert base == list(islice(iter(stream(target, file)), 12))


def test_each_window_has_an_order_of_its_own(target: LanguageModel, tmp_path: Path) -> None:
    """Else the documents at the same places of all windows would come out at the same places."""
    texts = [f"text number {i}." for i in range(60)]
    path = written(tmp_path / "texts.jsonl", texts)
    ids = [tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    part = stream(target, path, window=6, validation_share=1e-9)
    read = [ids.index(document) for document in documents(part, sum(len(text) + 1 for text in ids))]
    windows = [read[i : i + 6] for i in range(0, 60, 6)]
    assert [sorted(window) for window in windows] == [list(range(i, i + 6)) for i in range(0, 60, 6)]
    assert len({tuple(i % 6 for i in window) for window in windows}) > 5


def test_blank_documents_are_left_out(target: LanguageModel, tmp_path: Path) -> None:
    """Nothing, not even separators, is trained on or held out of them."""
    some = [f"text number {i}." for i in range(12)]
    blank = [text for pair in zip(some, ["", " ", "\n\t"] * 4, strict=True) for text in pair]
    whole = written(tmp_path / "a.jsonl", some), written(tmp_path / "b.jsonl", blank)
    size = sum(len(target.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in some)
    plain, mixed = (documents(stream(target, path, validation_share=1e-9), size) for path in whole)
    assert sorted(mixed) == sorted(plain)
    held = []
    for path in whole:
        data = module(target, path, validation_share=0.99999, validation=100)
        data.setup("fit")
        held.append(data._held_out)
    assert held[0] == held[1]


def test_batches_and_validation(target: LanguageModel, file: Path) -> None:
    data = module(target, file, row_length=12)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.ids_BL.shape == batch.supervised_BL.shape == (2, 12)
    assert batch.supervised_BL.all()
    held = torch.cat([b.ids_BL for b in data.val_dataloader()])
    assert held.shape == (2, 12)
    trained = {tuple(ids) for ids in expected(target, file, validation_share=0.3)}
    ends = [i for i, token in enumerate(held.flatten().tolist()) if token == END[0]]
    assert tuple(held.flatten()[: ends[0]].tolist()) not in trained


def test_a_document_has_no_tokens_but_its_own_and_the_separators(toys: SimpleNamespace) -> None:
    """XLNet's tokenizer would end each with <sep><cls>."""
    tokenizer = toys.xlnet_tokenizer()
    assert tokenizer.convert_ids_to_tokens(encoded(tokenizer, "Tom", [0])) == [
        "▁Tom",
        *tokenizer.convert_ids_to_tokens([0]),
    ]


def test_separators_are_named(target: LanguageModel, file: Path) -> None:
    assert module(target, file).separators == [target.tokenizer.eos_token_id]
    named = module(target, file, separators=["<|mask|>", target.tokenizer.eos_token])
    assert named.separators == [target.mask_token_id, target.tokenizer.eos_token_id]
    with pytest.raises(UserError, match="'<cls>' is no token"):
        module(target, file, separators=["<cls>"])


class Seen(L.LightningModule):
    """Trains nothing and remembers its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rows = torch.nn.Parameter(torch.zeros(())), list[list[int]]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows += batch.ids_BL.tolist()
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(data: TextStream, folder: Path, *, steps: int, resume: Path | None = None) -> Seen:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, accumulate_grad_batches=2, default_root_dir=str(folder),
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, check_val_every_n_epoch=None, val_check_interval=4,
        num_sanity_val_steps=0,
    )  # fmt: skip
    seen = Seen()
    trainer.fit(seen, datamodule=data, ckpt_path=resume, weights_only=False)
    return seen


def test_a_run_goes_on_at_the_same_row(target: LanguageModel, file: Path, tmp_path: Path) -> None:
    """Through Lightning, whose fetcher must not be ahead of the checkpoint."""
    whole = fitted(module(target, file), tmp_path / "whole", steps=9)
    assert len(whole.rows) == 9 * 2 * 2
    resumed = fitted(module(target, file), tmp_path / "rest", steps=9, resume=tmp_path / "whole" / "step=6.ckpt")
    assert resumed.rows == whole.rows[6 * 2 * 2 :]
    written(file, [f"other texts {i}" for i in range(COUNT)])
    with pytest.raises(UserError, match="not what this run started with"):
        fitted(module(target, file), tmp_path / "rest", steps=9, resume=tmp_path / "whole" / "step=6.ckpt")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found b.py\nmore"), "but found b.py)"),
        (ValueError("no config"), "no config"),
        (FileNotFoundError(), "FileNotFoundError"),
    ],
)
def test_a_data_set_that_cannot_be_opened_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def refuse(*args: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr("data.texts.load_dataset", refuse)
    with pytest.raises(UserError) as refused:
        Texts(path=None, repo="a/b", config=None, split="train", field="text").stream()
    message = str(refused.value)
    assert message.startswith("cannot open a/b (None, train) on the Hub (")
    assert reason in message
    assert message.endswith("or set data.source.path=<file.jsonl>")
    assert "\n" not in message


def test_errors(target: LanguageModel, file: Path, tmp_path: Path) -> None:
    for settings, words in (
        ({"path": None, "repo": None}, "say where the texts are"),
        ({"path": str(file), "repo": "a/b"}, "say where the texts are"),
        ({"path": str(tmp_path / "none.jsonl"), "repo": None}, "no file of texts"),
    ):
        with pytest.raises(UserError, match=words):
            Texts(**{"config": None, "split": "train", "field": "text"} | settings)
    with pytest.raises(UserError, match=r'no text under "text"'):
        next(iter(stream(target, written(tmp_path / "a.jsonl", [1, 2]))))
    with pytest.raises(UserError, match="no training texts for rank 1"):
        next(iter(stream(target, written(tmp_path / "b.jsonl", ["one text"]), rank_info=RankInfo(1, 2))))
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\nnot json\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        next(iter(stream(target, tmp_path / "c.jsonl", row_length=500)))
    with pytest.raises(UserError, match="fill no row of 900 tokens"):
        module(target, file, row_length=900).setup("fit")
    with pytest.raises(UserError, match="row_length=2000 exceeds the 1024 positions"):
        module(target, file, row_length=2000)
    with pytest.raises(UserError, match="row_length=1 must be at least 2"):  # nothing would be predicted
        module(target, file, row_length=1)
    with pytest.raises(UserError, match="validation=0 must be at least 1"):
        module(target, file, validation=0)
    (tmp_path / "d.jsonl").write_text("")
    with pytest.raises(UserError, match="has no documents"):
        module(target, tmp_path / "d.jsonl").setup("fit")
    with pytest.raises(UserError, match=r"held out \(1e-07 % of all\) fill no row"):
        module(target, file, validation_share=1e-9).setup("fit")
    with pytest.raises(UserError, match=r"line 2 is not JSON .*surrogates"):
        module(target, written(tmp_path / "e.jsonl", ["a", "\ud800 b"])).setup("fit")
    with pytest.raises(UserError, match="validation_share=0"):
        module(target, file, validation_share=0)
