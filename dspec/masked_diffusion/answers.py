"""Training rows as a diffusion LM decodes them: a prompt, then an answer of whole blocks of slots.

    prompt | a  b  c  d | e  f  EOS EOS | EOS EOS EOS EOS |
    block 0  block 1      block 2         block 3
             slot 0 ...   response ends   further block

The grid begins at the prompt's end. Decoding gives a model more slots than an answer needs, so a response that ends is
followed by more of its EOS: to its block's end, and up to `tail_blocks` further blocks. A response that was cut off
does not end: it has neither EOS nor tail, and its last block may be shorter.

Legend: B = rows, L = places of a row (prompt, slots, padding), N = slots of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspec.attention.masks import PADDING
from dspec.errors import UserError
from dspec.method import Batch
from dspec.seeding import low_discrepancy

SILVER_RATIO = 2**0.5 - 1  # not the ratio of mask rates: they would follow the tails
OUTSIDE = -1  # the slot of places in a prompt or in padding


@dataclass(frozen=True)
class Answers:
    """Rows of prompt and slots, padded on the right."""

    ids_BL: Tensor
    slot_BL: Tensor  # number of the slot in its row's answer, OUTSIDE elsewhere
    tail_BL: Tensor  # bool: slots after the response
    end_B: Tensor  # places of a row
    block_size: int

    @property
    def slots(self) -> list[int]:
        """How many slots each row has."""
        counts: list[int] = (self.slot_BL.amax(1) + 1).tolist()
        return counts

    @property
    def response_slots(self) -> list[int]:
        """How many slots each row's response has, its EOS included."""
        counts: list[int] = ((self.slot_BL != OUTSIDE) & ~self.tail_BL).sum(1).tolist()
        return counts

    @property
    def blocks(self) -> Tensor:
        """The block [B, L] of each place. 0: the prompt; 1, 2, ...: the answer's; PADDING after a row's end."""
        place_L = torch.arange(self.ids_BL.shape[1], device=self.ids_BL.device)
        blocks = torch.where(self.slot_BL == OUTSIDE, 0, 1 + self.slot_BL // self.block_size)
        return blocks.masked_fill(place_L >= self.end_B[:, None], PADDING)


class AnswerLayout:
    """The block grid, and how many EOS follow a response that ends."""

    def __init__(self, *, block_size: int, tail_blocks: int | None, tail_rows: int) -> None:
        """`tail_blocks`: 0 to so many further blocks of EOS after the one in which a response ends (None: no tail at
        all, not even to its block's end). `tail_rows` successive rows have the same number of further blocks, so that
        those of a batch are equally long; over these groups the numbers follow a low-discrepancy sequence. Raises
        UserError for settings out of range."""
        if block_size < 1:
            raise UserError(f"method.layout.block_size={block_size} must be at least 1 slot")
        if tail_blocks is not None and tail_blocks < 0:
            raise UserError(f"method.layout.tail_blocks={tail_blocks} must be at least 0 (null: no tail)")
        if tail_rows < 1:
            raise UserError(f"method.layout.tail_rows={tail_rows} must be at least 1 row")
        self.block_size, self.tail_blocks, self.tail_rows = block_size, tail_blocks, tail_rows

    def tail(self, response: int, row_number: int) -> int:
        """How many EOS follow a response of so many tokens that ends."""
        if self.tail_blocks is None:
            return 0
        share = low_discrepancy(row_number // self.tail_rows, ratio=SILVER_RATIO)
        return -response % self.block_size + int(share * (self.tail_blocks + 1)) * self.block_size

    def answers(self, batch: Batch, *, stop_ids: Sequence[int], max_places: int) -> Answers:
        """The batch's rows with their tails (of the first stop token), at most `max_places` long. Raises UserError for
        packed rows, and for rows without numbers or prompt."""
        if batch.document_BL is not None:
            raise UserError(
                "a diffusion LM trains on one conversation per row, since its slots see the whole row: use "
                "data._target_=data.conversations.Conversations"
            )
        if batch.row_numbers is None:
            raise UserError("tails and mask rates follow sequences over rows: the batch needs row_numbers")
        L, device = batch.ids_BL.shape[1], batch.ids_BL.device
        first_B, end_B = _spans(batch.supervised_BL)
        if 0 in first_B:
            raise UserError("a row begins with its response: a diffusion LM needs a prompt, if only one token")
        last_B = batch.ids_BL[range(len(end_B)), [end - 1 for end in end_B]].tolist()
        ends = []
        for first, end, last, number in zip(first_B, end_B, last_B, batch.row_numbers, strict=True):
            tail = self.tail(end - first, number) if end > first and last in stop_ids else 0
            ends.append(max(end, min(end + tail, max_places)))
        place_L = torch.arange(max(L, *ends), device=device)
        start_B1, response_B1, end_B1 = (torch.tensor(x, device=device)[:, None] for x in (first_B, end_B, ends))
        tail_BL = (place_L >= response_B1) & (place_L < end_B1)
        ids_BL = F.pad(batch.ids_BL, (0, len(place_L) - L)).masked_fill(tail_BL, stop_ids[0])
        slot_BL = torch.where((place_L >= start_B1) & (place_L < end_B1), place_L - start_B1, OUTSIDE)
        return Answers(ids_BL, slot_BL, tail_BL, end_B1[:, 0], self.block_size)


def _spans(supervised_BL: Tensor) -> tuple[list[int], list[int]]:
    """Where each row's response begins and ends; a row without one is a prompt of one token."""
    L = supervised_BL.shape[1]
    place_L = torch.arange(L, device=supervised_BL.device)
    end_B = ((place_L + 1) * supervised_BL).amax(1).clamp(min=1)
    first_B = torch.where(supervised_BL, place_L, L).amin(1).minimum(end_B)
    return first_B.tolist(), end_B.tolist()
