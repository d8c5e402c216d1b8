"""What the losses of diffusion LMs share: noisy answers, the states that predict their slots, and means by part.

Legend: B = rows, L = places of a row, P = chosen slots, D = width.
"""

from collections.abc import Sequence

from torch import Generator, Tensor

from dspec.errors import UserError
from dspec.masked_diffusion.answers import AnswerLayout, Answers
from dspec.masked_diffusion.noise import BlockRates, Noise, draw_noise
from dspec.method import Batch, Metrics
from dspec.models.language_model import LanguageModel


def noisy_answers(
    batch: Batch,
    *,
    layout: AnswerLayout,
    rates: BlockRates,
    target: LanguageModel,
    generators: Sequence[Generator],
) -> tuple[Answers, Noise]:
    """The batch's rows with their tails, and which of their slots are masked. Raises UserError for rows that are not
    one conversation each, with a number."""
    if batch.row_numbers is None:
        raise UserError("mask rates follow a sequence over rows: the batch needs row_numbers")
    answers = layout.answers(batch, stop_ids=target.stop_ids, max_places=target.max_positions)
    return answers, draw_noise(answers, rates, row_numbers=batch.row_numbers, generators=generators)


def predicting_states(hidden_BLD: Tensor, chosen_BL: Tensor, *, shift: bool) -> Tensor:
    """The hidden states [P, D] that predict the chosen slots; slots come after a prompt, so place - 1 exists."""
    row, place = chosen_BL.nonzero(as_tuple=True)
    return hidden_BLD[row, place - int(shift)]


def response_and_tail_means(values: dict[str, Tensor], tail_P: Tensor) -> Metrics:
    """Means over responses, and (tail_*) over the EOS after them, which are easy and would hide the others."""
    metrics: Metrics = {}
    for name, value_P in values.items():
        metrics[name] = (value_P[~tail_P].sum(), (~tail_P).sum())
        metrics[f"tail_{name}"] = (value_P[tail_P].sum(), tail_P.sum())
    return metrics
