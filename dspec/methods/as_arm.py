"""AS-ARM: a causal LM learns the conditionals of any subset of a text given the rest, all in one forward pass.

Source: "Reviving Any-Subset Autoregressive Models with Principled Parallel Sampling and Speculative Decoding" (arXiv
2504.20456), the teacher-forced joint loss: with m the length of the prompt and sigma the order of generation

    L = - E_{m, sigma} log p(x_sigma(>=m) | x_sigma(<m))               (eq. 7)
      = - E_{m, sigma} sum_{i>=m} log p(x_sigma(i) | x_sigma(<i))      (eq. 2: its conditionals)

Released code: gabeguo/any-order-speculative-decoding@83a444d.

A token's *position* is its index in the text, its *place* the index in the order of generation, in which the prompt
comes first. The inputs of a row are its tokens by place, then its position queries:

    [prompt, by position | predicted tokens | a position query for each predicted token]

A position query is the MASK embedding at the position of its predicted token (XLNet has a vector of its own for it:
models/xlnet.py). The attention mask (eq. 6) is `any_subset` in attention/masks.py, as in decoding. Predicted tokens are
in order of position (eq. 4: a binary lattice, 2^N subsets) or in random order (any permutation, N! orders: the paper's
ablation, Figure 3). MASK is never predicted: its logit is left out of the softmax, as in decoding.

Departures: the model may be an ordinary causal LM whose weights serve both streams; (sigma, m) is drawn for
each row (released code: once for a micro-batch); mask rates follow one low-discrepancy sequence over rows, accumulated
batches and ranks (appendix E.1; the released code stratifies over accumulated batches or over ranks); validation uses
the rates at the end of the ramp throughout, so that its losses are comparable; `draft_depth` hides from a query some of
the predicted tokens before its own, as parallel drafting does. In binary-lattice order the paper's loss never trains
that case: all tokens to the left of a query's position are visible to it.

Legend: B = rows, L = inputs of a row (tokens, then queries), N = tokens of a row, m = tokens of its prompt,
P = predicted tokens, D = width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from dspec.errors import UserError
from dspec.losses import check_chunk, chunked_sum, head_terms, token_loss_without
from dspec.method import Batch, LossOutput, Method
from dspec.models.export import export_language_model
from dspec.models.target_model import TargetModel
from dspec.precision import widest
from dspec.seeding import low_discrepancy
from dspec.tuning import Tuning

ORDERS = ("sorted", "random")
NORMALISATIONS = ("per_token", "per_row")


class MaskRate:
    """The range of mask rates: shares of a row's tokens that are predicted. It moves linearly over the first steps.

    The paper's text (appendix E.2): low [0.15, 0.90], high [0.15, 0.99], steps 5000; its code models (E.6): low
    [0.05, 0.15], high [0.05, 0.99], steps 20000. The released scripts end at [0.85, 0.99] for text, and go from 0.01 to
    [0.05, 0.25] for code.
    """

    def __init__(self, *, low: Sequence[float], high: Sequence[float], steps: int) -> None:
        """The ends of the range, each [at the start, after `steps` optimizer steps]. Raises UserError for values out of
        range."""
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
    """The order in which a row's N tokens are generated, and what the queries of its P predicted tokens see."""

    position_N: Tensor  # position of the token at each place
    prompt: int  # tokens of the prompt: the first places
    limit_P: Tensor  # each query sees the places before its limit


@dataclass(frozen=True)
class Layout:
    """The inputs of a batch's rows, padded on the right."""

    position_BL: Tensor
    limit_BL: Tensor  # an input sees the places before its limit, and itself; 0 on padding
    query_BL: Tensor  # bool: position queries


def row_lengths(supervised_BL: Tensor) -> list[int]:
    """A row ends with its last supervised token; a row without any has length 1, and nothing to predict."""
    length_L = torch.arange(1, supervised_BL.shape[1] + 1, device=supervised_BL.device)
    lengths: list[int] = (supervised_BL * length_L).amax(1).clamp(min=1).tolist()
    return lengths


def draw_order(
    length: int, rate: float, generator: Generator, *, order: str, first_visible: bool, draft_depth: int
) -> Order:
    """A random order with floor(rate * length) predicted tokens, at least one and not all.

    A row of one token has no predicted token. With `first_visible` the row's first token is in the prompt. The limit of
    each query is 0 to `draft_depth - 1` places before its own token, uniformly, but not before the prompt's end.
    """
    predicted = min(max(floor(rate * length), 1), length - 1)
    first = int(first_visible)
    shuffled = first + torch.randperm(length - first, generator=generator)
    position_P, given = shuffled[:predicted], shuffled[predicted:].sort().values
    position_P = position_P.sort().values if order == "sorted" else position_P
    prompt = length - predicted
    hidden_before_P = torch.randint(draft_depth, (predicted,), generator=generator)
    limit_P = (torch.arange(prompt, length) - hidden_before_P).clamp(min=prompt)
    return Order(torch.cat([torch.arange(first), given, position_P]), prompt, limit_P)


def layout(orders: Sequence[Order]) -> Layout:
    """Each row's tokens by place, then its queries."""
    positions, limits, queries = [], [], []
    for o in orders:
        length, predicted = len(o.position_N), len(o.limit_P)
        positions.append(torch.cat([o.position_N, o.position_N[o.prompt :]]))
        # a prompt token sees the prompt, a predicted token all places before its own, and itself
        token_limit_N = torch.arange(length).clamp(min=o.prompt)
        limits.append(torch.cat([token_limit_N, o.limit_P]))
        queries.append(torch.arange(length + predicted) >= length)
    return Layout(*(pad_sequence(rows, batch_first=True) for rows in (positions, limits, queries)))


class ASARM(Method):
    """Trains a target on the joint density of a random part of each row given the rest of the row."""

    export_dtype = torch.bfloat16
    steps_done: Tensor

    def __init__(
        self,
        *,
        target: TargetModel,
        tuning: Tuning,
        rate: MaskRate,
        order: str,
        first_visible: bool,
        draft_depth: int,
        normalisation: str,
        chunk_mb: float,
    ) -> None:
        """`order` of the predicted tokens: sorted | random. `first_visible` keeps a row's first token in the prompt. A
        query sees 0 to `draft_depth - 1` fewer of the predicted tokens before its own (1: the paper's loss).
        `normalisation` per_token is the sum of eq. 7 over all tokens of the batch, divided by their number; per_row
        the mean over each row's predicted tokens, averaged over rows (as released).

        Raises UserError for a target without a mask token, or for settings out of range.
        """
        super().__init__()
        if order not in ORDERS:
            raise UserError(f"method.order={order} is unknown; choose one of {', '.join(ORDERS)}")
        if normalisation not in NORMALISATIONS:
            raise UserError(
                f"method.normalisation={normalisation} is unknown; choose one of {', '.join(NORMALISATIONS)}"
            )
        if draft_depth < 1:
            raise UserError(f"method.draft_depth={draft_depth} must be at least 1 (1: the paper's loss)")
        self.target, self.tuning, self.rate, self.mask_token_id = target, tuning, rate, target.required_mask_token()
        self.order, self.first_visible, self.draft_depth = order, first_visible, draft_depth
        self.normalisation, self.chunk_mb = normalisation, check_chunk(chunk_mb)
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.long))  # kept in checkpoints
        tuning.prepare(target)

    def loss(self, batch: Batch, *, generators: Sequence[Generator]) -> LossOutput:
        """Raises UserError for a batch without row numbers."""
        if batch.row_numbers is None:
            raise UserError("AS-ARM takes mask rates from a sequence over rows: the batch needs row_numbers")
        low, high = self.rate.at(int(self.steps_done) if self.training else self.rate.steps)
        lengths = row_lengths(batch.supervised_BL)
        orders = [
            draw_order(
                length,
                low + (high - low) * low_discrepancy(number),
                generator,
                order=self.order,
                first_visible=self.first_visible,
                draft_depth=self.draft_depth,
            )
            for length, number, generator in zip(lengths, batch.row_numbers, generators, strict=True)
        ]
        return self.loss_at(batch, orders)

    def loss_at(self, batch: Batch, orders: Sequence[Order]) -> LossOutput:
        """The loss with given orders of generation."""
        # 1. tokens and position queries in one pass
        inputs, device = layout(orders), batch.ids_BL.device
        positions, limit, query = (t.to(device) for t in (inputs.position_BL, inputs.limit_BL, inputs.query_BL))
        token_BL = batch.ids_BL.gather(1, positions)  # the token at the input's position, also for queries
        hidden = self.target.any_subset(token_BL, positions_BL=positions, limit_BL=limit, query_BL=query)
        # 2. cross-entropy at the queries; a MASK in the text is only context: it has no probability
        chosen = query & (token_BL != self.mask_token_id)
        count_B = chosen.sum(1)
        if self.normalisation == "per_token":
            weight_B, total = torch.ones_like(count_B, dtype=widest(device)), count_B.sum()
        else:
            weight_B, total = 1 / count_B.clamp(min=1).to(widest(device)), (count_B > 0).sum()
        loss_sum, stats = chunked_sum(
            token_loss_without(self.mask_token_id),
            terms=head_terms(self.target.lm_head, hidden[chosen]),
            constants=[weight_B[:, None].expand(chosen.shape)[chosen], token_BL[chosen]],
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

    def finish(self) -> None:
        self.tuning.merge(self.target)

    def export(self, folder: Path, *, card: str) -> Path:
        return export_language_model(self.target, folder / "target", dtype=self.export_dtype, card=card)
