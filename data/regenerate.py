"""Responses written by the target itself, for training drafters on-policy: keyed by prompt id, resumable.

    python -m data.regenerate recipe=dspark target=smollm2_135m data=gsm8k

The file is append-only JSON Lines: a first row with the settings, then one row a response. After kill -9 a torn last
line is dropped and what is missing is generated; responses depend on the prompt's id and the seed alone, so an
interrupted file equals an unbroken one.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspec.config import entry_point, instantiate
from dspec.decoding.base import Decoder
from dspec.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    id: str
    prompt_tokens: list[int]
    tokens: list[int]  # up to and including the stop token
    stopped: bool


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed for one prompt that depends on nothing but its id and the root seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:6], "big")


def settings_key(settings: Mapping[str, Any]) -> str:
    """A short digest that names the file of these settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def read_responses(path: Path, settings: Mapping[str, Any]) -> dict[str, Response]:
    """Finished responses by id; {} when there is no file. A torn last line is passed over.

    Raises UserError when the file was written with other settings or an inner row is malformed.
    """
    if not path.is_file():
        return {}
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    done: dict[str, Response] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            if number == 1:
                if row["settings"] != json.loads(json.dumps(settings)):
                    raise UserError(f"{path} was written with other settings; move it away to generate anew")
                continue
            response = Response(row["id"], row["prompt_tokens"], row["tokens"], row["stopped"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number} is malformed ({error!r}); delete that line and run again"
            ) from error
        done[response.id] = response
    return done


def regenerate(
    *,
    path: Path,
    settings: Mapping[str, Any],
    prompts: Sequence[tuple[str, list[int]]],
    decoder: Decoder,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    describe: Callable[[list[int]], str],
) -> list[Response]:
    """Responses for (id, ids) prompts in their order; only what `path` lacks is generated.

    `describe` renders tokens as text for the reader's eyes. Raises UserError when the disk is full: what was written
    stays, and the next run goes on from there.
    """
    done = read_responses(path, settings)
    if all(name in done for name, _ in prompts):
        return [done[name] for name, _ in prompts]
    try:
        with _alone(path):
            done = read_responses(path, settings)
            _drop_torn_line(path)
            _generate_missing(
                path, settings, prompts, done, decoder, stop_ids, max_new_tokens, batch_size, seed, describe
            )
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); free space and run again to go on") from error
    return [done[name] for name, _ in prompts]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two runs of the same settings share one file: the second waits, then finds the responses there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.info("another run is writing %s; waiting for it", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _drop_torn_line(path: Path) -> None:
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _generate_missing(
    path: Path,
    settings: Mapping[str, Any],
    prompts: Sequence[tuple[str, list[int]]],
    done: dict[str, Response],
    decoder: Decoder,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    describe: Callable[[list[int]], str],
) -> None:
    """Generates and appends what `done` lacks, and adds it there."""
    ranked = sorted(prompts, key=lambda p: len(p[1]))  # batches of like lengths
    batches = [ranked[i : i + batch_size] for i in range(0, len(ranked), batch_size)]
    # a half-written batch is run whole again: its shape decides how float32 rounds
    todo = [batch for batch in batches if any(name not in done for name, _ in batch)]
    if not todo:
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with path.open("a", encoding="utf-8") as file, Progress(TextColumn("responses by the target"), *columns) as bar:
        task = bar.add_task("regenerate", total=sum(map(len, todo)))
        if file.tell() == 0:
            file.write(json.dumps({"settings": settings}, ensure_ascii=False) + "\n")
        for batch in todo:
            generations = decoder.decode(
                [ids for _, ids in batch],
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                seeds=[prompt_seed(seed, name) for name, _ in batch],
            )
            for (name, ids), generation in zip(batch, generations, strict=True):
                if name in done:
                    continue
                response = Response(name, ids, generation.tokens, generation.stopped)
                row = vars(response) | {"text": describe(generation.tokens)}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                done[name] = response
            file.flush()
            os.fsync(file.fileno())
            bar.advance(task, len(batch))


def _task(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    module = instantiate(cfg.data, target=target)
    responses = module.responses()
    tokens = sum(len(r.tokens) for r in responses)
    print(f"{len(responses)} responses, {tokens} tokens: {module.responses_path}")


main = entry_point(config="train")(_task)

if __name__ == "__main__":
    main()
