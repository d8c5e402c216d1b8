"""D2F: the loss against loops, what student and teacher see, that adapters alone learn, and which bases are refused."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data.conversations import pad
from dspec.errors import UserError
from dspec.masked_diffusion.answers import AnswerLayout, Answers
from dspec.masked_diffusion.noise import BlockRates, Noise
from dspec.method import Batch
from dspec.methods.d2f import D2F, DIVERGENCES, WEIGHTS
from dspec.models.language_model import LanguageModel
from dspec.models.training_record import BLOCK_CAUSAL, FULL, TrainingRecord
from dspec.tuning import FullFineTuning, LoRA

EXACT = {"rtol": 0, "atol": 1e-10}
MASK, EOS, BLOCK = 10, 9, 4
ROWS = [(3, 6), (1, 2), (4, 9)]


def toy(toys: SimpleNamespace, *, shift: bool = True, family: str = "qwen3") -> LanguageModel:
    """A diffusion LM, as its config says."""
    made: LanguageModel = toys.target(family)
    made.tokenizer = SimpleNamespace(eos_token_id=EOS)
    TrainingRecord(FULL, 8, shift).write(made)
    return made


def lora(interpolation: float = 1.0) -> LoRA:
    return LoRA(rank=2, alpha=4, modules="all-linear", interpolation=interpolation)


def untrained(target: LanguageModel, **changes: Any) -> D2F:
    settings: dict[str, Any] = {
        "tuning": lora(), "layout": AnswerLayout(block_size=BLOCK, tail_blocks=1, tail_rows=1),
        "rates": BlockRates(schedule="monotone", low=0.2, high=0.7), "kl": "student_teacher", "weight": "none",
        "eos_blocks": True, "shift": None, "chunk_mb": 6e-4,
    }  # fmt: skip
    return D2F(target=target, **(settings | changes))


def method(target: LanguageModel, **changes: Any) -> D2F:
    """With adapters that change something: peft's begin at zero."""
    made, g = untrained(target, **changes), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.copy_(0.3 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return made


def batch_of(rows: Sequence[tuple[int, int]] = ROWS, *, first: int = 0) -> Batch:
    """Random rows of (tokens of the prompt, of the response with its EOS), numbered from `first`."""
    g = torch.Generator().manual_seed(0)
    texts = [(torch.randint(EOS, (a + b,), generator=g).tolist(), a) for a, b in rows]
    made = pad([([*ids[:-1], EOS], start) for ids, start in texts])
    return Batch(made.ids_BL, made.supervised_BL, row_numbers=range(first, first + len(rows)))


def generators(rows: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + row) for row in range(rows)]


def layout(trained: D2F, batch: Batch) -> Answers:
    return trained.layout.answers(batch, stop_ids=(EOS,), max_places=99)


def some_noise(answers: Answers) -> Noise:
    """About half of the slots, each with another probability; four of five have a loss."""
    g = torch.Generator().manual_seed(3)
    uniform, other = torch.rand((2, *answers.ids_BL.shape), generator=g, dtype=torch.float64)
    slots = answers.slot_BL >= 0
    return Noise((uniform < 0.5) & slots, 0.2 + uniform / 2, (other < 0.8) & slots)


def log_probs(target: LanguageModel, row: Tensor, sees: Tensor, *, shift: bool) -> Tensor:
    """log p [L, V - 1] of the token at each place, by a pass over this row alone with the mask as a table [L, L]."""
    hidden = target(row[None], mask=lambda b, h, q, kv: sees[q, kv]).hidden_BLD[0]
    logits_LV = target.logits(hidden)[:, :MASK]
    return (logits_LV.roll(1, 0) if shift else logits_LV).log_softmax(-1)


def tables(prompt: int, end: int) -> tuple[Tensor, Tensor]:
    """What places of the student and of the teacher see [L, L], by loops."""
    block = [0 if place < prompt else 1 + (place - prompt) // BLOCK for place in range(end)]
    student = torch.tensor([[block[k] <= block[q] for k in range(end)] for q in range(end)])
    return student, torch.ones(end, end, dtype=torch.bool)


# ---- the loss


@pytest.mark.parametrize("kl", DIVERGENCES)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("eos_blocks", [True, False])
def test_loss_and_gradient(toys: SimpleNamespace, kl: str, weight: str, shift: bool, eos_blocks: bool) -> None:
    target = toy(toys, shift=shift)
    base = {name: p.clone() for name, p in target.model.named_parameters()}
    teacher = toys.target()
    trained = method(target, kl=kl, weight=weight, eos_blocks=eos_blocks)
    teacher.model.load_state_dict(base)
    answers = layout(trained, batch_of(first=1))
    noise = some_noise(answers)
    result = trained.loss_at(answers, noise)
    terms: list[Tensor] = []
    distances: list[float] = []
    matches = 0
    for b, (end, (prompt, response)) in enumerate(zip(answers.end_B.tolist(), ROWS, strict=True)):
        masked = noise.masked_BL[b, :end]
        row = answers.ids_BL[b, :end].masked_fill(masked, MASK)
        seen = tables(prompt, end)
        log_p, log_q = (log_probs(m, row, s, shift=shift) for m, s in zip((target, teacher), seen, strict=True))
        log_q = log_q.detach()
        for place in (masked & noise.in_loss_BL[b, :end]).nonzero()[:, 0].tolist():
            if not eos_blocks and place >= prompt + response:
                continue
            p, q = log_p[place], log_q[place]
            one = (p.exp() * (p - q)).sum() if kl == "student_teacher" else (q.exp() * (q - p)).sum()
            terms.append(one / noise.probability_BL[b, place] if weight == "inverse_p" else one)
            distances.append(float(one.detach()))
            matches += int(p.argmax() == q.argmax())
    expected = torch.stack(terms).sum()
    torch.testing.assert_close(result.loss_sum, expected, **EXACT)
    assert int(result.weight) == len(terms)
    logged = {name: [float(result.metrics[f"{part}{name}"][0]) for part in ("", "tail_")] for name in ("kl", "match")}
    assert sum(logged["kl"]) == pytest.approx(sum(distances), abs=1e-10)  # without the weights
    assert sum(logged["match"]) == matches < len(terms)
    rate = [int((noise.masked_BL & noise.in_loss_BL).sum()), int(noise.in_loss_BL.sum())]
    assert [int(n) for n in result.metrics["mask_rate"]] == rate
    parameters = [p for p in target.model.parameters() if p.requires_grad]
    got, wanted = (torch.autograd.grad(x, parameters) for x in (result.loss_sum, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert max(float(g.abs().max()) for g in got) > 0.1


def test_both_directions_weights_and_tails_differ(toys: SimpleNamespace) -> None:
    losses = []
    for changes in ({}, {"kl": "teacher_student"}, {"weight": "inverse_p"}, {"eos_blocks": False}):
        trained = method(toy(toys), **changes)
        answers = layout(trained, batch_of())
        result = trained.loss_at(answers, some_noise(answers))
        losses.append(float(result.loss_sum.detach() / result.weight))
    assert len({round(x, 6) for x in losses}) == 4


def test_before_training_the_distance_is_that_of_the_masks_alone(toys: SimpleNamespace) -> None:
    """With one block over the whole answer only the prompt sees less than the teacher's; with an answer of one place
    and no prompt to speak of, nothing differs."""
    trained = untrained(toy(toys, shift=False))
    answers = layout(trained, batch_of([(1, 2)]))
    slots = answers.slot_BL >= 0
    everything = Noise(slots, torch.ones(slots.shape, dtype=torch.float64), slots)
    assert float(trained.loss_at(answers, everything).loss_sum.detach()) > 1e-3
    whole = replace(answers, slot_BL=answers.slot_BL + 1, block_size=8)  # one block, the prompt included
    assert float(trained.loss_at(whole, everything).loss_sum.detach()) == pytest.approx(0, abs=1e-12)


def test_mask_has_no_probability_and_no_gradient(toys: SimpleNamespace) -> None:
    """Even if its logit is the largest."""
    for kl in DIVERGENCES:
        trained = method(toy(toys), kl=kl)
        answers = layout(trained, batch_of())
        before = trained.loss_at(answers, some_noise(answers)).loss_sum
        with torch.no_grad():
            trained.target.lm_head.weight[MASK] = 1e4
        after = trained.loss_at(answers, some_noise(answers)).loss_sum
        torch.testing.assert_close(after, before, **EXACT)
        assert all(
            g.isfinite().all() for g in torch.autograd.grad(after, [p for p in trained.parameters() if p.requires_grad])
        )


def test_nothing_to_predict(toys: SimpleNamespace) -> None:
    trained = method(toy(toys))
    batch = Batch(torch.tensor([[3, 1, 2], [4, 5, 6]]), torch.zeros(2, 3, dtype=torch.bool), row_numbers=(0, 1))
    result = trained.loss(batch, generators=generators(2))
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == int(result.weight) == 0


def test_padding_has_no_influence(toys: SimpleNamespace) -> None:
    trained = method(toy(toys))
    answers = layout(trained, batch_of())
    noise = some_noise(answers)
    alone = []
    for b, end in enumerate(answers.end_B.tolist()):
        row = slice(b, b + 1), slice(0, end)
        cut = Answers(answers.ids_BL[row], answers.slot_BL[row], answers.tail_BL[row], answers.end_B[b : b + 1], BLOCK)
        alone.append(trained.loss_at(cut, Noise(*(x[row] for x in vars(noise).values()))).loss_sum)
    torch.testing.assert_close(trained.loss_at(answers, noise).loss_sum, sum(alone), **EXACT)


# ---- what student and teacher see


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_later_block_changes_nothing_of_the_students_earlier_ones(toys: SimpleNamespace, family: str) -> None:
    """Bit for bit; everything of the teacher's."""
    trained = method(toy(toys, family=family))
    answers = layout(trained, batch_of([(3, 12)]))
    ids, block = answers.ids_BL, answers.blocks[0]
    with torch.no_grad():
        before = trained.hidden(answers, ids)
        for place in range(ids.shape[1]):
            changed = ids.clone()
            changed[0, place] = (ids[0, place] + 1) % EOS
            student, teacher = (
                (a - b).abs().amax(-1)[0] for a, b in zip(trained.hidden(answers, changed), before, strict=True)
            )
            sees = block >= block[place]
            assert (student[~sees] == 0).all()
            assert (student[sees] > 1e-6).all()
            assert (teacher > 1e-6).all()


def test_both_get_the_same_noisy_rows(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the prompts is masked."""
    trained, batch, seen = method(toy(toys)), batch_of(), []
    own = LanguageModel.forward
    monkeypatch.setattr(LanguageModel, "forward", lambda m, ids, **how: seen.append(ids.clone()) or own(m, ids, **how))
    trained.loss(batch, generators=generators(3))
    answers = layout(trained, batch)
    assert len(seen) == 2
    assert torch.equal(*seen)
    masked = seen[0] == MASK
    assert masked.any(1).all()
    assert not (masked & (answers.slot_BL < 0)).any()
    assert torch.equal(seen[0][~masked], answers.ids_BL[~masked])


# ---- the adapter


def test_without_its_adapter_the_model_is_the_base_bit_for_bit(toys: SimpleNamespace) -> None:
    base, trained = toy(toys), method(toy(toys))
    ids = batch_of().ids_BL
    with torch.no_grad():
        expected, adapted = base(ids).hidden_BLD, trained.target(ids).hidden_BLD
        with trained.tuning.disabled(trained.target):
            assert torch.equal(trained.target(ids).hidden_BLD, expected)
            assert not any(p.requires_grad for p in trained.parameters())
        assert torch.equal(trained.target(ids).hidden_BLD, adapted)
    assert (adapted - expected).abs().max() > 1e-3


def test_an_error_within_leaves_the_adapter_on(toys: SimpleNamespace) -> None:
    trained = method(toy(toys))
    with pytest.raises(ValueError, match="stop"), trained.tuning.disabled(trained.target):
        raise ValueError("stop")
    assert all(not m.disable_adapters for m in trained.target.model.modules() if isinstance(m, LoraLayer))


def test_the_gradient_reaches_adapters_only(toys: SimpleNamespace) -> None:
    trained = method(toy(toys))
    for _ in range(2):  # also after a pass without the adapter
        trained.loss(batch_of(), generators=generators(3)).loss_sum.backward()
    reached = {
        name for name, p in trained.target.model.named_parameters() if p.grad is not None and (p.grad != 0).any()
    }
    assert reached == {name for name, p in trained.target.model.named_parameters() if "lora_" in name}
    assert reached == {name for name, p in trained.target.model.named_parameters() if p.requires_grad}


def test_training_brings_the_student_to_the_teacher(toys: SimpleNamespace) -> None:
    torch.manual_seed(0)
    trained = untrained(toy(toys), chunk_mb=1, tuning=LoRA(rank=8, alpha=16, modules="all-linear", interpolation=1.0))
    answers = layout(trained, batch_of())
    noise, losses = some_noise(answers), []
    optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(60):
        output = trained.loss_at(answers, noise)
        optimizer.zero_grad()
        (output.loss_sum / output.weight).backward()
        optimizer.step()
        losses.append(float(output.loss_sum.detach()))
    assert losses[-1] < 0.1 * losses[0]


class Wrapped(nn.Module):
    """What DDP wraps: a method, called by its loss."""

    def __init__(self, trained: D2F) -> None:
        super().__init__()
        self.trained = trained

    def forward(self, batch: Batch, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        result = self.trained.loss(batch, generators=[generators(4)[row] for row in rows])
        return result.loss_sum, result.weight


def gradients(module: nn.Module, trained: D2F, rows: Sequence[int], *, ranks: int = 1) -> list[Tensor]:
    """Of the global ratio, as training/lit_module.py takes it."""
    whole = batch_of([(3, 6), (1, 2), (4, 9), (2, 5)])
    loss_sum, weight = module(Batch(whole.ids_BL[rows], whole.supervised_BL[rows], row_numbers=rows), rows)
    if ranks > 1:
        dist.all_reduce(weight)
    (loss_sum * ranks / weight).backward()
    return [p.grad for p in trained.parameters() if p.requires_grad and p.grad is not None]


def test_two_ranks_under_ddp_train_as_one(toys: SimpleNamespace, tmp_path: Path) -> None:
    """The adapter is switched off and on again within the pass that DDP watches."""
    one = method(toy(toys))
    expected = gradients(Wrapped(one), one, [0, 1, 2, 3])

    def child(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        trained = method(toy(toys))
        ranked = DistributedDataParallel(Wrapped(trained))
        for _ in range(2):  # DDP would notice in the second pass what was missing in the first
            trained.zero_grad()
            found = gradients(ranked, trained, [rank, rank + 2], ranks=2)
        torch.save(found, tmp_path / f"{rank}.pt")
        os._exit(0)  # not through what pytest does at exit

    started = [mp.get_context("fork").Process(target=child, args=(rank,)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


# ---- after training


@pytest.mark.parametrize("interpolation", [1.0, 0.5])
def test_merged_it_decodes_as_with_its_adapter(toys: SimpleNamespace, interpolation: float) -> None:
    trained = method(toy(toys), tuning=lora(interpolation))
    target = trained.target
    settings = {"block_size": BLOCK, "append_ratio": 0.1, "activate_ratio": 0.95, "threshold": 0.5}

    def answer() -> list[list[int]]:
        decoder = toys.build_decoder("d2f", target=target, **settings)
        prompts = [[1, 2, 3], [4], [5, 6]]
        made = toys.Bound(decoder, toys.GREEDY).decode(prompts, seeds=[0] * 3, max_new_tokens=14, stop_ids=(EOS,))
        return [g.tokens for g in made]

    for layer in target.model.modules():
        if isinstance(layer, LoraLayer):
            layer.scale_layer(interpolation)
    before = answer()
    for layer in target.model.modules():
        if isinstance(layer, LoraLayer):
            layer.unscale_layer()
    trained.finish()
    assert answer() == before
    assert not any(isinstance(m, LoraLayer) for m in target.model.modules())


def test_its_folder_says_how_it_was_trained(toys: SimpleNamespace) -> None:
    for shift in (True, False):
        target = toy(toys, shift=shift)
        method(target)
        assert TrainingRecord.read(target) == TrainingRecord(BLOCK_CAUSAL, BLOCK, shift)


def test_what_it_exports_is_a_plain_model_in_bfloat16(toys: SimpleNamespace, tmp_path: Path) -> None:
    target = toy(toys)
    trained = method(target)
    trained.finish()
    target.tokenizer = SimpleNamespace(eos_token_id=EOS, save_pretrained=lambda folder: None)
    folder = trained.export(tmp_path, card="a card")
    config = json.loads((folder / "config.json").read_text())
    assert (config["dspec_attention"], config["dspec_block_size"], config["dtype"]) == (
        "block_causal",
        BLOCK,
        "bfloat16",
    )
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() <= toys.target().model.state_dict().keys()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


# ---- what is refused


def test_the_shift_is_the_bases(toys: SimpleNamespace) -> None:
    for shift in (True, False):
        assert untrained(toy(toys, shift=shift)).shift is shift
        assert untrained(toy(toys, shift=shift), shift=shift).shift is shift
        with pytest.raises(UserError, match=f"method.shift={str(not shift).lower()} contradicts"):
            untrained(toy(toys, shift=shift), shift=not shift)


def test_a_base_that_is_no_diffusion_lm_needs_a_word(toys: SimpleNamespace) -> None:
    ar = toys.target()
    with pytest.raises(UserError, match=r"not recorded as a diffusion LM.*recipe=dllm_base"):
        untrained(ar)
    for shift in (True, False):
        assert untrained(toys.target(), shift=shift).shift is shift


def test_a_student_is_no_teacher(toys: SimpleNamespace) -> None:
    student = toy(toys)
    TrainingRecord(BLOCK_CAUSAL, BLOCK, shift=True).write(student)
    for shift in (None, True):
        with pytest.raises(UserError, match="is a D2F student"):
            untrained(student, shift=shift)


def test_settings_that_do_not_exist(toys: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="method/tuning=lora"):
        untrained(toy(toys), tuning=FullFineTuning(interpolation=1.0))
    with pytest.raises(UserError, match="kl=forward is unknown; choose one of student_teacher, teacher_student"):
        untrained(toy(toys), kl="forward")
    with pytest.raises(UserError, match="weight=p is unknown"):
        untrained(toy(toys), weight="p")
    masked = toy(toys)
    masked.mask_token_id = None
    with pytest.raises(UserError, match="no mask token"):
        untrained(masked)
