"""Sequential and confidence heads against their equations, written out."""

import pytest
import torch

from dspec.models.heads import SEQUENTIAL_HEADS, ConfidenceHead

V, D, R, K = 7, 5, 3, 4


def _codes(kind: str, head: torch.nn.Module, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    weight = dict(head.named_parameters())
    state, codes = torch.zeros(R, dtype=torch.float64), []
    for x, h in zip(previous, hidden, strict=True):
        w = weight["markov_w1.weight"][x]
        if kind == "vanilla":
            codes.append(w)
        elif kind == "gated":
            z = weight["gate_proj.weight"] @ torch.cat([h, w]) + weight["gate_proj.bias"]
            codes.append(w / (1 + (-z).exp()))
        else:
            g, c, o = (weight["joint_proj.weight"] @ torch.cat([state, w, h]) + weight["joint_proj.bias"]).view(3, R)
            g = 1 / (1 + (-g).exp())
            state = g * state + (1 - g) * c.tanh()
            codes.append(o.tanh())
    return torch.stack(codes)


@pytest.mark.parametrize("kind", SEQUENTIAL_HEADS)
def test_heads_follow_their_equations(kind: str) -> None:
    torch.manual_seed(0)
    head = SEQUENTIAL_HEADS[kind](vocab_size=V, hidden_size=D, rank=R).double()
    previous, hidden = torch.randint(V, (2, 3, K)), torch.randn(2, 3, K, D, dtype=torch.float64)
    state, got = None, []
    for k in range(K):
        code, state = head.step(previous[..., k], hidden[..., k, :], state)
        got.append(code)
    for i in range(2):
        for j in range(3):
            expected = _codes(kind, head, previous[i, j], hidden[i, j])
            torch.testing.assert_close(torch.stack(got, -2)[i, j], expected, rtol=0, atol=1e-12)
    assert head.markov_w2.weight.shape == (V, R)


@pytest.mark.parametrize("rank", [0, R])
def test_confidence_head(rank: int) -> None:
    torch.manual_seed(0)
    head = ConfidenceHead(hidden_size=D, markov_rank=rank).double()
    hidden, markov = torch.randn(2, 6, D, dtype=torch.float64), torch.randn(2, 6, R, dtype=torch.float64)
    x = torch.cat([hidden, markov], -1) if rank else hidden
    expected = (x * head.proj.weight[0]).sum(-1) + head.proj.bias
    torch.testing.assert_close(head(hidden, markov if rank else None), expected)
