"""Composing a run's config: recipes as a Hydra group, strict keys, one-line errors with exit code 2."""

import difflib
import functools
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dspec.atomic import atomic_file
from dspec.errors import UserError
from dspec.old_names import check_arguments, check_config, gone_group
from dspec.recipes import pages, store_recipes, store_variants, variants

# Leaves (by name or path) that hold integers, and their minimum; None: no minimum.
_WHOLE: dict[str, int | None] = {
    "seed": 0,
    "limit": 1,
    "count": 1,
    "batch_size": 1,
    "max_new_tokens": 1,
    "evaluation.warmup": 0,
    "evaluation.generate_prompts": 0,
    "data.validation": 0,
    "optimizer.cycles": 1,
    "accumulate_grad_batches": 1,
    "num_anchors": 1,
    "block_size": 1,
    "num_layers": 1,
    "row_length": 1,
    "folds": 1,
    "bins": 1,
    "num_drafts": 1,
    "max_ngram": 1,
    "blocks": 1,
    "pool_size": 0,
    "candidates": 0,
    "refinement_passes": 0,
}

_NUMBERS = ("generate_floor", "top_p", "temperature", "lr", "warmup")  # floats, some of them fractions

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
VARIANTS = CONF / "decoder_variants.yaml"
_STARTED = "DSPEC_STARTED"
_KEYLESS = {"recipe", "page", "real", "hardware", "hydra"}  # groups merged under other keys


def register() -> None:
    """Registers recipes/, conf/decoder_variants.yaml and the resolvers of conf/ with Hydra."""
    if not CONF.is_dir():
        raise UserError(f"no config folder at {CONF}: install dspec from a clone with pip install -e .")
    store_recipes(ROOT / "recipes")
    store_variants(VARIANTS, CONF / "decoder")
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("limit_or", _limit_or, replace=True)
    OmegaConf.register_new_resolver("choices", _choices, replace=True)


def _choices(*groups: str) -> str:
    """For --help: the choices of these groups, one group per line."""
    lines = (f"{group:<15} {', '.join(_choices_of(group))}" for group in groups)
    return "\n".join(textwrap.fill(line, 100, subsequent_indent=" " * 16) for line in lines)


def _choices_of(group: str) -> list[str]:
    if group == "recipe":
        return [path.stem for path in pages(ROOT / "recipes") if path.parent.name == "recipes"]
    found = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return [*found, *variants(VARIANTS)] if group == "decoder" else found


def _run_dir(resume: str | None, recipe: str | None) -> str:
    """The run folder: the resumed run's, or runs/<recipe>/<time>."""
    return resume or f"runs/{recipe or 'custom'}/{started()}"


def started() -> str:
    """When this run started, the same on all ranks: their shared run folder is named after it.

    Ranks that Lightning starts inherit it. Under torchrun rank 0 shares it through the agent's store; the tasks of a
    Slurm step use the step's id.
    """
    if _STARTED not in os.environ:
        os.environ[_STARTED] = _agreed(f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return os.environ[_STARTED]


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
    key = f"{_STARTED}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if os.environ["RANK"] == "0":
        store.set(key, local)
    return str(store.get(key).decode())


def _limit_or(default: int | None, *, _root_: DictConfig) -> Any:
    """How many prompts a benchmark uses: the run's limit for all benchmarks if set, else the benchmark's default."""
    limits = (OmegaConf.select(_root_, key) for key in ("limit", "evaluation.limit"))
    return next((limit for limit in limits if limit is not None), default)


def _keys(base: str) -> set[str]:
    """Top-level keys of conf/<base>.yaml and of the group-less configs in its defaults list."""
    found: set[str] = set()
    for key, value in (yaml.safe_load((CONF / f"{base}.yaml").read_text("utf-8")) or {}).items():
        if key != "defaults":
            found.add(key)
            continue
        for entry in value:
            if isinstance(entry, dict):
                found.add(next(iter(entry)).split()[-1].split("/")[0])
            elif entry != "_self_":
                found |= _keys(entry)
    return found


def known_keys(base: str) -> set[str]:
    """Top-level keys that a config composed from conf/<base>.yaml may have."""
    return _keys(base) - _KEYLESS


def check_keys(cfg: DictConfig, *, base: str) -> None:
    """Raises UserError for top-level keys that conf/<base>.yaml does not know (Hydra merges those silently)."""
    known = known_keys(base)
    if unknown := sorted(set(map(str, cfg)) - known - {"hydra"}):
        raise UserError(
            f"unknown key {', '.join(unknown)}{_nearest(unknown[0], known)}; the config has: {', '.join(sorted(known))}"
        )


def check_values(cfg: DictConfig) -> None:
    """Raises UserError for a value of the wrong type or range, going by its key's name (integers, temperatures)."""
    if cfg.get("seed", 0) is None:
        raise UserError("seed=null: a run needs an integer seed, such as seed=0")
    for path, value in _leaves(OmegaConf.to_container(cfg, resolve=False)):
        name = path.rpartition(".")[2]
        if isinstance(value, str) and "${" in value:
            continue  # the key it refers to is checked itself
        if path.startswith("search."):
            continue  # lists of such values
        if value == "???" and "." in path:
            raise UserError(f"{path} is not set: pass {path}=<value>")
        if name in _WHOLE or path in _WHOLE:
            _check_whole(path, name, value)
        elif path == "trainer.max_steps" and (type(value) is not int or value == 0 or value < -1):
            raise UserError(f"{path}={value} must be an integer of at least 1 (-1: run for trainer.max_epochs)")
        elif name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{path}={value} must be a number")
        elif path == "optimizer.warmup" and not 0 <= value <= 1:
            raise UserError(f"{path}={value} is a fraction of all steps: it must lie in [0, 1]")
        elif name == "top_p" and not 0 < value <= 1:
            raise UserError(f"{path}={value} must be above 0 and at most 1")
        elif name == "temperatures":
            _check_temperatures(path, value)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))


def _check_whole(path: str, name: str, value: Any) -> None:
    least = _WHOLE[name if name in _WHOLE else path]
    if name == "seed" and isinstance(value, int) and value >= 2**32:
        raise UserError(f"{path}={value} must be below 2**32")
    whole = isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
    # null: no sampling; no limit; of a diffusion LM's decoder: one block over the whole answer
    optional = name in ("seed", "limit") or (
        path.startswith("decoder.") and name == "block_size" and "jacobi" not in path
    )
    if not whole and not (value is None and optional):
        least_of = "" if least is None else f" of at least {least}"
        raise UserError(f"{path}={value} must be an integer{least_of}{' (null: all)' if name == 'limit' else ''}")


def _check_temperatures(path: str, value: Any) -> None:
    numbers = value if isinstance(value, list) else []
    if not numbers or any(isinstance(t, bool) or not isinstance(t, int | float) or t < 0 for t in numbers):
        example = f"[{value}]" if isinstance(value, int | float) else "[0.0,1.0]"
        raise UserError(f"{path}={value} must be a list of at least one temperature, 0 or above: {path}={example}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"{path}={value} has a duplicate temperature: list each once")


def _nearest(key: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def composed(base: str, overrides: Sequence[str]) -> DictConfig:
    """conf/<base>.yaml with `overrides`, for a program whose command line is not Hydra's."""
    register()
    check_arguments(overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            cfg = compose(base, overrides=list(overrides))
        except ConfigCompositionException as error:
            raise _mistyped(error, overrides, config=base) or error from error
    _check(cfg, base=base)
    return cfg


def _check(cfg: DictConfig, *, base: str) -> None:
    """Raises UserError for an invalid key or value."""
    config: Any = OmegaConf.to_container(cfg, resolve=False)
    check_config(dict(_leaves(config)))
    check_keys(cfg, base=base)
    _check_nulls(config)
    check_values(cfg)
    _check_method(config.get("method"))
    _check_decoders(config, base=base)


def _check_nulls(config: Any) -> None:
    """Raises UserError for a part that no run can do without, set to null."""
    needed = ("method", "data", "optimizer", "trainer", "evaluation", "callbacks", "report")
    if gone := [key for key in needed if key in config and config[key] is None]:
        raise UserError(f"{gone[0]}=null: a run needs it; leave it out to keep the default")
    if gone := [name for name, node in (config.get("decoder") or {}).items() if node is None]:
        raise UserError(f"decoder.{gone[0]}=null: use decoder=[...] with the names of those to run")


_PARTS = {"teacher": ("JacobiForcing",), "schedule": ("JacobiForcing",), "tuning": ("JacobiForcing", "ASARM")}


def _check_method(method: Any) -> None:
    """Raises UserError for parts (method/<part>=...) that the chosen one of our methods does not have."""
    if not isinstance(method, dict) or not str(method.get("_target_")).startswith("dspec.methods."):
        return
    name = str(method["_target_"]).rpartition(".")[2]
    for part, owners in _PARTS.items():
        if part in method and name not in owners:
            recipes = "recipe=jacobi_forcing or recipe=cllm" + (" or recipe=as_arm" if "ASARM" in owners else "")
            raise UserError(f"{name} has no method/{part}: use {recipes}")


def _check_decoders(config: Any, *, base: str) -> None:
    """Raises UserError for decoders without their drafter, their baseline, or the decoder whose settings they copy."""
    decoders = config.get("decoder") or {}
    other = (".any_subset", ".assd", ".diffusion", ".confidence_threshold", ".d2f", ".lopa")  # baselines of their own
    unlike_ar = all(str(node.get("_target_")).endswith(other) for node in decoders.values())
    if base == "train" and not unlike_ar and "autoregressive" not in decoders:
        names = ",".join(decoders)
        raise UserError(f"speeds are measured against plain AR: use decoder=[autoregressive,{names}]")
    drafting = [n for n, node in decoders.items() if str(node.get("_target_")).endswith(".speculative")]
    source = {"train": "draft", "eval": "checkpoint"}.get(base)  # eval.speed leaves such decoders out
    if source and drafting and config.get(source) is None:
        fix = "set checkpoint=<run folder>" if source == "checkpoint" else "use recipe=dspark or recipe=dflash"
        raise UserError(f"decoder={drafting[0]} needs a drafter: {fix}, or choose another decoder")
    for path, value in _leaves(decoders):
        follows = re.fullmatch(r"\$\{decoder\.(\w+)\.\w+\}", str(value))
        if follows and follows[1] not in decoders:
            name = path.partition(".")[0]
            raise UserError(f"{name} copies the settings of {follows[1]}: use decoder=[...,{name},{follows[1]}]")


def instantiate(node: Any, **kwargs: Any) -> Any:
    """Hydra's instantiate with one-line errors: the UserError inside, or the argument that does not fit."""
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


def instantiate_decoders(cfg: DictConfig) -> dict[str, Any]:
    """The decoders in `cfg.decoder`. Those of the base model (`cfg.target`) share one copy, loaded on first use."""
    base = functools.cache(lambda: instantiate(cfg.target))
    return {str(name): instantiate(node, base=base) for name, node in cfg.decoder.items()}


def _one_line(error: BaseException) -> str:
    """The error's message without line breaks and without Hydra's list of searched folders."""
    text = str(error).partition("Config search path:")[0].replace("\n\t", ", ").replace(":,", ":")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
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


def _key(override: str) -> str:
    """What an override sets: `seed` of "seed=1", `target` of "+target=tiny"."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


_WITH_VALUE = {*"--config-path -cp --config-name -cn --config-dir -cd --cfg -c --package -p --info -i".split()}


def _resumed(args: Sequence[str], *, config: str) -> list[str]:
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
    if not (folder / ".hydra" / "overrides.yaml").is_file():
        return list(args)
    started_as = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text("utf-8"))["hydra"]["job"]["config_name"]
    if started_as != config:
        raise UserError(f"{folder} is a run of conf/{started_as}.yaml: it cannot be resumed under conf/{config}.yaml")
    stored = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text("utf-8")) or []
    overridden = {_key(arg) for arg in args}
    return _options_first([*args, *(old for old in stored if _key(old) not in overridden), "hydra.output_subdir=null"])


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
    command = [override for override in run.overrides.task if _key(override) != "resume"]
    hydra_cfg = OmegaConf.create({"hydra": run})
    parts = {"overrides": OmegaConf.create(command), "config": cfg, "hydra": hydra_cfg}
    for name, part in parts.items():
        with atomic_file(folder / f"{name}.yaml") as scratch:
            OmegaConf.save(part, scratch)


def _mistyped(error: ConfigCompositionException, args: Sequence[str], *, config: str) -> UserError | None:
    """For an unknown key Hydra advises to append it; we name the nearest key that exists."""
    found = re.search(r"Could not override '([^']+)'", str(error))
    if found is None:
        return None
    if gone := gone_group(found[1]):
        return UserError(gone)
    path, _, name = found[1].rpartition(".")
    rest = [a for a in args if not a.startswith("-") and _key(a) != found[1]]
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            node = (
                OmegaConf.select(compose(config, overrides=rest), path) if path else dict.fromkeys(known_keys(config))
            )
    except (HydraException, OmegaConfBaseException):
        return None
    known = [str(key) for key in node] if isinstance(node, DictConfig | dict) else []
    match = difflib.get_close_matches(name, known, n=1)
    prefix = f"{path}." if path else ""
    if match:
        return UserError(f"unknown key {found[1]}: did you mean {prefix}{match[0]}?")
    valid = ", ".join(prefix + key for key in sorted(known))
    return UserError(f"unknown key {found[1]}; valid keys: {valid}") if known else None


def entry_point(*, config: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Decorates a task function as a Hydra app on conf/<config>.yaml; user errors end it with exit code 2.

    Keys and values are checked before the task runs: a task that imports torch itself reports mistakes immediately.
    """

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> None:
            # a sweep continues with its other jobs: Hydra raises the error at the end
            with nullcontext() if HydraConfig.get().mode == RunMode.MULTIRUN else one_line_errors():
                _check(cfg, base=config)
                task(cfg)

        @functools.wraps(task)
        def main() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra lets exceptions through to the handler below
            warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
            if "LOCAL_RANK" not in os.environ:  # a rank belongs to the run that started it
                os.environ.pop(_STARTED, None)
            with one_line_errors():
                register()
                args = _resumed(sys.argv[1:], config=config)
                check_arguments(args)
                sys.argv = [sys.argv[0], *args]
                try:
                    hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(guarded)()
                except ConfigCompositionException as error:
                    raise _mistyped(error, args, config=config) or error from error

        return main

    return decorate
