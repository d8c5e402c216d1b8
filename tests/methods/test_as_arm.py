"""AS-ARM: the joint loss against one pass per conditional; what a conditional depends on; how (sigma, m) is drawn."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from data.conversations import pad
from data.packed_corpus import document_batch
from dspec.errors import UserError
from dspec.method import Batch
from dspec.methods.as_arm import ASARM, MaskRate, Order, draw_order, layout, row_lengths
from dspec.models.language_model import LanguageModel, embedded_target, load_language_model
from dspec.models.target_model import TargetModel
from dspec.seeding import GOLDEN_RATIO
from dspec.training.lit_module import LitModule
from dspec.tuning import FullFineTuning

EXACT = {"rtol": 0, "atol": 1e-10}
WIDE = MaskRate(low=[0.1, 0.1], high=[1.0, 1.0], steps=0)
MASK = 10  # of the toys: their last token


def method(target: TargetModel, **changes: Any) -> ASARM:
    settings: dict[str, Any] = {
        "tuning": FullFineTuning(interpolation=1.0), "rate": WIDE, "order": "sorted", "first_visible": False,
        "draft_depth": 1, "normalisation": "per_token", "chunk_mb": 6e-4,
    }  # fmt: skip
    return ASARM(target=target, **(settings | changes))


def generators(rows: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + row) for row in range(rows)]


def batch_of(rows: Sequence[Sequence[int]], *, first: int = 0, padding: int = 0) -> Batch:
    """Rows numbered from `first`, whose response begins at their second token."""
    made = pad([(list(row), 1) for row in rows])
    place = torch.arange(made.ids_BL.shape[1])
    real = place < torch.tensor([len(row) for row in rows])[:, None]
    return Batch(made.ids_BL.where(real, padding), made.supervised_BL, row_numbers=range(first, first + len(rows)))


def texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(MASK, (n,), generator=generator).tolist() for n in lengths]


def orders(lengths: Sequence[int], *, order: str = "sorted", draft_depth: int = 1, seed: int = 0) -> list[Order]:
    how: dict[str, Any] = {"order": order, "first_visible": False, "draft_depth": draft_depth}
    rates = [0.3, 0.6, 0.99, 0.5]
    return [
        draw_order(n, rates[i % 4], g, **how)
        for i, (n, g) in enumerate(zip(lengths, generators(9, seed), strict=False))
    ]


def conditional(target: LanguageModel, text: Sequence[int], known: Sequence[int], prompt: int, position: int) -> Tensor:
    """log p of the token at `position` given those at the positions `known`, of which the first `prompt` are the
    prompt: a separate pass with the tokens in order of position and the mask as a table."""
    at = sorted([*known, position])
    rank = {p: i for i, p in enumerate(known)}
    table = torch.zeros(len(at), len(at), dtype=torch.bool)
    for q, query in enumerate(at):
        for k, key in enumerate(at):
            if query == position:
                table[q, k] = True
            elif key != position:
                both_given = rank[query] < prompt and rank[key] < prompt
                table[q, k] = both_given or rank[key] <= rank[query]
    ids = torch.tensor([[MASK if p == position else text[p] for p in at]])
    hidden = target(ids, positions_BL=torch.tensor([at]), mask=lambda b, h, q, kv: table[q, kv]).hidden_BLD
    logits_V = target.logits(hidden[0, at.index(position)])
    return logits_V[:MASK].log_softmax(-1)[text[position]]  # MASK is the last token: it is left out


def of_xlnet(
    toys: SimpleNamespace, target: TargetModel, text: Sequence[int], known: Sequence[int], prompt: int, position: int
) -> Tensor:
    """The same of an XLNet, by transformers' own pass."""
    logits_V = toys.two_stream_logits(target, [text[p] for p in known], known, prompt=prompt, at=position)
    return logits_V[:MASK].log_softmax(-1)[text[position]]


def reference(toys: SimpleNamespace, target: TargetModel, text: Sequence[int], order: Order) -> Tensor:
    """- log p of each predicted token."""
    position, losses = order.position_N.tolist(), []
    one = conditional if isinstance(target, LanguageModel) else partial(of_xlnet, toys)
    for i, limit in enumerate(order.limit_P.tolist()):
        losses.append(-one(target, text, position[:limit], order.prompt, position[order.prompt + i]))
    return torch.stack(losses)


def backbone(toys: SimpleNamespace, family: str, **shape: Any) -> Any:
    return toys.xlnet(**shape) if family == "xlnet" else toys.target(family, **shape)


# ---- the loss


@pytest.mark.parametrize("family", ["llama", "qwen3", "xlnet"])
@pytest.mark.parametrize("normalisation", ["per_token", "per_row"])
@pytest.mark.parametrize(("order", "draft_depth"), [("sorted", 1), ("random", 1), ("sorted", 4)])
def test_loss_and_gradient(
    toys: SimpleNamespace, family: str, normalisation: str, order: str, draft_depth: int
) -> None:
    lengths = [7, 2, 9]
    rows, drawn = texts(lengths), orders(lengths, order=order, draft_depth=draft_depth)
    trained = method(backbone(toys, family), order=order, draft_depth=draft_depth, normalisation=normalisation)
    result = trained.loss_at(batch_of(rows), drawn)
    losses = [reference(toys, trained.target, row, o) for row, o in zip(rows, drawn, strict=True)]
    if normalisation == "per_token":
        expected, weight = torch.cat(losses).sum(), sum(len(x) for x in losses)
    else:
        expected, weight = torch.stack([x.mean() for x in losses]).sum(), 3
    torch.testing.assert_close(result.loss_sum, expected, **EXACT)
    assert int(result.weight) == weight
    torch.testing.assert_close(result.metrics["ce"][0], torch.cat(losses).sum(), **EXACT)
    parameters = list(trained.target.model.parameters())
    got, wanted = (torch.autograd.grad(x, parameters) for x in (result.loss_sum, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert max(float(g.abs().max()) for g in got) > 0.1


def test_both_normalisations_differ_by_rows_of_unequal_length(toys: SimpleNamespace) -> None:
    lengths = [3, 20]
    rows, drawn, target = texts(lengths), orders(lengths), toys.target()
    whole = method(target).loss_at(batch_of(rows), drawn)
    mean = method(target, normalisation="per_row").loss_at(batch_of(rows), drawn)
    assert int(mean.weight) == 2 < int(whole.weight)
    alone = [method(target).loss_at(batch_of([r]), [o]) for r, o in zip(rows, drawn, strict=True)]
    torch.testing.assert_close(whole.loss_sum, sum(x.loss_sum for x in alone), **EXACT)
    torch.testing.assert_close(mean.loss_sum, sum(x.loss_sum / x.weight for x in alone), **EXACT)


def test_mask_has_no_probability_and_no_gradient(toys: SimpleNamespace) -> None:
    """Even if its logit is the largest."""
    lengths = [6, 5]
    rows, drawn = texts(lengths), orders(lengths)
    trained = method(toys.target())
    before = trained.loss_at(batch_of(rows), drawn).loss_sum
    with torch.no_grad():
        trained.target.lm_head.weight[MASK] = 1e4
    after = trained.loss_at(batch_of(rows), drawn).loss_sum
    torch.testing.assert_close(after, before, **EXACT)
    after.backward()
    grad = trained.target.lm_head.weight.grad
    assert (grad[MASK] == 0).all()
    assert grad.isfinite().all()
    assert (grad[:MASK] != 0).any()
    assert (trained.target.embed_tokens.weight.grad[MASK] != 0).any()  # its embedding is the input of the queries


def test_a_mask_in_the_text_is_context_alone(toys: SimpleNamespace) -> None:
    """It is not predicted, and visible to the other queries."""
    text = texts([6])[0]
    marked = [*text[:3], MASK, *text[4:]]
    order = Order(torch.tensor([0, 4, 2, 3, 5, 1]), 2, torch.tensor([2, 3, 4, 5]))
    trained = method(toys.target())
    result = trained.loss_at(batch_of([marked]), [order])
    expected = [conditional(trained.target, marked, [0, 4, 2, 3, 5][:n], 2, p) for n, p in ((2, 2), (4, 5), (5, 1))]
    torch.testing.assert_close(result.loss_sum, -torch.stack(expected).sum(), **EXACT)
    assert int(result.weight) == 3


@pytest.mark.parametrize("normalisation", ["per_token", "per_row"])
def test_nothing_to_predict(toys: SimpleNamespace, normalisation: str) -> None:
    """A row of one token, and one without a supervised token."""
    trained = method(toys.target(), normalisation=normalisation)
    ids = torch.tensor([[3, 1, 2], [4, 5, 6]])
    loss = torch.tensor([[True, False, False], [False, False, False]])
    result = trained.loss(Batch(ids, loss, row_numbers=(0, 1)), generators=generators(2))
    result.loss_sum.backward()
    assert float(result.loss_sum.detach()) == int(result.weight) == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in trained.parameters())


def test_accuracy_and_mask_rate(toys: SimpleNamespace) -> None:
    """Of the predicted tokens those that are the most probable one, MASK aside; predicted ones of all tokens."""
    lengths = [60, 25, 40]
    rows, drawn, trained = texts(lengths, seed=1), orders(lengths), method(toys.target())
    with torch.no_grad():
        trained.target.lm_head.weight[MASK] = 1e4
    right = 0
    for row, order in zip(rows, drawn, strict=True):
        logits_PV = trained.target.logits(states(trained, row, order))
        wanted = torch.tensor(row)[order.position_N[order.prompt :]]
        right += int((logits_PV[:, :MASK].argmax(-1) == wanted).sum())
    predicted = sum(len(order.limit_P) for order in drawn)
    assert 0 < right < predicted
    metrics = trained.loss_at(batch_of(rows), drawn).metrics
    shown = {name: (float(total), int(count)) for name, (total, count) in metrics.items() if name != "ce"}
    assert shown == {"accuracy": (right, predicted), "mask_rate": (predicted, sum(lengths))}


# ---- what a conditional depends on


def states(trained: ASARM, row: Sequence[int], order: Order) -> Tensor:
    """Hidden states [P, D] of a row's position queries."""
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        own = trained.target.any_subset
        patch.setattr(trained.target, "any_subset", lambda *a, **k: seen.append(own(*a, **k)) or seen[-1])
        trained.loss_at(batch_of([row]), [order])
    return seen[0][0, len(row) :]


@pytest.mark.parametrize(("order", "draft_depth"), [("sorted", 1), ("random", 1), ("random", 3)])
@pytest.mark.parametrize("family", ["qwen3", "xlnet"])
def test_a_conditional_depends_only_on_the_places_before_its_limit(
    toys: SimpleNamespace, family: str, order: str, draft_depth: int
) -> None:
    trained = method(backbone(toys, family))
    (row,), (drawn,) = texts([9], seed=3), orders([9], order=order, draft_depth=draft_depth, seed=5)
    before, position = states(trained, row, drawn), drawn.position_N.tolist()
    for place, at in enumerate(position):
        changed = [*row[:at], (row[at] + 1) % MASK, *row[at + 1 :]]
        moved = (states(trained, changed, drawn) - before).abs().amax(-1)
        sees = drawn.limit_P > place  # every query sees the whole prompt
        assert (moved[~sees] == 0).all()
        assert (moved[sees] > 1e-4).all()
        assert place >= drawn.prompt or sees.all()


@pytest.mark.parametrize("family", ["qwen3", "xlnet"])
def test_queries_do_not_depend_on_one_another(toys: SimpleNamespace, family: str) -> None:
    """A query alone has the hidden state that it has among others."""
    trained, (row,) = method(backbone(toys, family)), texts([8])
    position = torch.tensor([0, 3, 5, 1, 2, 4, 6, 7])
    every = states(trained, row, Order(position, 3, torch.full((5,), 3)))
    for i in range(5):
        others = torch.cat([position[:3], position[3 + i : 4 + i], position[3 : 3 + i], position[4 + i :]])
        one = states(trained, row, Order(others, 3, torch.tensor([3, 8, 8, 8, 8])))
        torch.testing.assert_close(one[0], every[i], **EXACT)


@pytest.mark.parametrize("family", ["qwen3", "xlnet"])
def test_padding_is_neither_seen_nor_supervised(toys: SimpleNamespace, family: str) -> None:
    lengths = [4, 9, 6]
    rows, drawn, trained = texts(lengths), orders(lengths), method(backbone(toys, family))
    together = trained.loss_at(batch_of(rows, padding=7), drawn)
    alone = [trained.loss_at(batch_of([row]), [o]) for row, o in zip(rows, drawn, strict=True)]
    torch.testing.assert_close(together.loss_sum, sum(x.loss_sum for x in alone), **EXACT)
    assert int(together.weight) == sum(int(x.weight) for x in alone) == sum(len(o.limit_P) for o in drawn)


def test_a_packed_row_is_one_text(toys: SimpleNamespace) -> None:
    """Its documents see each other, as in the paper; the padding after them has no influence."""
    one, two = texts([4, 5])
    packed = document_batch([[(one, 2), (two, 1)]], 12)
    plain = batch_of([[*one, *two]])
    trained, (order,) = method(toys.target()), orders([9])
    assert row_lengths(packed.supervised_BL) == row_lengths(plain.supervised_BL) == [9]
    losses = [trained.loss_at(batch, [order]).loss_sum for batch in (packed, plain)]
    torch.testing.assert_close(*losses, **EXACT)


def test_layout() -> None:
    short = Order(torch.tensor([1, 0]), 1, torch.tensor([1]))
    long = Order(torch.tensor([0, 3, 4, 1, 2]), 2, torch.tensor([2, 2, 4]))
    made = layout([short, long])
    assert made.position_BL.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0], [0, 3, 4, 1, 2, 4, 1, 2]]
    assert made.limit_BL.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [2, 2, 2, 3, 4, 2, 2, 4]]
    assert made.query_BL.int().tolist() == [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]


# ---- (sigma, m)


@pytest.mark.parametrize("first_visible", [False, True])
@pytest.mark.parametrize("order", ["sorted", "random"])
def test_an_order_is_a_prompt_and_the_rest(order: str, first_visible: bool) -> None:
    unsorted = 0
    for seed, length in enumerate([2, 3, 5, 17, 40] * 8):
        rate = (seed % 11) / 10
        generator = torch.Generator().manual_seed(seed)
        made = draw_order(length, rate, generator, order=order, first_visible=first_visible, draft_depth=1)
        position, predicted = made.position_N.tolist(), length - made.prompt
        assert predicted == min(max(int(rate * length), 1), length - 1)
        assert sorted(position) == list(range(length))
        given, later = position[: made.prompt], position[made.prompt :]
        assert given == sorted(given)
        assert not first_visible or given[0] == 0
        assert order == "random" or later == sorted(later)
        unsorted += later != sorted(later)
        assert made.limit_P.tolist() == list(range(made.prompt, length))
    assert (unsorted > 10) == (order == "random")


@pytest.mark.parametrize("first_visible", [False, True])
def test_all_subsets_are_equally_likely(first_visible: bool) -> None:
    """Four of eight tokens, 7000 draws: each is predicted in 4 of 8 (with a visible first token: of 7) draws, within 5
    standard deviations."""
    generator, count = torch.Generator().manual_seed(0), torch.zeros(8)
    how: dict[str, Any] = {"order": "sorted", "first_visible": first_visible, "draft_depth": 1}
    drawn = [draw_order(8, 0.5, generator, **how) for _ in range(7000)]
    for made in drawn:
        count[made.position_N[made.prompt :]] += 1
    share = 4 / 7 if first_visible else 1 / 2
    expected = torch.full((8,), share)
    expected[0] = 0 if first_visible else share
    assert ((count / 7000 - expected).abs() < 5 * (share * (1 - share) / 7000) ** 0.5).all()
    subsets = {tuple(made.position_N[: made.prompt].tolist()) for made in drawn}
    assert len(subsets) == (35 if first_visible else 70)


def test_draft_depth_hides_the_tokens_generated_last() -> None:
    """0 to draft_depth - 1 of the predicted tokens before a query's own, uniformly; never tokens of the prompt."""
    generator = torch.Generator().manual_seed(0)
    made = draw_order(4000, 0.9, generator, order="sorted", first_visible=False, draft_depth=4)
    place = torch.arange(made.prompt, 4000)
    hidden_before = place - made.limit_P
    assert (made.limit_P >= made.prompt).all()
    assert hidden_before[0] == 0
    share = torch.bincount(hidden_before, minlength=4) / 3600
    assert len(share) == 4
    assert ((share - 0.25).abs() < 0.04).all()


def rates(trained: ASARM, numbers: Sequence[int], length: int = 1000) -> list[float]:
    """Shares of the rows' tokens that the method predicts."""
    found: list[float] = []
    trained.loss_at = lambda batch, drawn: found.extend(len(o.limit_P) / length for o in drawn)  # type: ignore[assignment]
    loss = torch.ones(len(numbers), length, dtype=torch.bool)
    trained.loss(Batch(loss.long(), loss, row_numbers=numbers), generators=generators(len(numbers)))
    return found


def test_rates_are_spread_evenly_over_any_stretch_of_rows(toys: SimpleNamespace) -> None:
    """Any 32 consecutive rows: each eighth of the range has 3 to 5 (independent draws: often 0 or 8)."""
    trained = method(toys.target(), rate=MaskRate(low=[0.2, 0.2], high=[1.0, 1.0], steps=0))
    for first in (0, 5, 1_000_003):
        found = torch.tensor(rates(trained, range(first, first + 32)))
        eighths = torch.histc((found - 0.2) / 0.8, bins=8, min=0, max=1)
        assert eighths.sum() == 32
        assert eighths.min() >= 3
        assert eighths.max() <= 5
        assert found.mean() == pytest.approx(0.6, abs=0.02)
    many = torch.tensor(rates(trained, range(200)))
    assert (many >= 0.2 - 1e-3).all()
    assert (many < 1).all()


def test_rates_ramp_over_optimizer_steps(toys: SimpleNamespace) -> None:
    """The paper's text: 15 % at first, 90 to 99 % at the end; validation is always at the end."""
    rate = MaskRate(low=[0.15, 0.90], high=[0.15, 0.99], steps=4)
    assert [rate.at(step) for step in (0, 2, 4, 9)] == [
        pytest.approx(pair) for pair in ((0.15, 0.15), (0.525, 0.57), (0.9, 0.99), (0.9, 0.99))
    ]
    assert MaskRate(low=[0.1, 0.3], high=[0.1, 0.7], steps=0).at(0) == (0.3, 0.7)
    trained = method(toys.target(), rate=rate)
    ranges = []
    for _ in range(6):
        found = rates(trained, range(64))
        ranges.append((min(found), max(found)))
        trained.eval()
        assert min(rates(trained, range(64))) > 0.89
        trained.train()
        trained.after_step()
    assert ranges[0] == (0.15, 0.15)
    for step, (low, high) in enumerate(ranges):
        expected = rate.at(step)
        assert low == pytest.approx(expected[0], abs=4e-3)
        assert high == pytest.approx(expected[1], abs=4e-3)


def test_a_row_draws_the_same_in_any_batch(toys: SimpleNamespace) -> None:
    lengths = [9, 30, 12]
    rows, trained = texts(lengths), method(toys.target(), order="random", draft_depth=3)
    drawn: list[Order] = []
    trained.loss_at = lambda batch, orders: drawn.extend(orders)  # type: ignore[assignment]
    trained.loss(batch_of(rows, first=20), generators=generators(3))
    for i, row in enumerate(rows):
        trained.loss(batch_of([row], first=20 + i), generators=generators(3)[i : i + 1])
    for together, alone in zip(drawn[:3], drawn[3:], strict=True):
        assert together.prompt == alone.prompt
        assert torch.equal(together.position_N, alone.position_N)
        assert torch.equal(together.limit_P, alone.limit_P)
    assert len({o.prompt / len(o.position_N) for o in drawn}) == 3
    share = [0.1 + 0.9 * ((20 + i) * GOLDEN_RATIO % 1) for i in range(3)]
    assert [len(o.limit_P) for o in drawn[:3]] == [int(s * n) for s, n in zip(share, lengths, strict=True)]


# ---- training


class Rows(torch.utils.data.Dataset[Batch]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Batch:
        return batch_of(texts([9, 7], seed=i))


def fitted(target: LanguageModel, folder: Path, *, resume: Path | None = None) -> ASARM:
    """Four optimizer steps of two batches each, a checkpoint after every second one."""
    trained = method(target, rate=MaskRate(low=[0.1, 0.5], high=[0.1, 0.9], steps=4))

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=4, accumulate_grad_batches=2, default_root_dir=str(folder),
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    lit = LitModule(method=trained, optimizer=adam, warmup=0.0, cycles=1, seed=0)
    trainer.fit(lit, StatefulDataLoader(Rows(), batch_size=None), ckpt_path=resume, weights_only=False)
    return trained


def test_a_resumed_run_goes_on_in_the_ramp(toys: SimpleNamespace, tmp_path: Path) -> None:
    whole = fitted(toys.target(), tmp_path / "whole")
    half = tmp_path / "whole" / "step=2.ckpt"
    assert int(torch.load(half, weights_only=False)["state_dict"]["method.steps_done"]) == 2
    resumed = fitted(toys.target(), tmp_path / "resumed", resume=half)
    assert int(whole.steps_done) == int(resumed.steps_done) == 4
    start = method(toys.target())
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    assert max(float((p - q).abs().max()) for p, q in zip(whole.parameters(), start.parameters(), strict=True)) > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "xlnet"])
def test_bfloat16_mixed_learns(toys: SimpleNamespace, family: str) -> None:
    target = backbone(toys, family, hidden=32, scale=0.1, dtype=torch.float32)
    trained, batch = method(target, rate=MaskRate(low=[0.5, 0.5], high=[0.9, 0.9], steps=0)), batch_of(texts([8, 6, 8]))
    optimizer, losses = torch.optim.AdamW(trained.parameters(), lr=1e-2), []
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16):
            output = trained.loss(batch, generators=generators(3))
        loss = output.loss_sum / output.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.8
    assert losses[-1] < 0.3


def test_the_folder_knows_the_mask_token_even_where_no_tokenizer_does(tmp_path: Path) -> None:
    of = embedded_target(dtype="float32", device="cpu")
    of.mask_token_id = 17
    folder = method(of).export(tmp_path, card="card")
    written = load_language_model(path=str(folder), name="t", dtype="float32", device="cpu", mask_token=None)
    assert written.mask_token_id == 17
    assert written.tokenizer.mask_token == "<|mask|>"
    assert (folder / "README.md").read_text() == "card"
    asked = load_language_model(path=str(folder), name="t", dtype="float32", device="cpu", mask_token=5)
    assert asked.mask_token_id == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"order": "reverse"}, "method.order=reverse"),
        ({"normalisation": "mean"}, "method.normalisation=mean"),
        ({"draft_depth": 0}, "method.draft_depth=0"),
        ({"chunk_mb": 0}, "method.chunk_mb=0"),
    ],
)
def test_bad_settings(toys: SimpleNamespace, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        method(toys.target(), **change)


@pytest.mark.parametrize(
    ("low", "high", "steps"),
    [([0.5], [0.9, 0.9], 1), ([0.0, 0.1], [0.9, 0.9], 1), ([0.5, 0.9], [0.9, 0.8], 1), ([0.1, 0.1], [0.9, 1.1], 1),
     ([0.1, 0.1], [0.2, 0.2], -1)],
)  # fmt: skip
def test_bad_rates(low: list[float], high: list[float], steps: int) -> None:
    with pytest.raises(UserError, match=r"method\.rate"):
        MaskRate(low=low, high=high, steps=steps)


def test_a_mask_token_and_row_numbers_are_needed(toys: SimpleNamespace) -> None:
    target = toys.target()
    trained = method(target)
    with pytest.raises(UserError, match="row_numbers"):
        trained.loss(Batch(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool)), generators=[])
    target.mask_token_id = None
    with pytest.raises(UserError, match="mask token"):
        method(target)


def test_batches_keep_their_row_numbers_on_another_device() -> None:
    batch = batch_of(texts([3, 2]), first=4)
    moved = batch.to("meta")
    assert moved.row_numbers == batch.row_numbers
    assert moved.ids_BL.is_meta
    assert moved.document_BL is None
