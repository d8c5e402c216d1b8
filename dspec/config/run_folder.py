"""The run folder: its name, the command stored in it, and how that command is resumed."""

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import atomic_file
from dspec.errors import UserError

STARTED = "DSPEC_STARTED"
_WITH_VALUE = {*"--config-path -cp --config-name -cn --config-dir -cd --cfg -c --package -p --info -i".split()}


def run_dir(resume: str | None, recipe: str | None) -> str:
    """The run folder: the resumed run's, or runs/<recipe>/<time>."""
    return resume or f"runs/{recipe or 'custom'}/{started()}"


def started() -> str:
    """When this run started, the same on all ranks: their shared run folder is named after it.

    Ranks that Lightning starts inherit it. Under torchrun rank 0 shares it through the agent's store; the tasks of a
    Slurm step use the step's id.
    """
    if STARTED not in os.environ:
        os.environ[STARTED] = _agreed(f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return os.environ[STARTED]


def _agreed(local: str) -> str:
    """Rank 0's `local` value. Raises UserError if the ranks were started one by one and share no store."""
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return local
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError("these ranks cannot agree on a run folder: set hydra.run.dir=<folder> on each of them")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"{STARTED}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if os.environ["RANK"] == "0":
        store.set(key, local)
    return str(store.get(key).decode())


def override_key(override: str) -> str:
    """What an override sets: `seed` of "seed=1", `target` of "+target=tiny"."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def resumed(args: Sequence[str], *, config: str) -> list[str]:
    """The arguments merged with those that the run to resume was started with: `resume=<folder>` alone is enough.

    An existing .hydra folder is left as it is: `remember_command` writes the new command once the run is accepted.
    Raises UserError if the folder to resume is missing (Hydra would create it) or holds another program's run, and if
    the run folder cannot be created.
    """
    folders = [arg.removeprefix("resume=") for arg in args if arg.startswith("resume=")]
    if not folders or folders[-1] in ("", "null"):
        named = [Path(arg.removeprefix("hydra.run.dir=")) for arg in args if arg.startswith("hydra.run.dir=")]
        if named:
            _check_folder(named[-1])
        known = named and (named[-1] / ".hydra" / "overrides.yaml").is_file()
        given = any(arg.startswith("hydra.output_subdir=") for arg in args)  # Lightning sets it for its ranks
        return _options_first([*args, *(["hydra.output_subdir=null"] if known and not given else [])])
    folder = Path(folders[-1])
    if not folder.is_dir():
        raise UserError(f"nothing to resume: there is no folder {folder}; pass the folder of a run")
    if not (folder / ".hydra").is_dir():
        return list(args)
    started_as = _stored(folder, "hydra", "hydra", "job", "config_name")
    if started_as != config:
        raise UserError(f"{folder} is a run of conf/{started_as}.yaml: it cannot be resumed under conf/{config}.yaml")
    stored = _stored(folder, "overrides") or []
    if not isinstance(stored, list) or not all(isinstance(override, str) for override in stored):
        raise UserError(_damaged(folder, "overrides", "it is no list of overrides"))
    overridden = {override_key(arg) for arg in args}
    return _options_first(
        [*args, *(old for old in stored if override_key(old) not in overridden), "hydra.output_subdir=null"]
    )


def _stored(folder: Path, name: str, *keys: str) -> Any:
    """A value of .hydra/<name>.yaml. Raises UserError if the file is missing or damaged."""
    try:
        value = yaml.safe_load((folder / ".hydra" / f"{name}.yaml").read_text("utf-8"))
        for inner in keys:
            value = value[inner]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(_damaged(folder, name, type(error).__name__)) from error
    return value


def _damaged(folder: Path, name: str, why: str) -> str:
    return (
        f"{folder}/.hydra/{name}.yaml is missing or damaged ({why}): restore it, or delete {folder}/.hydra and repeat "
        "the run's whole command with resume=<folder>"
    )


def _options_first(args: Sequence[str]) -> list[str]:
    """Hydra's parser wants all overrides together: options such as --config-dir and their values go first."""
    options: list[str] = []
    overrides: list[str] = []
    for before, arg in zip(["", *args], args, strict=False):
        (options if arg.startswith("-") or before in _WITH_VALUE else overrides).append(arg)
    return [*options, *overrides]


def _check_folder(path: Path) -> None:
    """Raises UserError if a file is in the way of a folder."""
    nearest = next(folder for folder in (path, *path.parents, Path()) if folder.exists())
    if not nearest.is_dir():
        raise UserError(f"hydra.run.dir={path} cannot be a folder: {nearest} is a file; choose another one")


def remember_command(cfg: DictConfig) -> None:
    """Writes an accepted run's command to its .hydra folder if Hydra has not (an earlier command's was there), so that
    `resume=<folder>` alone continues this one."""
    run, folder = HydraConfig.get(), Path(HydraConfig.get().runtime.output_dir) / ".hydra"
    if run.output_subdir is not None or not folder.is_dir():
        return
    command = [override for override in run.overrides.task if override_key(override) != "resume"]
    hydra_cfg = OmegaConf.create({"hydra": run})
    parts = {"overrides": OmegaConf.create(command), "config": cfg, "hydra": hydra_cfg}
    for name, part in parts.items():
        with atomic_file(folder / f"{name}.yaml") as scratch:
            OmegaConf.save(part, scratch)
