"""Responses written by the target itself, for training drafters on-policy: keyed by id and prompt, resumable.

    python -m data.regenerate recipe=dspark target=smollm2_135m data=gsm8k

The file is append-only JSON Lines: a first row with the settings, then one row per response. A response belongs to an
id and its prompt tokens: a changed prompt is answered again, new prompts are added, all others keep their answers, and
two data sets of the same name can share a file. After kill -9 an incomplete last batch is dropped and what is missing
is generated; responses depend only on the prompt, its id and the seed (and, in float32, on the batch's shape, which is
why batches are run whole): an interrupted file equals an uninterrupted one.
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

from dspec.config.compose import entry_point, instantiate
from dspec.decoding.generation import make_requests
from dspec.decoding.loop import Decoder, decode
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.progress import with_progress
from dspec.seeding import prompt_seed

log = logging.getLogger(__name__)

Key = tuple[str, tuple[int, ...]]  # what a response answers: an id and the prompt's tokens


@dataclass(frozen=True)
class Response:
    id: str
    prompt_tokens: list[int]
    tokens: list[int]  # up to and including the stop token
    stopped: bool


def response_key(name: str, ids: Sequence[int]) -> Key:
    return name, tuple(ids)


def batches_of(prompts: Sequence[tuple[str, list[int]]], batch_size: int) -> list[list[tuple[str, list[int]]]]:
    """(id, ids) prompts in batches of similar length, shortest first: the same ones after an interruption."""
    ranked = sorted(prompts, key=lambda p: len(p[1]))
    return [ranked[i : i + batch_size] for i in range(0, len(ranked), batch_size)]


def settings_key(settings: Mapping[str, Any]) -> str:
    """A short digest of the settings that names their file."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def read_responses(path: Path, settings: Mapping[str, Any]) -> dict[Key, Response]:
    """Finished responses; {} if there is no file. An incomplete last line is skipped.

    Raises UserError if the file was written with other settings or an inner row is malformed.
    """
    if not path.is_file():
        return {}
    raw = path.read_bytes()
    done: dict[Key, Response] = {}
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)
            if number == 1:
                if row["settings"] != json.loads(json.dumps(settings)):
                    raise UserError(f"{path} was written with other settings; move it away to generate again")
                continue
            response = Response(row["id"], row["prompt_tokens"], row["tokens"], row["stopped"])
        except (ValueError, KeyError, TypeError) as error:
            fix = "move the file away to generate again" if number == 1 else "delete that line and run again"
            raise UserError(f"{path}, line {number} is malformed ({error!r}); {fix}") from error
        done[response_key(response.id, response.prompt_tokens)] = response
    return done


def regenerate(
    *,
    path: Path,
    settings: Mapping[str, Any],
    prompts: Sequence[tuple[str, list[int]]],
    decoder: Decoder,
    sampling: Sampling,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    describe: Callable[[list[int]], str],
) -> list[Response]:
    """Responses for (id, ids) prompts, in order; only those missing from `path` are generated.

    `describe` renders tokens as text for human readers. Raises UserError if the disk is full: what was written stays,
    and the next run continues from there.
    """
    done = read_responses(path, settings)
    if any(response_key(*prompt) not in done for prompt in prompts):
        try:
            with _alone(path):
                _drop_torn_batch(path)
                done = read_responses(path, settings)
                missing = batches_of([p for p in prompts if response_key(*p) not in done], batch_size)
                _generate(path, settings, missing, done, decoder, sampling, stop_ids, max_new_tokens, seed, describe)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}); free space and run again to continue") from error
    return [done[response_key(*prompt)] for prompt in prompts]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Runs with the same settings share one file: the second waits, then finds the responses there."""
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


def _drop_torn_batch(path: Path) -> None:
    """Truncates the file after the last row that completes its batch (`left` 0)."""
    if not path.is_file():
        return
    raw = path.read_bytes()
    end = raw.rfind(b"\n") + 1
    while end and _left(raw[raw.rfind(b"\n", 0, end - 1) + 1 : end]):
        end = raw.rfind(b"\n", 0, end - 1) + 1
    os.truncate(path, end)


def _left(line: bytes) -> int:
    """Rows of the batch after this one; 0 for a line that is not a response: reading reports what is wrong with it."""
    try:
        return int(json.loads(line)["left"])
    except (ValueError, KeyError, TypeError):
        return 0


def _generate(
    path: Path,
    settings: Mapping[str, Any],
    batches: Sequence[Sequence[tuple[str, list[int]]]],
    done: dict[Key, Response],
    decoder: Decoder,
    sampling: Sampling,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    seed: int,
    describe: Callable[[list[int]], str],
) -> None:
    """Generates and appends responses, batch by batch, and adds them to `done`."""
    if not batches:
        return
    with path.open("a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write(json.dumps({"settings": settings}, ensure_ascii=False) + "\n")
        for batch in with_progress("responses by the target", batches):
            requests = make_requests(
                [ids for _, ids in batch],
                seeds=[prompt_seed(seed, name) for name, _ in batch],
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
            )
            generations = decode(decoder, requests)
            for i, ((name, ids), generation) in enumerate(zip(batch, generations, strict=True), 1):
                response = Response(name, ids, generation.tokens, generation.stopped)
                row = vars(response) | {"left": len(batch) - i, "text": describe(generation.tokens)}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                done[response_key(name, ids)] = response
            file.flush()
            os.fsync(file.fileno())


def _task(cfg: DictConfig) -> None:
    module = instantiate(cfg.data, target=instantiate(cfg.target))
    responses = module.responses()
    tokens = sum(len(r.tokens) for r in responses)
    print(f"{len(responses)} responses, {tokens} tokens: {module.responses_path}")


main = entry_point(config="train")(_task)

if __name__ == "__main__":
    main()
