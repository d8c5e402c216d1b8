"""Jacobi trajectories of a target's own responses: collected once, read back, packed into rows for training.

    python -m data.collect recipe=jacobi_forcing                       collects them ahead of training (collect.py)

The decoder is dspec/decoding/jacobi.py with one block in flight and no recycling. A folder holds one safetensors file
per batch of prompts, named after them and written atomically, so that a run continues after kill -9 where it stopped; a
trajectory depends only on the prompt, its id, the seed and the settings in settings.json (and, in float32, on the
batch's shape, which is why batches are run whole). A changed prompt is decoded again, new ones are added, all others
stay. Trajectories are views of the memory-mapped files: those not in a batch take no memory.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from data.chat import PromptPolicy
from data.conversations import Conversations, Regeneration
from data.loaders import held_out, shuffled
from data.prompts import PromptSource
from data.regenerate import Key, Response, batches_of, response_key, settings_key
from dspec.atomic import atomic_file, write_json
from dspec.decoding.generation import make_requests
from dspec.decoding.jacobi import BLOCKS, Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import decode
from dspec.decoding.sampling import Sampling
from dspec.decoding.state import State
from dspec.errors import UserError
from dspec.jacobi_forcing.packing import Trajectory, pack_trajectories, trajectory_batch
from dspec.models.language_model import LanguageModel, require_causal
from dspec.progress import with_progress
from dspec.seeding import prompt_seed

Prompts = Sequence[tuple[str, list[int]]]


def trace(
    decoder: Jacobi, prompts: Prompts, *, sampling: Sampling, max_new_tokens: int, stop_ids: Sequence[int], seed: int
) -> list[Trajectory]:
    """Decodes a batch and records every state of each block, cut at the response's end."""
    requests = make_requests(
        [ids for _, ids in prompts],
        seeds=[prompt_seed(seed, name) for name, _ in prompts],
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
    )
    states: dict[int, dict[int, list[list[int]]]] = {id(request): {} for request in requests}

    def observe(state: State) -> None:
        for row, blocks in zip(state.rows, state.parts[BLOCKS], strict=True):
            if not row.done:
                active = blocks.opened - 1  # one block is in flight
                states[id(row.request)].setdefault(active, []).append(blocks.block(active))

    generations = decode(decoder, requests, observe=observe)
    n = decoder.config.block_size
    trajectories = []
    for (_, ids), observed, generation in zip(prompts, states.values(), generations, strict=True):
        blocks = []
        for begin in range(0, len(generation.tokens), n):
            clean = generation.tokens[begin : begin + n]
            blocks.append([*(s[: len(clean)] for s in observed.get(begin // n, [])), clean])
        trajectories.append(Trajectory.from_lists(ids, generation.tokens, blocks, block_size=n))
    return trajectories


def write_shard(path: Path, ids: Sequence[str], trajectories: Sequence[Trajectory]) -> None:
    """Writes one safetensors file: flat integers, and the lengths to split them by."""
    tensors = {
        "prompt": torch.cat([s.prompt_P for s in trajectories]),
        "prompt_length": torch.tensor([len(s.prompt_P) for s in trajectories], dtype=torch.int32),
        "response": torch.cat([s.response_R for s in trajectories]),
        "response_length": torch.tensor([len(s.response_R) for s in trajectories], dtype=torch.int32),
        "states": torch.cat([s.states_Sn for s in trajectories]),
        "states_per_block": torch.cat([s.count_J for s in trajectories]),
    }
    with atomic_file(path) as scratch:
        try:
            save_file(tensors, scratch, metadata={"ids": json.dumps(list(ids))})
        except SafetensorError as error:  # safetensors wraps the OSError of a full disk
            raise OSError(str(error)) from error


def read_shard(path: Path, *, block_size: int) -> dict[Key, Trajectory]:
    """Views of the file's trajectories. Raises UserError for a damaged file or one with another block size."""
    try:
        with safe_open(path, framework="pt") as file:
            names = json.loads(file.metadata()["ids"])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if (stored := tensors["states"].shape[1]) != block_size:
            raise UserError(f"{path} holds blocks of {stored} tokens, not data.block_size={block_size}: collect again")
        trajectories = _cut(tensors, block_size)
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it and run again") from error
    return {response_key(name, s.prompt_P.tolist()): s for name, s in zip(names, trajectories, strict=True)}


def _cut(tensors: Mapping[str, Tensor], block_size: int) -> list[Trajectory]:
    prompts, responses = (tensors[name].split(tensors[f"{name}_length"].tolist()) for name in ("prompt", "response"))
    counts = tensors["states_per_block"].split([-(-len(response) // block_size) for response in responses])
    states = tensors["states"].split([int(count.sum()) for count in counts])
    return [Trajectory(*parts) for parts in zip(prompts, responses, states, counts, strict=True)]


def collect(
    folder: Path,
    settings: Mapping[str, Any],
    prompts: Prompts,
    decoder: Jacobi,
    *,
    sampling: Sampling,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> list[Trajectory]:
    """Trajectories of (id, ids) prompts, in order; only those missing from `folder` are decoded.

    Raises UserError if the folder was written with other settings or the disk is full: what was written stays, and the
    next run continues from there.
    """
    n = decoder.config.block_size
    done: dict[Key, Trajectory] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # a second run with the same settings waits, then finds everything there
        for left in folder.glob(".*.tmp"):  # of a killed writer: nobody else writes here now
            left.unlink()
        _check_settings(folder / "settings.json", settings)
        for path in sorted(folder.glob("*.safetensors")):
            done |= read_shard(path, block_size=n)
        missing = [prompt for prompt in prompts if response_key(*prompt) not in done]
        for batch in with_progress("Jacobi trajectories of the target", batches_of(missing, batch_size)):
            path = folder / f"{settings_key({'prompts': batch})}.safetensors"
            traced = trace(
                decoder, batch, sampling=sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids, seed=seed
            )
            write_shard(path, [name for name, _ in batch], traced)
            done |= read_shard(path, block_size=n)
    return [done[response_key(*prompt)] for prompt in prompts]


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    if not path.is_file():
        write_json(path, dict(settings))
    elif json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(settings)):
        raise UserError(f"{path.parent} was written with other settings; move it away to collect again")


class Trajectories(Conversations):
    """Prompts with the trajectories of the target's responses, packed into rows of about `row_length` tokens."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        source: PromptSource,
        policy: PromptPolicy,
        regeneration: Regeneration | None,
        cache_dir: str,
        batch_size: int,
        max_length: int,
        sort_window: int | None,
        validation: int,
        seed: int,
        block_size: int,
        row_length: int,
    ) -> None:
        """As Conversations, but `regeneration` sets how the trajectories are decoded (temperature 0: Jacobi's greedy
        fixed points) and `max_length` cuts responses to whole blocks. `batch_size` counts rows."""
        super().__init__(
            target=target,
            source=source,
            policy=policy,
            regeneration=regeneration,
            cache_dir=cache_dir,
            batch_size=batch_size,
            max_length=max_length,
            sort_window=sort_window,
            validation=validation,
            seed=seed,
        )
        if regeneration is None:
            raise UserError("trajectories are the target's own: data.regeneration must set how to decode them")
        self.block_size, self.row_length = block_size, row_length
        self._packed: list[list[Trajectory]] = []
        self._held_out: list[list[Trajectory]] = []

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"block_size": self.block_size}

    def responses(self) -> list[Response]:
        """Raises UserError: no run would read them, since a trajectory ends with its own response."""
        raise UserError("this data trains on trajectories, not on plain responses: use python -m data.collect instead")

    @property
    def folder(self) -> Path:
        return self.cache_dir / "trajectories" / f"{self.source.name}-{settings_key(self.settings())}"

    def trajectories(self) -> list[Trajectory]:
        """Trajectories of the training prompts, collected where missing."""
        wanted: dict[str, Any] = {**(self.regeneration or {})}
        batch_size, max_new = wanted.pop("batch_size"), wanted.pop("max_new_tokens")
        config = JacobiConfig(block_size=self.block_size, blocks=1, activation=1.0, pool_size=0, candidates=0)
        return collect(
            self.folder,
            self.settings(),
            self.encoded("train"),
            Jacobi(target=require_causal(self.target), config=config),
            sampling=Sampling(**wanted),
            stop_ids=self.target.stop_ids,
            max_new_tokens=max_new,
            batch_size=batch_size,
            seed=self.seed,
        )

    def prepare_data(self) -> None:
        self.trajectories()

    def setup(self, stage: str) -> None:
        if self._packed:
            return
        fitting = [self._within(s) for s in self.trajectories()]
        usable = [s for s in fitting if len(s.response_R) > 1]
        if len(usable) <= self.validation:
            raise UserError(
                f"{len(usable)} of {len(fitting)} responses are longer than one token, data.validation holds out "
                f"{self.validation}: nothing to train on; raise the prompt count or data.max_length"
            )
        self._held_out = pack_trajectories(usable[: self.validation], row_length=self.row_length)
        self._packed = pack_trajectories(usable[self.validation :], row_length=self.row_length)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for trajectory in itertools.chain.from_iterable([*self._held_out, *self._packed]):
            for part in (trajectory.prompt_P, trajectory.response_R, trajectory.states_Sn, trajectory.count_J):
                digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _within(self, trajectory: Trajectory) -> Trajectory:
        """The blocks that fit `max_length`."""
        room = self.max_length - len(trajectory.prompt_P)
        return (
            trajectory if len(trajectory.response_R) <= room else trajectory.beginning(max(0, room) // self.block_size)
        )

    def train_dataloader(self) -> StatefulDataLoader:
        return shuffled(
            self._packed,
            lengths=[sum(trajectory.packed_length for trajectory in row) for row in self._packed],
            batch_size=self.batch_size,
            window=self.sort_window,
            collate=trajectory_batch,
            module=self,
            seed=self.seed,
        )

    def val_dataloader(self) -> StatefulDataLoader:
        return held_out(self._held_out, batch_size=self.batch_size, collate=trajectory_batch, module=self)
