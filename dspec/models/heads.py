"""The small heads on a drafter's hidden states: sequential (Markov, gated, RNN) and confidence (DSpark).

Tensor names are DeepSpec's, so that checkpoints are compatible both ways.
Legend: ... = any leading shape, D = draft width, R = rank, V = vocabulary.
"""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """First-order transition: u = W1[x], B(x, .) = W2 u (DSpark, section 2); the other heads refine u."""

    def __init__(self, *, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """previous [...] token ids, hidden [..., D], state [..., R] or None -> code u [..., R], next state."""
        return self.markov_w1(previous), None

    def transition(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced transition codes [..., K, R] for previous tokens [..., K] and hidden [..., K, D]."""
        state, codes = None, []
        for k in range(previous.shape[-1]):
            code, state = self.step(previous[..., k], hidden[..., k, :], state)
            codes.append(code)
        return torch.stack(codes, -2)


class GatedHead(MarkovHead):
    """The transition scaled by a gate on the slot's state: u = sigmoid(G [h; W1[x]] + g) * W1[x]."""

    def __init__(self, *, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size=vocab_size, hidden_size=hidden_size, rank=rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        w = self.markov_w1(previous)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, w], -1))) * w, None


class RNNHead(MarkovHead):
    """A recurrent state over the drafted prefix (DSpark, section 2): z = [s; W1[x]; h], s_0 = 0."""

    def __init__(self, *, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size=vocab_size, hidden_size=hidden_size, rank=rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        w = self.markov_w1(previous)
        s = torch.zeros_like(w) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([s, w, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * s + (1 - gate) * torch.tanh(candidate)


SEQUENTIAL_HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RNNHead}


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot's token is accepted, given that all before it were (DSpark, section 3)."""

    def __init__(self, *, hidden_size: int, markov_rank: int) -> None:
        """`markov_rank` 0: the head reads h alone; else [h; W1[previous token]]."""
        super().__init__()
        self.markov_rank = markov_rank
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor | None) -> Tensor:
        """hidden [..., D], markov [..., R] (read only with a Markov feature) -> logits [...]."""
        x = hidden if self.markov_rank == 0 or markov is None else torch.cat([hidden, markov], -1)
        return self.proj(x).squeeze(-1)
