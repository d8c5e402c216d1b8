"""Composition of a run's config: recipes as a Hydra group, strict keys, and errors in one line with exit code 2."""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dspec.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
_STARTED = "DSPEC_STARTED"


def register() -> None:
    """Makes each file under recipes/ a choice of the group `recipe` (recipe=dspark, recipe=sweeps/<name>), merged at
    the root of the config."""
    if not CONF.is_dir():
        raise UserError(f"no config folder at {CONF}: install dspec from a clone with pip install -e .")
    store = ConfigStore.instance()
    recipes = ROOT / "recipes"
    for path in sorted(recipes.rglob("*.yaml")):
        group = "/".join(("recipe", *path.relative_to(recipes).parts[:-1]))
        store.store(group=group, name=path.stem, node=yaml.safe_load(path.read_text("utf-8")), package="_global_")
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("limit_or", _limit_or, replace=True)


def _run_dir(resume: str | None, recipe: str | None) -> str:
    """The run folder: that of the run to resume, or runs/<recipe>/<time>."""
    return resume or f"runs/{recipe or 'custom'}/{started()}"


def started() -> str:
    """When this run began, one answer for all its ranks: they share a run folder that is named by it.

    A rank that Lightning starts inherits it. Under torchrun rank 0 tells the others through the agent's store.
    """
    if _STARTED not in os.environ:
        os.environ[_STARTED] = _agreed(f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return os.environ[_STARTED]


def _agreed(own: str) -> str:
    """`own` of rank 0. Raises UserError where ranks were started one by one and share no store."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return own
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError("these ranks do not know each other's run folder: say hydra.run.dir=<folder> on each of them")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"{_STARTED}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if os.environ["RANK"] == "0":
        store.set(key, own)
    return str(store.get(key).decode())


def _limit_or(own: int | None, *, _root_: DictConfig) -> Any:
    """How many prompts a benchmark asks: what the run says for all of them, else the benchmark's own number."""
    said = (OmegaConf.select(_root_, key) for key in ("limit", "evaluation.limit"))
    return next((limit for limit in said if limit is not None), own)


def _keys(base: str) -> set[str]:
    """Top-level keys of conf/<base>.yaml and of the configs that its defaults list names without a group."""
    found: set[str] = set()
    for key, value in (yaml.safe_load((CONF / f"{base}.yaml").read_text("utf-8")) or {}).items():
        if key != "defaults":
            found.add(key)
            continue
        for entry in value:
            if isinstance(entry, dict):
                found.add(next(iter(entry)))
            elif entry != "_self_":
                found |= _keys(entry)
    return found


def check_keys(cfg: DictConfig, *, base: str) -> None:
    """Raises UserError for top-level keys that conf/<base>.yaml does not know (Hydra merges those silently)."""
    known = _keys(base)
    if unknown := sorted(set(map(str, cfg)) - known):
        raise UserError(f"unknown key {', '.join(unknown)}; the config has: {', '.join(sorted(known - {'recipe'}))}")


def composed(base: str, overrides: Sequence[str]) -> DictConfig:
    """conf/<base>.yaml with `overrides`, for a program whose command line is not Hydra's."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(base, overrides=list(overrides))
    check_keys(cfg, base=base)
    return cfg


def instantiate(node: Any, **kwargs: Any) -> Any:
    """hydra's instantiate, with what went wrong in one line: the user's own error, or the key that does not fit."""
    try:
        return hydra.utils.instantiate(node, **kwargs)
    except HydraException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from error
        inner = error.__cause__ or error
        if isinstance(inner, TypeError | ValueError | ImportError):
            raise UserError(f"{node.get('_target_', 'config')}: {inner}") from error
        raise


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines and error.__cause__ is not None:  # Hydra wraps some errors in an empty one
        return _one_line(error.__cause__)
    return " ".join(lines) or type(error).__name__


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake ends the program with one line and exit code 2."""
    try:
        yield
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _check_resume(args: Sequence[str]) -> None:
    """Hydra would make the folder that is not there before anything else looks at it."""
    for folder in [arg.removeprefix("resume=") for arg in args if arg.startswith("resume=")]:
        if folder not in ("", "null") and not Path(folder).is_dir():
            raise UserError(f"nothing to resume: there is no folder {folder}; give the folder of a run")


def entry_point(*, config: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Decorates a task function as a Hydra app on conf/<config>.yaml; user errors end it with exit code 2."""

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> None:
            check_keys(cfg, base=config)
            task(cfg)

        @functools.wraps(task)
        def main() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra lets exceptions through to the handler below
            warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
            if "LOCAL_RANK" not in os.environ:  # a rank is of the run that started it
                os.environ.pop(_STARTED, None)
            with one_line_errors():
                register()
                _check_resume(sys.argv[1:])
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(guarded)()

        return main

    return decorate
