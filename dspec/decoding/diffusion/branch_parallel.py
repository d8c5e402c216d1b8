"""LoPA's branches over several processes (torch.distributed; NCCL or gloo), on one or several machines.

All ranks decode the same requests with the same state and take the same decisions; only the branches are divided among
them. Rank r computes branches r, r + R, ... of each row in its own pass, and the text that all branches share. A round
takes one all-gather: each rank's most confident branch, its score and its guesses, 12 bytes per slot. What follows is
computed from these alone, so that kernels which round differently on different ranks cannot make them diverge.

Keys and values of what is cached differ between branches only under full attention. Each rank has then written those of
the branches it computes (pre-write); the rank that has the winner spreads them in one broadcast (commit-winner-cache).
Under block-causal attention and without a cache nothing else is sent. A branch 0 alone (in a row's first pass) is
computed by all.

Departures: no controller and no logits between ranks, where the authors' code gathers the logits of all branches on
every rank.

Source: LoPA (github.com/zhijie-group/LoPA), section 3.4.
"""

import atexit
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dspec.decoding.diffusion.block_state import Guess
from dspec.decoding.diffusion.row_state import BranchResult, RowState
from dspec.errors import UserError
from dspec.models.cache import PositionCache

_HEAD = struct.Struct("<dii")  # score, branch (-1: none computed here), number of guesses
_MAX_TIMEOUT_S = 86400  # a day; keeps out infinity, which no timedelta holds
_GUESS = struct.Struct("<iff")  # token, probability, confidence: both are float32 already


class DistributedBranches:
    """A rank's share of the branches, and what it exchanges with the others."""

    def __init__(self, device: torch.device, *, group: dist.ProcessGroup | None = None) -> None:
        """Over a process group of all ranks (None: the default one), whose timeout bounds the wait for a rank that has
        died. `device` is where its backend wants tensors."""
        self.rank, self.size, self.device, self.group = dist.get_rank(), dist.get_world_size(), device, group

    def local_branches(self, branches: int) -> Sequence[int]:
        return range(self.rank, branches, self.size) if branches > 1 else range(branches)

    def select_best(self, results: Sequence[BranchResult | None], slots: int) -> list[BranchResult]:
        packed = torch.frombuffer(bytearray(b"".join(_packed(result, slots) for result in results)), dtype=torch.uint8)
        gathered = torch.empty((self.size, len(packed)), dtype=torch.uint8, device=self.device)
        self._exchange(lambda: dist.all_gather(list(gathered), packed.to(self.device), group=self.group))
        received = gathered.cpu().numpy().tobytes()
        size = _HEAD.size + slots * _GUESS.size
        unpacked = [_unpacked(received, start) for start in range(0, len(received), size)]
        by_row = [[r for r in unpacked[row :: len(results)] if r is not None] for row in range(len(results))]
        return [min(row_results, key=lambda result: result.key) for row_results in by_row]

    def sync_winners(self, winners: Mapping[int, int], row_states: Sequence[RowState], cache: PositionCache) -> None:
        owners: dict[int, list[int]] = {}
        for row, branch in winners.items():
            if row_states[row].branches > 1:
                owners.setdefault(branch % self.size, []).append(row)
        for owner, rows in sorted(owners.items()):
            self._broadcast(owner, rows, row_states, cache)

    def _broadcast(self, owner: int, rows: Sequence[int], row_states: Sequence[RowState], cache: PositionCache) -> None:
        """What these rows cache in this pass goes from the owner to all: keys, values, and the hidden state after them
        where the next pass reads it."""
        parts: list[Tensor] = []
        for row in rows:
            answer, last = row_states[row].answer, row_states[row].hidden_before_window
            parts += [cache.read(row, answer.cached, answer.settled)] + ([] if last is None else [last])
        sent = torch.cat([part.flatten() for part in parts]).to(self.device)
        self._exchange(lambda: dist.broadcast(sent, src=owner, group=self.group))
        if self.rank == owner:
            return
        received = iter(sent.split([part.numel() for part in parts]))
        for row in rows:
            row_state = row_states[row]
            held = cache.read(row, row_state.answer.cached, row_state.answer.settled)
            cache.write(row, row_state.answer.cached, next(received).view_as(held))
            if row_state.hidden_before_window is not None:
                row_state.hidden_before_window = next(received).clone()

    def _exchange(self, collective: Callable[[], object]) -> None:
        """Raises UserError where another rank does not answer within the process group's timeout."""
        try:
            collective()
        except RuntimeError as error:
            raise UserError(
                f"rank {self.rank} of {self.size} cannot reach the others: one has died or stalled; see its output, "
                "then start all again"
            ) from error


def join_processes(*, timeout_seconds: float, device: torch.device) -> DistributedBranches:
    """The ranks that torchrun started this process with, or those of the process group that it is in. They wait for one
    another for at most `timeout_seconds`. Raises UserError for a time that is not positive, in a single process, and
    where one does not come."""
    if not 0 < timeout_seconds < _MAX_TIMEOUT_S:
        raise UserError(
            f"process_timeout_s={timeout_seconds} must be a positive number of seconds below {_MAX_TIMEOUT_S}"
        )
    if not (dist.is_initialized() or dist.is_torchelastic_launched()):
        raise UserError(
            "process_timeout_s divides LoPA's branches over processes: start with torchrun --nproc-per-node N -m ..."
        )
    timeout = timedelta(seconds=timeout_seconds)
    if dist.is_initialized():
        return DistributedBranches(device, group=dist.new_group(timeout=timeout))
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    except RuntimeError as error:
        raise UserError(
            f"not all processes have joined within process_timeout_s={timeout_seconds:g}: see their output, then start "
            "all again"
        ) from error
    atexit.register(dist.destroy_process_group)
    return DistributedBranches(device)


def _packed(result: BranchResult | None, slots: int) -> bytes:
    """A packet in as many bytes as one with `slots` guesses takes."""
    guesses = () if result is None else result.guesses
    head = (0.0, -1) if result is None else (result.score, result.branch)
    body = b"".join(_GUESS.pack(*one) for one in guesses)
    return (_HEAD.pack(*head, len(guesses)) + body).ljust(_HEAD.size + slots * _GUESS.size, b"\0")


def _unpacked(data: bytes, at: int) -> BranchResult | None:
    score, branch, count = _HEAD.unpack_from(data, at)
    first = at + _HEAD.size
    guesses = [Guess(*_GUESS.unpack_from(data, first + i * _GUESS.size)) for i in range(count)]
    return None if branch < 0 else BranchResult(score, branch, guesses)
