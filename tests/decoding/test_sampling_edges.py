"""What no statistics reach: a uniform of exactly 0, rows with fewer drafts, and the tail of a law."""

import pytest
import torch

from dspec.decoding.sampling import draw
from dspec.decoding.verification import verify_sampled

F64 = torch.float64


@pytest.mark.parametrize("given", [False, True])
def test_a_token_that_the_target_never_says_is_never_accepted(given: bool) -> None:
    """torch.rand gives 0.0 too: u q < p must be strict, for a drafted law and for a drafted token."""
    target = torch.tensor([[[0.0, 0.4, 0.6]] * 2], dtype=F64)
    laws = None if given else torch.tensor([[[1.0, 0.0, 0.0]]], dtype=F64)
    zero = torch.zeros(1, 1, dtype=F64)
    accepted, following = verify_sampled(torch.tensor([[0]]), torch.tensor([1]), laws, target, zero, zero[:, 0])
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_behind_a_shorter_draft_comes_the_targets_own_law() -> None:
    """A row with fewer drafts than the widest one rejects nothing at its end: p is drawn from, not max(p - q, 0)."""
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=F64), torch.tensor([0.5, 0.0, 0.5], dtype=F64)
    uniform = torch.linspace(0, 1, 1001, dtype=F64)[:-1]
    rows = len(uniform)
    draft, count = torch.zeros(rows, 2, dtype=torch.long), torch.ones(rows, dtype=torch.long)  # one draft of two
    accepted, following = verify_sampled(
        draft, count, q.expand(rows, 2, 3), p.expand(rows, 3, 3), torch.zeros(rows, 2, dtype=F64), uniform
    )
    assert accepted.tolist() == [1] * rows
    assert (torch.bincount(following) / rows).tolist() == pytest.approx(p.tolist(), abs=2e-3)


def test_rare_tokens_can_be_drawn() -> None:
    """Beside a mass of 1 a float32 sum forgets what is below 6e-8: the tail of a large vocabulary."""
    weights = torch.tensor([[1.0, *[1e-9] * 4]], dtype=torch.float32)
    for token in range(1, 5):
        uniform = (1 + (token - 0.5) * 1e-9) / (1 + 4e-9)
        assert draw(weights, torch.tensor([uniform], dtype=F64)).item() == token
