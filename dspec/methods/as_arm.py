"""AS-ARM: a causal LM learns the conditionals of any subset of a text given the rest, all in one forward pass.

Source: "Reviving Any-Subset Autoregressive Models with Principled Parallel Sampling and Speculative Decoding" (arXiv
2504.20456), the teacher-forced joint loss of eq. 7: with m the length of the prompt and sigma the order of generation

    L = - E_{m, sigma} log p(x_sigma(>=m) | x_sigma(<m)) = - E sum_{i>=m} log p(x_sigma(i) | x_sigma(<i))     (eq. 9)

Released code: gabeguo/any-order-speculative-decoding@83a444d.

A row is laid out in the order of generation, whatever the positions that its rotary embeddings see:

    [prompt, by position | predicted tokens | a position query for each predicted token]

A position query is the MASK embedding at the position asked for; attention/masks.py `any_subset` is the mask (eq. 6),
the same as in decoding. Predicted tokens stand by position (eq. 4: a binary lattice, 2^N subsets) or in random order
(any permutation, N! orders: the paper's ablation, Figure 3). Nothing predicts MASK: its logit is left out of the
softmax, here as in decoding.

Departures: an ordinary causal LM with both streams over the same weights stands for XLNet; (sigma, m) is drawn for each
row (the released code: one for a micro-batch); m follows from r by one low-discrepancy sequence over rows, accumulated
batches and ranks (appendix E.1; the released code stratifies over accumulation or over ranks); validation always asks
for the rates at the end of the ramp, so that its curve means one thing; `lookahead` lets queries see less, as they do
when several tokens are drafted in parallel: in binary-lattice order a query of the paper's loss never meets an unknown
token to its left, parallel drafts do.

Legend: B = rows, L = places, N = tokens of a row, m = those of its prompt, P = predicted tokens, D = width.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import floor
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from dspec.atomic import atomic_folder
from dspec.errors import UserError
from dspec.losses import check_chunk, chunked_sum, head_terms, token_loss_without
from dspec.method import Batch, LossOutput, Method
from dspec.methods.jacobi_forcing import Tuning
from dspec.models.backbone import Backbone
from dspec.precision import widest

GOLDEN_RATIO = (5**0.5 - 1) / 2  # n * it mod 1 fills [0, 1) evenly over any stretch of n
ORDERS = ("sorted", "random")
NORMALISATIONS = ("per_token", "per_row")


class MaskRate:
    """The range of the share of a row's tokens that is predicted; it moves linearly over the first steps.

    The paper's text (appendix E.2): low [0.15, 0.90], high [0.15, 0.99], steps 5000; its code models (E.6): low
    [0.05, 0.15], high [0.05, 0.99], steps 20000. The released scripts end at [0.85, 0.99] for text, and go from 0.01 to
    [0.05, 0.25] for code.
    """

    def __init__(self, *, low: Sequence[float], high: Sequence[float], steps: int) -> None:
        """`low` and `high` are (at the start, after `steps` optimizer steps). Raises UserError for impossible ones."""
        if len(low) != 2 or len(high) != 2 or not all(0 < a <= b <= 1 for a, b in zip(low, high, strict=True)):
            raise UserError(
                f"method.rate: low={list(low)}, high={list(high)} must each be [start, end] with 0 < low <= high <= 1"
            )
        if steps < 0:
            raise UserError(f"method.rate.steps={steps} must be at least 0 (0: the end's range throughout)")
        self.low, self.high, self.steps = tuple(low), tuple(high), steps

    def at(self, step: int) -> tuple[float, float]:
        """The range after so many optimizer steps."""
        done = min(1.0, step / self.steps) if self.steps else 1.0
        low, high = (start + done * (end - start) for start, end in (self.low, self.high))
        return low, high


@dataclass(frozen=True)
class Order:
    """How a row of N tokens is generated: `position_N[:prompt]` are given, the others come one after the other.

    The query of predicted token i (of P) sees the places before `limit_P[i]`.
    """

    position_N: Tensor
    prompt: int
    limit_P: Tensor


@dataclass(frozen=True)
class Layout:
    """A batch in the order of generation, padded on the right."""

    position_BL: Tensor
    limit_BL: Tensor  # of places that are seen; 0 on padding, which sees itself alone
    query_BL: Tensor  # bool


def row_lengths(supervised_BL: Tensor) -> list[int]:
    """A row ends with its last supervised token; one without any is its first token, with nothing to predict."""
    place = torch.arange(1, supervised_BL.shape[1] + 1, device=supervised_BL.device)
    lengths: list[int] = (supervised_BL * place).amax(1).clamp(min=1).tolist()
    return lengths


def draw_order(
    length: int, rate: float, generator: Generator, *, order: str, first_visible: bool, lookahead: int
) -> Order:
    """A random subset of floor(rate * length) tokens to predict, at least one and not all.

    A row of one token has nothing to predict. The prompt has the row's first token if `first_visible`.
    """
    predicted = min(max(floor(rate * length), 1), length - 1)
    first = int(first_visible)
    shuffled = first + torch.randperm(length - first, generator=generator)
    late, early = shuffled[:predicted], shuffled[predicted:].sort().values
    late = late.sort().values if order == "sorted" else late
    prompt = length - predicted
    behind = torch.randint(lookahead, (predicted,), generator=generator)
    limit_P = (torch.arange(prompt, length) - behind).clamp(min=prompt)
    return Order(torch.cat([torch.arange(first), early, late]), prompt, limit_P)


def layout(orders: Sequence[Order]) -> Layout:
    """Each row's tokens in their order, then its queries."""
    positions, limits, queries = [], [], []
    for o in orders:
        length, predicted = len(o.position_N), len(o.limit_P)
        positions.append(torch.cat([o.position_N, o.position_N[o.prompt :]]))
        content = torch.arange(length).clamp(min=o.prompt)  # a predicted token sees those before it, and itself
        limits.append(torch.cat([content, o.limit_P]))
        queries.append(torch.arange(length + predicted) >= length)
    return Layout(*(pad_sequence(rows, batch_first=True) for rows in (positions, limits, queries)))


class ASARM(Method):
    """Trains a target on the joint conditional of a random part of each row given the rest of it."""

    steps_done: Tensor

    def __init__(
        self,
        *,
        target: Backbone,
        tuning: Tuning,
        rate: MaskRate,
        order: str,
        first_visible: bool,
        lookahead: int,
        normalisation: str,
        chunk_mb: float,
    ) -> None:
        """`order` of the predicted tokens: sorted | random. `first_visible` keeps a row's first token in the prompt. A
        query sees up to `lookahead - 1` fewer of the predicted tokens before its own (1: the paper's loss).
        `normalisation` per_token is the sum of eq. 7 over all tokens of the batch, divided by their number; per_row
        the mean over each row's predicted tokens, averaged over rows (as released).

        Raises UserError for a target without a mask token, or for settings out of range.
        """
        super().__init__()
        if target.mask_token_id is None:
            raise UserError(f"target {target.name!r} has no mask token, which asks for a position: set mask_token_id")
        if order not in ORDERS:
            raise UserError(f"method.order={order} is unknown; say one of {', '.join(ORDERS)}")
        if normalisation not in NORMALISATIONS:
            raise UserError(f"method.normalisation={normalisation} is unknown; say one of {', '.join(NORMALISATIONS)}")
        if lookahead < 1:
            raise UserError(f"method.lookahead={lookahead} must be at least 1 (a query sees all tokens before its own)")
        self.target, self.tuning, self.rate, self.mask_token_id = target, tuning, rate, target.mask_token_id
        self.order, self.first_visible, self.lookahead = order, first_visible, lookahead
        self.normalisation, self.chunk_mb = normalisation, check_chunk(chunk_mb)
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.long))  # kept in checkpoints
        tuning.prepare(target)

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        """Raises UserError for a batch whose rows have no numbers."""
        if batch.numbers is None:
            raise UserError("AS-ARM draws mask rates by the rows' numbers (Batch.numbers), and the batch has none")
        low, high = self.rate.at(int(self.steps_done) if self.training else self.rate.steps)
        lengths = row_lengths(batch.supervised_BL)
        orders = [
            draw_order(
                length,
                low + (high - low) * (number * GOLDEN_RATIO % 1),
                generator,
                order=self.order,
                first_visible=self.first_visible,
                lookahead=self.lookahead,
            )
            for length, number, generator in zip(lengths, batch.numbers, generators, strict=True)
        ]
        return self.loss_at(batch, orders)

    def loss_at(self, batch: Batch, orders: Sequence[Order]) -> LossOutput:
        """The loss with given orders of generation."""
        # 1. both streams in one pass
        made, device = layout(orders), batch.ids_BL.device
        positions, limit, query = (t.to(device) for t in (made.position_BL, made.limit_BL, made.query_BL))
        content_BL = batch.ids_BL.gather(1, positions)
        hidden = self.target.any_subset(content_BL, positions_BL=positions, limit_BL=limit, query_BL=query)
        # 2. the token at each query's position; a MASK in the text is context alone, no softmax has it
        chosen = query & (content_BL != self.mask_token_id)
        count_B = chosen.sum(1)
        if self.normalisation == "per_token":
            weight_B, total = torch.ones_like(count_B, dtype=widest(device)), count_B.sum()
        else:
            weight_B, total = 1 / count_B.clamp(min=1).to(widest(device)), (count_B > 0).sum()
        loss_sum, stats = chunked_sum(
            token_loss_without(self.mask_token_id),
            terms=head_terms(self.target.lm_head, hidden[chosen]),
            constants=[weight_B[:, None].expand(chosen.shape)[chosen], content_BL[chosen]],
            chunk_mb=self.chunk_mb,
        )
        tokens = torch.tensor(sum(len(o.position_N) for o in orders), device=device)
        predicted = count_B.sum()
        metrics = {
            "ce": (stats[:, 0].sum(), predicted),
            "accuracy": (stats[:, 1].sum(), predicted),
            "mask_rate": (predicted, tokens),
        }
        return LossOutput(loss_sum, total, metrics)

    def after_step(self) -> None:
        self.steps_done += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Rounds the weights to the bfloat16 in which they ship: what is evaluated is what is written."""
        self.tuning.merge(self.target)
        for parameter in self.target.model.parameters():
            parameter.copy_(parameter.bfloat16())

    def export(self, folder: Path, *, card: str) -> Path:
        """A Hugging Face folder in bfloat16 with the tokenizer; config.json has the mask token's id."""
        with atomic_folder(folder / "target") as scratch:
            model = deepcopy(self.target.model).to(torch.bfloat16)
            model.config.mask_token_id = self.mask_token_id
            model.save_pretrained(scratch)
            self.target.tokenizer.save_pretrained(scratch)
            (scratch / "README.md").write_text(card, encoding="utf-8")
        return folder / "target"
