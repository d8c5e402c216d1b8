"""The decoding loop, shared by all decoders.

A decoder has two operations: `start` runs the first forward pass of the target (the prefill, where there is one), and
each `step` another one for all requests in flight. Requests may join and leave the batch between steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dspec.decoding.generation import Generation, Pass, Request
from dspec.decoding.sampling import Sampling, Streams, draw
from dspec.decoding.state import Row, State
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel
from dspec.models.ragged import RaggedRows
from dspec.models.target_model import TargetModel
from dspec.spans import span


class Decoder(Protocol):
    """Decodes batches of requests; the output of each does not depend on the others."""

    lossless: bool  # the output distribution is that of the same model at one token per pass (greedy: the same tokens)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises UserError for a request that cannot be decoded."""
        ...

    def start(self, requests: Sequence[Request]) -> State:
        """Checks the requests and runs their first pass.

        From left to right that pass is the prefill, which commits each one's first token. An any-subset decoder's
        commits at least one token, sigma-GPT's only drafts, and a diffusion LM's fills slots of the answer."""
        ...

    def step(self, state: State) -> None:
        """One forward pass of the target for all rows; rows that have finished stay, their output is ignored."""
        ...

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """The settings reported in the results next to the decoder's name, for requests with this sampling."""
        ...


@torch.inference_mode()
def decode(
    decoder: Decoder,
    requests: Sequence[Request],
    *,
    in_flight: int | None = None,
    observe: Callable[[State], None] | None = None,
) -> list[Generation]:
    """The generations of `requests`, in order. `observe` is called with the state before each step.

    At most `in_flight` requests are decoded at a time (None: all); the next ones join as others finish (continuous
    batching). It bounds the memory of the caches; dspec/serving/engine.py joins and drops rows in the same way, and
    tests use it to check that this changes no output.

    Raises UserError for an empty list, a request that the decoder cannot take (before any is decoded), or
    in_flight < 1.
    """
    if not requests:
        raise UserError("no prompts to decode: pass at least one")
    room = len(requests) if in_flight is None else in_flight
    if room < 1:
        raise UserError(f"in_flight={in_flight}: at least one request must be decoded at a time")
    if room < len(requests):
        decoder.check(requests)  # the waiting ones too, before any is decoded
    state = decoder.start(requests[:room])
    generations, waiting = [row.generation for row in state.rows], list(requests[room:])
    while True:
        state.drop_finished()
        if waiting and (free := room - len(state.rows)) > 0:
            joined = decoder.start(waiting[:free])
            del waiting[:free]
            generations += [row.generation for row in joined.rows]
            state.join(joined)
            continue
        if not state.rows:
            return generations
        if observe is not None:
            observe(state)
        decoder.step(state)


def check_requests(model: TargetModel, requests: Sequence[Request], *, any_order: bool = False) -> None:
    """Raises UserError for an empty prompt, one that does not fit the context, token ids or seeds out of range, or
    max_new_tokens < 1; also for a request with positions, unless the decoder generates tokens in `any_order`."""
    vocab = model.embed_tokens.num_embeddings
    for i, request in enumerate(requests):
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={request.max_new_tokens} must be at least 1")
        if not request.ids:
            raise UserError(f"prompt {i} is empty: every prompt needs at least one token")
        if not 0 <= min(request.ids) <= max(request.ids) < vocab:
            raise UserError(
                f"prompt {i} has token ids {min(request.ids)} to {max(request.ids)}, but those of {model.name!r} are "
                f"0 to {vocab - 1}: encode it with this model's tokenizer"
            )
        if not -(2**63) <= request.seed < 2**64:
            raise UserError(f"seed={request.seed} of request {i} must fit in 64 bits")
        if request.positions is not None and not any_order:
            raise UserError(
                f"request {i} names the positions of its tokens, but this decoder writes from left to right: "
                "take decoder=any_subset or assd"
            )
        model.check_length(len(request.ids), request.max_new_tokens)


def prefill(
    model: LanguageModel, requests: Sequence[Request], *, taps: Sequence[int] = ()
) -> tuple[State, torch.Tensor]:
    """One pass over the packed prompts that commits each row's first token; returns state and features [B, L, F],
    padded on the right."""
    prompts = RaggedRows([len(r.ids) for r in requests], model.device)
    ids_1N = torch.tensor([[token for r in requests for token in r.ids]], device=model.device)
    state = State(
        rows=[Row(request, list(request.ids), Generation()) for request in requests],
        cache=model.new_cache(),
        streams=Streams([r.seed for r in requests], model.device),
    )
    with span("prefill"):
        output = model.packed(ids_1N, prompts, cache=state.cache, taps=taps)
        first = next_tokens(model.logits(output.hidden_BLD[0, prompts.last]), state)
    for row, token in zip(state.rows, first, strict=True):
        row.generation.passes.append(Pass("prefill", row.commit([token]), positions=len(row.request.ids)))
    return state, prompts.unpack(output.features_BLF)


def next_pass(target: LanguageModel, state: State, taps: Sequence[int] = ()) -> tuple[list[int], torch.Tensor]:
    """One token per row by one pass over each row's last: the tokens, and the taps' features [B, F]."""
    ids = torch.tensor([row.text[-1] for row in state.rows], device=target.device)[:, None]
    with span("target"):
        output = target(ids, start_B=state.starts, cache=state.cache, taps=taps)
    with span("target LM head"):
        logits_BV = target.logits(output.hidden_BLD[:, 0])
    with span("sampling"):
        return next_tokens(logits_BV, state), output.features_BLF[:, 0]


def next_tokens(logits_BV: torch.Tensor, state: State) -> list[int]:
    """Each row's next token under its request's sampling."""
    samplings = state.samplings
    if samplings.greedy:
        return logits_BV.argmax(-1).tolist()
    return draw(samplings.probs(logits_BV), state.streams.take(1)[:, 0]).tolist()
