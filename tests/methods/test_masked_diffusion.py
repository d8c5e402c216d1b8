"""Masked diffusion: the loss against one softmax per slot, what a slot sees, and what decoders read of the model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from data.conversations import pad
from dspec.errors import UserError
from dspec.masked_diffusion.answers import AnswerLayout, Answers
from dspec.masked_diffusion.noise import SCHEDULES, BlockRates, Noise
from dspec.method import Batch
from dspec.methods.masked_diffusion import MaskedDiffusion
from dspec.models.language_model import LanguageModel, embedded_target, load_language_model
from dspec.models.training_record import BLOCK_CAUSAL, FULL, TrainingRecord
from dspec.tuning import FullFineTuning, LoRA

EXACT = {"rtol": 0, "atol": 1e-10}
MASK, EOS = 10, 9  # of the toys: MASK is their last token
ROWS = [(3, 6), (1, 2), (4, 9)]


def toy(toys: SimpleNamespace, **shape: Any) -> LanguageModel:
    made: LanguageModel = toys.target(**shape)
    made.tokenizer = SimpleNamespace(eos_token_id=EOS)
    return made


def method(target: LanguageModel, **changes: Any) -> MaskedDiffusion:
    settings: dict[str, Any] = {
        "tuning": FullFineTuning(interpolation=1.0),
        "layout": AnswerLayout(block_size=4, tail_blocks=2, tail_rows=1),
        "rates": BlockRates(schedule="constant", low=0.1, high=1.0), "shift": True, "chunk_mb": 6e-4,
    }  # fmt: skip
    return MaskedDiffusion(target=target, **(settings | changes))


def generators(rows: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + row) for row in range(rows)]


def batch_of(rows: Sequence[tuple[int, int]] = ROWS, *, first: int = 0, seed: int = 0) -> Batch:
    """Random rows of (tokens of the prompt, of the response with its EOS), numbered from `first`."""
    g = torch.Generator().manual_seed(seed)
    texts = [(torch.randint(EOS, (a + b,), generator=g).tolist(), a) for a, b in rows]
    made = pad([([*ids[:-1], EOS], start) for ids, start in texts])
    return Batch(made.ids_BL, made.supervised_BL, row_numbers=range(first, first + len(rows)))


def layout(trained: Any, batch: Batch) -> Answers:
    return trained.layout.answers(batch, stop_ids=(EOS,), max_places=99)  # type: ignore[no-any-return]


def some_noise(answers: Answers, *, seed: int = 0) -> Noise:
    """About half of the slots, each with another probability; four of five have a loss."""
    g = torch.Generator().manual_seed(seed)
    uniform, other = torch.rand((2, *answers.ids_BL.shape), generator=g, dtype=torch.float64)
    slots = answers.slot_BL >= 0
    return Noise((uniform < 0.5) & slots, 0.2 + uniform / 2, (other < 0.8) & slots)


def all_masked(answers: Answers) -> Noise:
    slots = answers.slot_BL >= 0
    return Noise(slots, torch.ones(slots.shape, dtype=torch.float64), slots)


def log_probs(target: LanguageModel, row: Tensor, sees: Tensor, place: int, *, shift: bool) -> Tensor:
    """log p [V - 1] at `place`, in a pass over this row alone with the mask as a table [L, L]; MASK is left out."""
    hidden = target(row[None], mask=lambda b, h, q, kv: sees[q, kv]).hidden_BLD
    return target.logits(hidden[0, place - int(shift)])[:MASK].log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("tail", [None, 0, 2])
def test_loss_and_gradient(toys: SimpleNamespace, family: str, shift: bool, tail: int | None) -> None:
    trained = method(
        toy(toys, family=family), shift=shift, layout=AnswerLayout(block_size=4, tail_blocks=tail, tail_rows=1)
    )
    answers = layout(trained, batch_of(first=2))
    noise = some_noise(answers)
    result = trained.loss_at(answers, noise)
    terms: list[Tensor] = []
    ce: dict[str, list[float]] = {"": [], "tail_": []}
    right = {"": 0, "tail_": 0}
    for b, end in enumerate(answers.end_B.tolist()):
        masked = noise.masked_BL[b, :end]
        row = answers.ids_BL[b, :end].masked_fill(masked, MASK)
        for place in (masked & noise.in_loss_BL[b, :end]).nonzero()[:, 0].tolist():
            full = torch.ones(end, end, dtype=torch.bool)
            label = int(answers.ids_BL[b, place])
            log_p = log_probs(trained.target, row, full, place, shift=shift)
            part = "tail_" if answers.tail_BL[b, place] else ""
            terms.append(-log_p[label] / noise.probability_BL[b, place])
            ce[part].append(-float(log_p[label].detach()))
            right[part] += int(log_p.argmax()) == label
    expected = torch.stack(terms).sum()
    torch.testing.assert_close(result.loss_sum, expected, **EXACT)
    assert sum(answers.slots) == {None: 17, 0: 24}.get(tail, sum(answers.slots))
    assert int(result.weight) == int(noise.in_loss_BL.sum()) < sum(answers.slots)
    assert len(terms) < int(noise.masked_BL.sum())
    for part, losses in ce.items():
        total, count = result.metrics[f"{part}ce"]
        assert int(count) == len(losses)
        assert float(total) == pytest.approx(sum(losses), abs=1e-10)
        assert float(result.metrics[f"{part}accuracy"][0]) == right[part]
    rate = [int((noise.masked_BL & noise.in_loss_BL).sum()), int(noise.in_loss_BL.sum())]
    assert [int(n) for n in result.metrics["mask_rate"]] == rate
    parameters = list(trained.target.model.parameters())
    got, wanted = (torch.autograd.grad(x, parameters) for x in (result.loss_sum, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert max(float(g.abs().max()) for g in got) > 0.1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_is_an_unbiased_mean_over_slots(toys: SimpleNamespace, schedule: str) -> None:
    """Where the loss of a slot does not depend on the other slots, the mean is that over all slots, masked or not;
    blockwise, a block is in half of its mean over two blocks if it is the first of a row, else in all."""
    target = toy(toys)
    with torch.no_grad():  # no attention, and one hidden state for all inputs
        for name, p in target.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                p.zero_()
        target.embed_tokens.weight[:] = target.embed_tokens.weight[MASK]
    grid = AnswerLayout(block_size=4, tail_blocks=0, tail_rows=1)
    trained = method(target, layout=grid, rates=BlockRates(schedule=schedule, low=0.01, high=1.0), chunk_mb=1)
    batch = batch_of([(3, 6)] * 64)
    batch.ids_BL[:] = batch.ids_BL[0]
    with torch.no_grad():
        drawn = [
            trained.loss(replace(batch, row_numbers=range(64 * n, 64 * n + 64)), generators=generators(64, n))
            for n in range(40)
        ]
        answers = layout(trained, batch)
        parts = [trained.loss_at(answers, replace(all_masked(answers), in_loss_BL=answers.blocks == b)) for b in (1, 2)]
    first = 0.5 if schedule == "blockwise" else 1.0  # of rows, in which block 1 has a loss
    total, slots = (first * one + two for one, two in zip(*((p.loss_sum, p.weight) for p in parts), strict=True))
    losses, weights = (torch.stack([getattr(one, name) for one in drawn]).double() for name in ("loss_sum", "weight"))
    means = losses - weights * total / slots  # 0 on average, whatever the number of slots in a batch
    error = means.std() / len(means) ** 0.5
    assert abs(float(means.mean())) < 4 * error
    assert error < 0.02 * losses.mean()


def test_mask_has_no_probability_and_no_gradient(toys: SimpleNamespace) -> None:
    """Even if its logit is the largest."""
    trained = method(toy(toys))
    answers = layout(trained, batch_of())
    noise = some_noise(answers)
    before = trained.loss_at(answers, noise).loss_sum
    with torch.no_grad():
        trained.target.lm_head.weight[MASK] = 1e4
    after = trained.loss_at(answers, noise).loss_sum
    torch.testing.assert_close(after, before, **EXACT)
    after.backward()
    grad = trained.target.lm_head.weight.grad
    assert (grad[MASK] == 0).all()
    assert grad.isfinite().all()
    assert (trained.target.embed_tokens.weight.grad[MASK] != 0).any()  # the input of empty slots


def inputs(trained: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The token ids that a step gives the model."""
    seen: list[Tensor] = []
    own = LanguageModel.forward
    monkeypatch.setattr(
        LanguageModel, "forward", lambda model, ids, **how: seen.append(ids.clone()) or own(model, ids, **how)
    )
    with torch.no_grad():
        trained.loss(batch, generators=generators(len(batch.ids_BL)))
    return seen[0]


def test_nothing_of_a_prompt_is_masked(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = method(toy(toys), rates=BlockRates(schedule="constant", low=1.0, high=1.0))
    batch = batch_of()
    ids = inputs(trained, batch, monkeypatch)
    answers = layout(trained, batch)
    assert torch.equal(ids == MASK, answers.slot_BL >= 0)
    assert torch.equal(ids[ids != MASK], answers.ids_BL[ids != MASK])


def test_a_mask_in_the_text_is_context_alone(toys: SimpleNamespace) -> None:
    trained, batch = method(toy(toys)), batch_of()
    batch.ids_BL[0, 4] = MASK
    answers = layout(trained, batch)
    result = trained.loss_at(answers, all_masked(answers))
    assert result.loss_sum.isfinite()
    counted = sum(int(result.metrics[name][1]) for name in ("ce", "tail_ce"))
    assert counted == int(result.weight) - 1 == sum(answers.slots) - 1


def test_padding_has_no_influence(toys: SimpleNamespace) -> None:
    trained = method(toy(toys))
    answers = layout(trained, batch_of())
    noise = some_noise(answers)
    together = trained.loss_at(answers, noise)
    alone = []
    for b, end in enumerate(answers.end_B.tolist()):
        row = slice(b, b + 1), slice(0, end)
        cut = Answers(answers.ids_BL[row], answers.slot_BL[row], answers.tail_BL[row], answers.end_B[b : b + 1], 4)
        alone.append(trained.loss_at(cut, Noise(*(x[row] for x in vars(noise).values()))))
    torch.testing.assert_close(together.loss_sum, sum(x.loss_sum for x in alone), **EXACT)
    assert int(together.weight) == sum(int(x.weight) for x in alone)


def test_nothing_to_predict(toys: SimpleNamespace) -> None:
    trained = method(toy(toys))
    batch = Batch(torch.tensor([[3, 1, 2], [4, 5, 6]]), torch.zeros(2, 3, dtype=torch.bool), row_numbers=(0, 1))
    result = trained.loss(batch, generators=generators(2))
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == int(result.weight) == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in trained.parameters())


@pytest.mark.parametrize("shift", [True, False])
def test_decoders_and_exports_know_how_it_was_trained(toys: SimpleNamespace, shift: bool, tmp_path: Path) -> None:
    target = toy(toys)
    assert TrainingRecord.read(target) == TrainingRecord(None, None, shift=False)
    trained = method(target, shift=shift)
    assert TrainingRecord.read(target) == TrainingRecord(FULL, 4, shift=shift)
    target.tokenizer = SimpleNamespace(eos_token_id=EOS, save_pretrained=lambda folder: None)
    folder = trained.export(tmp_path, card="a card")
    config = json.loads((folder / "config.json").read_text())
    assert (config["dspec_attention"], config["dtype"]) == ("bidirectional", "bfloat16")
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert (config["dspec_block_size"], config["dspec_logit_shift"], config["mask_token_id"]) == (4, shift, MASK)
    TrainingRecord(BLOCK_CAUSAL, 8, shift=True).write(target)
    assert TrainingRecord.read(target) == TrainingRecord(BLOCK_CAUSAL, 8, shift=True)


@pytest.mark.parametrize("shift", [True, False])
def test_it_decodes_by_heart_what_it_was_trained_on(toys: SimpleNamespace, shift: bool) -> None:
    """With a run's own decoder, right after training: a wrong place of the logits, tail or mask would show."""
    texts = [([1, 2], [4, 5, 6, 7, 0, EOS]), ([3], [8, 6, EOS])]
    target = toy(toys, dtype=torch.float32, scale=0.2, hidden=32, layers=2)
    trained = method(target, shift=shift, rates=BlockRates(schedule="constant", low=0.5, high=1.0), chunk_mb=1)
    batch, optimizer = pad([([*a, *b], len(a)) for a, b in texts]), torch.optim.Adam(trained.parameters(), lr=3e-3)
    for step in range(300):
        output = trained.loss(replace(batch, row_numbers=(2 * step, 2 * step + 1)), generators=generators(2, step))
        optimizer.zero_grad()
        (output.loss_sum / output.weight).backward()
        optimizer.step()
    trained.finish()
    decoder = toys.build_decoder("diffusion", target=target, tokens_per_step=1, block_size=4, attention=None)
    prompts = [prompt for prompt, _ in texts]
    made = toys.Bound(decoder, toys.GREEDY).decode(prompts, seeds=[0, 0], max_new_tokens=12, stop_ids=(EOS,))
    assert [g.tokens for g in made] == [response for _, response in texts]


def test_adapters_are_merged(toys: SimpleNamespace) -> None:
    target = toy(toys)
    trained = method(target, tuning=LoRA(rank=2, alpha=4, modules="all-linear", interpolation=1.0))
    assert any("lora_" in name for name, _ in target.model.named_parameters())
    trained.finish()
    assert target.model.state_dict().keys() == toy(toys).model.state_dict().keys()


def test_a_diffusion_lm_is_trained_on_with_its_own_shift(toys: SimpleNamespace) -> None:
    """An AR base may be trained either way; a diffusion LM would have to learn its places anew."""
    for shift in (True, False):
        target = toy(toys)
        TrainingRecord(FULL, None, shift).write(target)
        assert method(target, shift=shift).shift is shift
        with pytest.raises(UserError, match=f"method.shift={str(not shift).lower()} contradicts target"):
            method(target, shift=not shift)


def test_a_target_without_a_mask_token_is_refused(toys: SimpleNamespace) -> None:
    target = toys.target()
    target.mask_token_id = None
    with pytest.raises(UserError, match="no mask token"):
        method(target)


@pytest.mark.slow
def test_an_exported_folder_says_how_it_was_trained(tmp_path: Path) -> None:
    folder = method(embedded_target(dtype="float32", device="cpu")).export(tmp_path, card="a card")
    again = load_language_model(path=str(folder), name="t", dtype="float32", device="cpu", mask_token=None)
    assert TrainingRecord.read(again) == TrainingRecord(FULL, 4, shift=True)  # type: ignore[arg-type]
