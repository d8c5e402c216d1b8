"""Data modules: what is supervised, packing, and that each option changes what comes out."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from data.chat import PromptPolicy, prompt_ids, response_ids
from data.module import Conversations, PackedCorpus, epoch_of, pack, packed_batch, pad, shuffled
from data.prompts import EmbeddedPrompts, JsonlPrompts
from dspec.errors import UserError
from dspec.models.target import Target, embedded_target

POLICY = PromptPolicy(system=None, thinking=False)
SMALL = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12, "batch_size": 4}


@pytest.fixture(scope="module")
def target() -> Target:
    return embedded_target(dtype="float32", device="cpu")


def conversations(target: Target, tmp_path: Path, **changes: Any) -> Conversations:
    source = EmbeddedPrompts(train={"problems": 10}, calibration={"problems": 3}, seed=0)
    settings: dict[str, Any] = {
        "source": source, "policy": POLICY, "regeneration": SMALL, "cache_dir": str(tmp_path), "batch_size": 3,
        "max_length": 200, "validation": 2, "seed": 0,
    }  # fmt: skip
    return Conversations(target=target, **(settings | changes))


def batches(module: Conversations) -> list[torch.Tensor]:
    module.setup("fit")
    return [b.ids_BL for b in module.train_dataloader()]


def test_response_alone_is_supervised_and_the_targets_own(target: Target, tmp_path: Path) -> None:
    module = conversations(target, tmp_path)
    module.setup("fit")
    responses = {tuple(r.prompt_tokens): r.tokens for r in module.responses()}
    seen = 0
    for loader in (module.train_dataloader(), module.val_dataloader()):
        for batch in loader:
            for ids, loss in zip(batch.ids_BL, batch.loss_BL, strict=True):
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
def test_every_option_changes_the_batches(target: Target, tmp_path: Path, change: dict[str, Any]) -> None:
    base, changed = batches(conversations(target, tmp_path)), batches(conversations(target, tmp_path, **change))
    assert [b.tolist() for b in base] == [b.tolist() for b in batches(conversations(target, tmp_path))]
    assert [b.tolist() for b in base] != [b.tolist() for b in changed]


def test_cache_dir_and_batch_size_of_regeneration(target: Target, tmp_path: Path) -> None:
    module = conversations(target, tmp_path / "a")
    module.prepare_data()
    assert module.responses_path.is_file()
    other = conversations(target, tmp_path / "b", regeneration=SMALL | {"batch_size": 2})
    assert other.responses_path.name != module.responses_path.name  # float32 rounds with the batch's shape
    assert other.responses_path.parent.parent == tmp_path / "b"


def test_own_files_of_one_name_never_get_each_others_responses(target: Target, tmp_path: Path) -> None:
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


def test_thinking_switch_reaches_the_template(target: Target) -> None:
    from copy import copy

    tokenizer = copy(target.tokenizer)
    tokenizer.chat_template = "{{ messages[-1].content }}{% if enable_thinking %}<|mask|>{% endif %}"
    on, off = (prompt_ids(tokenizer, "Hi", PromptPolicy(system=None, thinking=t)) for t in (True, False))
    assert on == [*off, tokenizer.mask_token_id]


def test_errors(target: Target, tmp_path: Path) -> None:
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
    assert batch.loss_BL.tolist() == [[False, True, True], [False, True, False]]
    rows = pack([([1, 2, 3], 1), ([4, 5], 1), ([6, 7, 8, 9], 2)], 6)
    assert [[ids for ids, _ in row] for row in rows] == [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]]
    packed = packed_batch(rows, 6)
    assert packed.document_BL is not None
    assert packed.positions_BL is not None
    assert packed.document_BL.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1]]
    assert packed.positions_BL.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert packed.loss_BL.tolist() == [
        [False, True, True, False, True, False],
        [False, False, True, True, False, False],
    ]
    with pytest.raises(UserError, match="row_length=6"):
        pack([([0] * 7, 1)], 6)


def test_packed_corpus_options(target: Target) -> None:
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


def test_response_ids_end_the_turn(target: Target) -> None:
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
    def train_dataloader(self) -> Any:
        return shuffled(range(9), batch_size=2, collate=list, seed=0, epoch=epoch_of(self))


def fit(folder: Path, *, steps: int, resume: Path | None) -> list[list[int]]:
    """The batches of a run of `steps`, a checkpoint after each one."""
    recorder = Recorder()
    every = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", callbacks=[every], **quiet)
    trainer.fit(recorder, datamodule=Numbers(), ckpt_path=resume)
    return recorder.seen


def test_a_run_resumed_anywhere_sees_the_batches_of_the_unbroken_one(tmp_path: Path) -> None:
    """Mid-epoch, at an epoch's end, and in later epochs."""
    whole = fit(tmp_path / "whole", steps=11, resume=None)
    assert all(len({row for batch in whole[i : i + 4] for row in batch}) == 8 for i in (0, 4))
    assert len({tuple(map(tuple, whole[i : i + 3])) for i in (0, 4, 8)}) == 3  # another order each epoch
    for cut in range(1, 11):
        (checkpoint,) = (tmp_path / "whole").glob(f"step={cut}.ckpt")
        assert fit(tmp_path / f"from {cut}", steps=11, resume=checkpoint) == whole[cut:], cut
