"""Data modules: what is supervised, packing, and that each option changes what comes out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from data.chat import PromptPolicy, prompt_ids, response_ids
from data.conversations import Conversations, pad
from data.loaders import RankInfo, Shuffle, shares, shuffled
from data.packed_corpus import PackedCorpus, document_batch, pack_documents
from data.prompts import EmbeddedPrompts, JsonlPrompts
from dspec.errors import UserError
from dspec.method import Batch
from dspec.models.language_model import LanguageModel, embedded_target

POLICY = PromptPolicy(system=None, thinking=False)
SMALL = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12, "batch_size": 4}


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded_target(dtype="float32", device="cpu")


def conversations(target: LanguageModel, tmp_path: Path, **changes: Any) -> Conversations:
    source = EmbeddedPrompts(train={"problems": 10}, calibration={"problems": 3}, seed=0)
    settings: dict[str, Any] = {
        "source": source, "policy": POLICY, "regeneration": SMALL, "cache_dir": str(tmp_path), "batch_size": 3,
        "max_length": 200, "sort_window": 6, "validation": 2, "seed": 0,
    }  # fmt: skip
    return Conversations(target=target, **(settings | changes))


def batches(module: Conversations) -> list[torch.Tensor]:
    module.setup("fit")
    return [b.ids_BL for b in module.train_dataloader()]


def test_response_alone_is_supervised_and_the_targets_own(target: LanguageModel, tmp_path: Path) -> None:
    module = conversations(target, tmp_path)
    module.setup("fit")
    responses = {tuple(r.prompt_tokens): r.tokens for r in module.responses()}
    seen = 0
    for loader in (module.train_dataloader(), module.val_dataloader()):
        for batch in loader:
            for ids, loss in zip(batch.ids_BL, batch.supervised_BL, strict=True):
                start = int(loss.nonzero()[0])
                assert responses[tuple(ids[:start].tolist())] == ids[loss].tolist()
                seen += 1
    assert seen == 2 + 6  # validation, and two full training batches of eight rows


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 2},
        {"validation": 5},
        {"max_length": 60},
        {"sort_window": None},
        {"seed": 1},
        {"regeneration": None},
        {"regeneration": SMALL | {"temperature": 0.0}},
        {"regeneration": SMALL | {"top_p": 0.1}},
        {"regeneration": SMALL | {"max_new_tokens": 5}},
        {"policy": PromptPolicy(system="Be brief.", thinking=False)},
        {"source": EmbeddedPrompts(train={"functions": 10}, calibration={}, seed=0)},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_every_option_changes_the_batches(target: LanguageModel, tmp_path: Path, change: dict[str, Any]) -> None:
    base, changed = batches(conversations(target, tmp_path)), batches(conversations(target, tmp_path, **change))
    assert [b.tolist() for b in base] == [b.tolist() for b in batches(conversations(target, tmp_path))]
    assert [b.tolist() for b in base] != [b.tolist() for b in changed]


def test_cache_dir_and_batch_size_of_regeneration(target: LanguageModel, tmp_path: Path) -> None:
    module = conversations(target, tmp_path / "a")
    module.prepare_data()
    assert module.responses_path.is_file()
    other = conversations(target, tmp_path / "b", regeneration=SMALL | {"batch_size": 2})
    assert other.responses_path.name != module.responses_path.name  # float32 rounds with the batch's shape
    assert other.responses_path.parent.parent == tmp_path / "b"


def test_own_files_of_one_name_never_get_each_others_responses(target: LanguageModel, tmp_path: Path) -> None:
    """Rows with and without ids; a changed prompt; the first file once more."""
    cache = tmp_path / "cache"
    for round_, folder in enumerate(["a", "b", "a"]):
        path = tmp_path / folder / "my.jsonl"
        path.parent.mkdir(exist_ok=True)
        rows = [{"prompt": f"Say {folder} {i}."} | ({"id": str(i)} if i % 2 else {}) for i in range(8)]
        rows[3]["prompt"] += "!" * round_
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = JsonlPrompts(path=str(path), train=8, calibration=0)
        module = conversations(target, cache, source=own)
        assert [(r.id, r.prompt_tokens) for r in module.responses()] == module.encoded("train")
        assert len(list((cache / "responses").glob("*.jsonl"))) == 1


def test_thinking_switch_reaches_the_template(target: LanguageModel) -> None:
    from copy import copy

    tokenizer = copy(target.tokenizer)
    tokenizer.chat_template = "{{ messages[-1].content }}{% if enable_thinking %}<|mask|>{% endif %}"
    on, off = (prompt_ids(tokenizer, "Hi", PromptPolicy(system=None, thinking=t)) for t in (True, False))
    assert on == [*off, tokenizer.mask_token_id]


def test_errors(target: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to train on"):
        conversations(target, tmp_path, validation=10).setup("fit")
    with pytest.raises(UserError, match="nothing to regenerate"):
        conversations(target, tmp_path, regeneration=None).responses()
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "q{i}"}}\n' for i in range(20)))
    bare = JsonlPrompts(path=str(path), train=9, calibration=1)
    with pytest.raises(UserError, match='has no "response"'):
        conversations(target, tmp_path, source=bare, regeneration=None).setup("fit")


def test_pad_and_pack() -> None:
    batch = pad([([5, 6, 7], 1), ([8, 9], 1)])
    assert batch.ids_BL.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.supervised_BL.tolist() == [[False, True, True], [False, True, False]]
    rows = pack_documents([([1, 2, 3], 1), ([4, 5], 1), ([6, 7, 8, 9], 2)], 6)
    assert [[ids for ids, _ in row] for row in rows] == [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]]
    packed = document_batch(rows, 6)
    assert packed.document_BL is not None
    assert packed.positions_BL is not None
    assert packed.document_BL.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1]]
    assert packed.positions_BL.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert packed.supervised_BL.tolist() == [
        [False, True, True, False, True, False],
        [False, False, True, True, False, False],
    ]
    with pytest.raises(UserError, match="row_length=6"):
        pack_documents([([0] * 7, 1)], 6)


def test_packed_corpus_options(target: LanguageModel) -> None:
    def shape(**changes: Any) -> tuple[int, ...]:
        settings: dict[str, Any] = {
            "policy": POLICY, "counts": {"problems": 60}, "row_length": 256, "batch_size": 2, "validation": 3,
            "seed": 0,
        }  # fmt: skip
        module = PackedCorpus(target=target, **(settings | changes))
        module.setup("fit")
        train = list(module.train_dataloader())
        held = sum(len(b.ids_BL) for b in module.val_dataloader())
        return (len(train), *train[0].ids_BL.shape, held, int(train[0].ids_BL.sum()))

    base = shape()
    assert base == shape()
    for change in (
        {"counts": {"problems": 120}},
        {"row_length": 300},
        {"batch_size": 3},
        {"validation": 5},
        {"seed": 1},
    ):
        assert shape(**change) != base


def test_response_ids_end_the_turn(target: LanguageModel) -> None:
    ids = response_ids(target.tokenizer, "    return x")
    assert ids[-1] == target.tokenizer.eos_token_id
    assert target.tokenizer.decode(ids[:-1]) == "    return x"


class Recorder(L.LightningModule):
    """Keeps the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch: list[int], _: int) -> torch.Tensor:
        self.seen.append(batch)
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(L.LightningDataModule):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def train_dataloader(self) -> Any:
        own = {"lengths": [5, 1, 4, 1, 5, 9, 2, 6, 5], "batch_size": 2, "window": self.window, "seed": 0}
        return shuffled(range(9), collate=list, module=self, **own)


def fit(folder: Path, *, steps: int, resume: Path | None, window: int | None) -> list[list[int]]:
    """The batches of a run of `steps`, a checkpoint after each one."""
    recorder = Recorder()
    every = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", callbacks=[every], **quiet)
    trainer.fit(recorder, datamodule=Numbers(window), ckpt_path=resume)
    return recorder.seen


@pytest.mark.parametrize("window", [None, 4])
def test_a_run_resumed_anywhere_sees_the_batches_of_the_unbroken_one(tmp_path: Path, window: int | None) -> None:
    """Mid-epoch, at an epoch's end, and in later epochs."""
    whole = fit(tmp_path / "whole", steps=11, resume=None, window=window)
    assert all(len({row for batch in whole[i : i + 4] for row in batch}) == 8 for i in (0, 4))
    assert len({tuple(map(tuple, whole[i : i + 3])) for i in (0, 4, 8)}) == 3  # another order each epoch
    for cut in range(1, 11):
        (checkpoint,) = (tmp_path / "whole").glob(f"step={cut}.ckpt")
        resumed = fit(tmp_path / f"from {cut}", steps=11, resume=checkpoint, window=window)
        assert resumed == whole[cut:], cut


LENGTHS = [(37 * i) % 101 for i in range(203)]


def epoch(rank_info: RankInfo, *, batch: int, window: int | None, rows: int = 203, number: int = 0) -> list[list[int]]:
    own = {"window": window, "seed": 3, "epoch": number, "rank_info": rank_info}
    sampler = Shuffle(LENGTHS[:rows], batch_size=batch, **own)
    order = list(sampler)
    assert len(order) == len(sampler)
    return [order[i : i + batch] for i in range(0, len(order), batch)]


@pytest.mark.parametrize("window", [None, 0, 1, 30, 64, 1000])
@pytest.mark.parametrize(("ranks", "batch"), [(2, 4), (3, 5), (4, 1), (8, 8)])
@pytest.mark.parametrize("rows", [203, 200, 64, 9])
def test_ranks_share_the_batches_of_one_rank(rows: int, ranks: int, batch: int, window: int | None) -> None:
    """Step by step the same rows, none twice, as many steps on each rank, epoch after epoch."""
    seen = set()
    for number in range(3):
        own = {"window": window, "rows": rows, "number": number}
        whole = epoch(RankInfo(0, 1), batch=ranks * batch, **own)
        parts = [epoch(RankInfo(rank, ranks), batch=batch, **own) for rank in range(ranks)]
        assert {len(part) for part in parts} == {len(whole)}
        for step, rows_together in enumerate(whole):
            mine = [part[step] for part in parts]
            assert max(map(len, mine)) <= batch
            assert sorted(row for own_rows in mine for row in own_rows) == sorted(rows_together)
        flat = [row for rows_together in whole for row in rows_together]
        assert len(set(flat)) == len(flat) >= rows - rows % (ranks * batch)
        seen.add(tuple(flat))
    assert len(seen) == 3 or (window and len(whole) == 1)  # a single sorted batch has but one order


@pytest.mark.parametrize("batch", [4, 7])
def test_batches_hold_rows_of_like_lengths(batch: int) -> None:
    def padding(window: int | None) -> float:
        batches = epoch(RankInfo(0, 1), batch=batch, window=window)
        lengths = [[LENGTHS[row] for row in rows] for rows in batches]
        return 1 - sum(map(sum, lengths)) / sum(max(own) * len(own) for own in lengths)

    assert padding(64) < 0.5 * padding(None)
    assert padding(1000) < 0.5 * padding(64)
    batches = epoch(RankInfo(0, 1), batch=batch, window=1000)
    means = [sum(LENGTHS[row] for row in rows) / batch for rows in batches]
    assert means != sorted(means)  # lengths come in no order
    dropped = [set(range(203)) - {r for rows in epoch(RankInfo(0, 1), batch=40, window=1000, number=n) for r in rows}
               for n in range(20)]  # fmt: skip
    assert min(LENGTHS[row] for rows in dropped for row in rows) < 20  # the left out are not always the longest


@pytest.mark.parametrize("rows", range(1, 40))
@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (2, 3), (3, 2), (4, 8)])
def test_validation_rows_are_shared_out_once(rows: int, ranks: int, batch: int) -> None:
    if rows < ranks:
        with pytest.raises(UserError, match=f"{rows} validation rows are too few for {ranks} ranks"):
            shares(range(rows), batch_size=batch, rank_info=RankInfo(0, ranks))
        return
    parts = [shares(range(rows), batch_size=batch, rank_info=RankInfo(rank, ranks)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert all(len(own) for part in parts for own in part)
    assert max(len(own) for part in parts for own in part) <= batch + 1
    assert sorted(row for part in parts for own in part for row in own) == list(range(rows))
    if ranks == 1:
        assert parts[0] == [range(rows)[i : i + batch] for i in range(0, rows, batch)]


def test_too_few_rows_for_the_ranks() -> None:
    with pytest.raises(UserError, match="3 training rows are too few for 4 ranks"):
        epoch(RankInfo(0, 4), batch=2, window=None, rows=3)


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    """Each row's tokens, without padding."""
    pairs = zip(batch.ids_BL, batch.supervised_BL, strict=True)
    return [tuple(ids.tolist()[: int(loss.nonzero()[-1]) + 1]) for ids, loss in pairs]


@pytest.mark.parametrize("kind", ["conversations", "corpus"])
def test_data_modules_ask_the_trainer_for_their_rank(target: LanguageModel, tmp_path_factory: Any, kind: str) -> None:
    """Two ranks of batch 2 see, step by step, what one of batch 4 sees; validation rows are on one rank each."""

    def loaded(rank: int, ranks: int, batch: int) -> tuple[list[list[tuple[int, ...]]], ...]:
        module: Any
        if kind == "conversations":
            module = conversations(target, tmp_path_factory.getbasetemp() / "ranks", batch_size=batch, validation=3)
        else:
            module = PackedCorpus(
                target=target, policy=POLICY, counts={"problems": 60}, row_length=256, batch_size=batch, validation=3,
                seed=0,
            )  # fmt: skip
        module.trainer = SimpleNamespace(global_rank=rank, world_size=ranks, current_epoch=1)
        module.setup("fit")
        return tuple([rows_of(b) for b in loader] for loader in (module.train_dataloader(), module.val_dataloader()))

    (train, held), parts = loaded(0, 1, 4), [loaded(rank, 2, 2) for rank in range(2)]
    assert len(train) >= 1
    assert {len(own) for own, _ in parts} == {len(train)}
    for step, rows in enumerate(train):
        assert sorted(parts[0][0][step] + parts[1][0][step]) == sorted(rows)
    assert {len(own) for _, own in parts} == {1}
    assert sorted(parts[0][1][0] + parts[1][1][0]) == sorted(held[0])


def test_a_run_does_not_go_on_with_other_data(toys: SimpleNamespace) -> None:
    """Lightning keeps the digest in the checkpoint and gives it back when a run is resumed."""
    own = Conversations.__new__(Conversations)
    rows = [([1, 2, 3, 4], 2), ([5, 6, 7], 1)]
    own._rows = rows
    kept = own.state_dict()
    own.load_state_dict(kept)
    for other in ([rows[1], rows[0]], rows[:1], [rows[0], ([5, 6, 8], 1)], [rows[0], ([5, 6, 7], 2)]):
        own._rows = other
        with pytest.raises(UserError, match=r"training data .* is not what this run started with"):
            own.load_state_dict(kept)
