"""Jacobi trajectories of a target's own responses: collected once, read back, packed into rows for training.

    python -m data.collect recipe=jacobi_forcing                       collects them ahead of training (collect.py)

The decoder is dspec/decoding/jacobi.py with one block in flight and no recycling. A folder holds one safetensors file
a batch of prompts, each written whole or not at all, so that a run goes on after kill -9 where it stopped; a
trajectory depends on the prompt, its id, the seed and the settings in settings.json alone (and, in float32, on the
batch's shape, so that a batch is run whole). Prompt and response are stored once a sample, the states as integers.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from data.chat import PromptPolicy
from data.module import Conversations, epoch_of, shuffled
from data.prompts import PromptSource
from data.regenerate import prompt_seed, settings_key
from dspec.atomic import atomic_file, write_json
from dspec.decoding.blocks import Flight, Plan
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.models.target import Target
from dspec.packing import Sample, pack, packed_batch

Prompts = Sequence[tuple[str, list[int]]]


def trace(
    decoder: Jacobi, prompts: Prompts, *, max_new_tokens: int, stop_ids: Sequence[int], seed: int
) -> list[Sample]:
    """Decodes a batch and keeps every state of each block, cut at the response's end."""
    states: list[dict[int, list[list[int]]]] = [{} for _ in prompts]

    def observe(row: int, flight: Flight) -> None:
        active = flight.opened - 1  # one block is in flight
        states[row].setdefault(active, []).append(flight.block(active))

    generations = decoder.decode(
        [ids for _, ids in prompts],
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        seeds=[prompt_seed(seed, name) for name, _ in prompts],
        observe=observe,
    )
    n = decoder.plan.block_size
    samples = []
    for (_, ids), own, generation in zip(prompts, states, generations, strict=True):
        blocks = []
        for begin in range(0, len(generation.tokens), n):
            clean = generation.tokens[begin : begin + n]
            blocks.append([*(s[: len(clean)] for s in own.get(begin // n, [])), clean])
        samples.append(Sample(ids, generation.tokens, blocks))
    return samples


def write_shard(path: Path, ids: Sequence[str], samples: Sequence[Sample], *, block_size: int) -> None:
    """One safetensors file: flat integers and the lengths that cut them."""
    blocks = [states for sample in samples for states in sample.blocks]
    padded = [state + [0] * (block_size - len(state)) for states in blocks for state in states]
    tensors = {
        "prompt": torch.tensor([t for s in samples for t in s.prompt], dtype=torch.int32),
        "prompt_length": torch.tensor([len(s.prompt) for s in samples], dtype=torch.int32),
        "response": torch.tensor([t for s in samples for t in s.response], dtype=torch.int32),
        "response_length": torch.tensor([len(s.response) for s in samples], dtype=torch.int32),
        "states": torch.tensor(padded, dtype=torch.int32).view(-1, block_size),
        "states_per_block": torch.tensor([len(states) for states in blocks], dtype=torch.int32),
    }
    with atomic_file(path) as scratch:
        try:
            save_file(tensors, scratch, metadata={"ids": json.dumps(list(ids))})
        except SafetensorError as error:  # safetensors wraps the OSError of a full disk
            raise OSError(str(error)) from error


def read_shard(path: Path, *, block_size: int) -> dict[str, Sample]:
    """Samples by prompt id. Raises UserError for a damaged file or one of another block size."""
    try:
        with safe_open(path, framework="pt") as file:
            names = json.loads(file.metadata()["ids"])
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it and run again") from error
    if (stored := tensors["states"].shape[1]) != block_size:
        raise UserError(f"{path} holds blocks of {stored} tokens, not data.block_size={block_size}: collect anew")
    prompts = _cut(tensors["prompt"].tolist(), tensors["prompt_length"].tolist())
    responses = _cut(tensors["response"].tolist(), tensors["response_length"].tolist())
    blocks = iter(_cut(tensors["states"].tolist(), tensors["states_per_block"].tolist()))
    samples = {}
    for name, prompt, response in zip(names, prompts, responses, strict=True):
        own = []
        for begin in range(0, len(response), block_size):
            length = len(response[begin : begin + block_size])
            own.append([state[:length] for state in next(blocks)])
        samples[name] = Sample(prompt, response, own)
    return samples


def _cut(values: list[Any], lengths: Sequence[int]) -> list[list[Any]]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def collect(
    folder: Path,
    settings: Mapping[str, Any],
    prompts: Prompts,
    decoder: Jacobi,
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> list[Sample]:
    """Trajectories of (id, ids) prompts in their order; only batches that `folder` lacks are decoded.

    Raises UserError when the folder was written with other settings or prompts, or the disk is full: what was
    written stays, and the next run goes on from there.
    """
    ranked = sorted(prompts, key=lambda p: len(p[1]))  # batches of like lengths
    batches = [ranked[i : i + batch_size] for i in range(0, len(ranked), batch_size)]
    n = decoder.plan.block_size
    done: dict[str, Sample] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # a second run of the same settings waits, then finds all there
        _check_settings(folder / "settings.json", settings)
        for number, batch in _with_progress(batches, folder):
            path, names = folder / f"{number:05d}.safetensors", [name for name, _ in batch]
            if not path.is_file():
                traced = trace(decoder, batch, max_new_tokens=max_new_tokens, stop_ids=stop_ids, seed=seed)
                write_shard(path, names, traced, block_size=n)
            own = read_shard(path, block_size=n)
            if list(own) != names:
                raise UserError(f"{path} belongs to other prompts; move {folder} away to collect anew")
            done |= own
    return [done[name] for name, _ in prompts]


def _with_progress(batches: Sequence[Prompts], folder: Path) -> Iterator[tuple[int, Prompts]]:
    """Numbered batches; with a bar where some are still to be decoded."""
    if all((folder / f"{number:05d}.safetensors").is_file() for number in range(len(batches))):
        yield from enumerate(batches)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("Jacobi trajectories of the target"), *columns) as bar:
        task = bar.add_task("collect", total=sum(map(len, batches)))
        for number, batch in enumerate(batches):
            yield number, batch
            bar.advance(task, len(batch))


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    if not path.is_file():
        write_json(path, dict(settings))
    elif json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(settings)):
        raise UserError(f"{path.parent} was written with other settings; move it away to collect anew")


class Trajectories(Conversations):
    """Prompts with the trajectories of the target's responses, packed into rows of about `row_length` places."""

    def __init__(
        self,
        *,
        target: Target,
        source: PromptSource,
        policy: PromptPolicy,
        regeneration: Mapping[str, Any] | None,
        cache_dir: str,
        batch_size: int,
        max_length: int,
        validation: int,
        seed: int,
        block_size: int,
        row_length: int,
    ) -> None:
        """As Conversations, but `regeneration` says how the trajectories are decoded (temperature 0: Jacobi's greedy
        fixed points) and `max_length` cuts responses at whole blocks. `batch_size` counts rows."""
        super().__init__(
            target=target,
            source=source,
            policy=policy,
            regeneration=regeneration,
            cache_dir=cache_dir,
            batch_size=batch_size,
            max_length=max_length,
            validation=validation,
            seed=seed,
        )
        if regeneration is None:
            raise UserError("trajectories are the target's own: data.regeneration must say how to decode them")
        self.block_size, self.row_length = block_size, row_length
        self._packed: list[list[Sample]] = []
        self._held_out: list[list[Sample]] = []

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"block_size": self.block_size}

    @property
    def folder(self) -> Path:
        return self.cache_dir / "trajectories" / f"{self.source.name}-{settings_key(self._all_settings())}"

    def _all_settings(self) -> dict[str, Any]:
        prompts = settings_key({"prompts": self.encoded("train")})
        return self.settings() | {"prompts_sha256": prompts}

    def samples(self) -> list[Sample]:
        """Trajectories of the training prompts, collected where missing."""
        wanted = dict(self.regeneration or {})
        batch_size, max_new = wanted.pop("batch_size"), wanted.pop("max_new_tokens")
        plan = Plan(block_size=self.block_size, blocks=1, activation=1.0, pool_size=0, candidates=0)
        return collect(
            self.folder,
            self._all_settings(),
            self.encoded("train"),
            Jacobi(target=self.target, sampling=Sampling(**wanted), plan=plan),
            stop_ids=self.target.stop_ids,
            max_new_tokens=max_new,
            batch_size=batch_size,
            seed=self.seed,
        )

    def prepare_data(self) -> None:
        self.samples()

    def setup(self, stage: str) -> None:
        if self._packed:
            return
        fitting = [self._within(s) for s in self.samples()]
        usable = [s for s in fitting if len(s.response) > 1]
        if len(usable) <= self.validation:
            raise UserError(
                f"{len(usable)} of {len(fitting)} responses are longer than one token, data.validation holds out "
                f"{self.validation}: nothing to train on; raise the prompt count or data.max_length"
            )
        self._held_out = pack(usable[: self.validation], row_length=self.row_length)
        self._packed = pack(usable[self.validation :], row_length=self.row_length)

    def _within(self, sample: Sample) -> Sample:
        """The blocks that fit `max_length`."""
        kept = max(0, self.max_length - len(sample.prompt)) // self.block_size
        if len(sample.prompt) + len(sample.response) <= self.max_length:
            return sample
        return Sample(sample.prompt, sample.response[: kept * self.block_size], sample.blocks[:kept])

    def train_dataloader(self) -> StatefulDataLoader:
        return shuffled(
            self._packed, batch_size=self.batch_size, collate=packed_batch, seed=self.seed, epoch=epoch_of(self)
        )

    def val_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(self._held_out, batch_size=self.batch_size, collate_fn=packed_batch)
