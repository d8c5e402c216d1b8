"""Composing and running a config: recipes as a Hydra group, entry points, one-line errors with exit code 2.

Checks are in dspec/config/checks.py and dspec/config/types.py, run folders in dspec/config/run_folder.py.
"""

import difflib
import functools
import logging
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dspec.config.checks import check, known_keys
from dspec.config.old_names import check_arguments, gone_group
from dspec.config.recipes import CONF, ROOT, SCALES, VARIANTS, has_pretrained, pages, register_groups, variants
from dspec.config.run_folder import STARTED, override_key, resumed, run_dir
from dspec.config.types import check_types
from dspec.errors import UserError

# a page's own numbers are for these
_EMBEDDED_TARGETS = ("tiny", "tiny_as_arm", "tiny_diffusion", "tiny_fresh", "xlnet_tiny")

log = logging.getLogger(__name__)


def register() -> None:
    """Registers recipes/, conf/decoder_variants.yaml and the resolvers of conf/ with Hydra."""
    if not CONF.is_dir():
        raise UserError(f"no config folder at {CONF}: install dspec from a clone with pip install -e .")
    register_groups()
    OmegaConf.register_new_resolver("run_dir", run_dir, replace=True)
    OmegaConf.register_new_resolver("limit_or", _limit_or, replace=True)
    OmegaConf.register_new_resolver("precision_of_target", _precision_of_target, replace=True)
    OmegaConf.register_new_resolver("choices", _choices, replace=True)


def _choices(*groups: str) -> str:
    """For --help: the choices of these groups, one group per line."""
    lines = (f"{group:<15} {', '.join(_choices_of(group))}" for group in groups)
    return "\n".join(textwrap.fill(line, 100, subsequent_indent=" " * 16) for line in lines)


def _choices_of(group: str) -> list[str]:
    if group == "scale":
        return list(SCALES)
    if group == "recipe":
        return [path.stem for path in pages(ROOT / "recipes") if path.parent.name == "recipes"]
    found = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return [*found, *variants(VARIANTS)] if group == "decoder" else found


def _limit_or(default: int | None, *, _root_: DictConfig) -> Any:
    """How many prompts a benchmark uses: the run's limit for all benchmarks if set, else the benchmark's default."""
    limits = (OmegaConf.select(_root_, key) for key in ("limit", "evaluation.limit"))
    return next((limit for limit in limits if limit is not None), default)


def _precision_of_target(*, _root_: DictConfig) -> str:
    """The trainer's precision that fits the target's dtype: float32 weights need no autocast, others do."""
    return "32-true" if OmegaConf.select(_root_, "target.dtype") == "float32" else "bf16-mixed"


def composed(config: str, overrides: Sequence[str]) -> DictConfig:
    """conf/<config>.yaml with `overrides`, for a program whose command line is not Hydra's."""
    register()
    check_arguments(overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            cfg = compose(config, overrides=list(overrides))
        except ConfigCompositionException as error:
            raise _mistyped(error, overrides, config=config) or error from error
    check(cfg, config=config)
    return cfg


def instantiate(node: Any, **kwargs: Any) -> Any:
    """Hydra's instantiate, after a check of types, with one-line errors: the UserError inside, or the argument that
    does not fit."""
    if isinstance(node, DictConfig):
        check_types(node)
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


def check_decoders(specs: Mapping[str, Any], *, drafter: bool, without: str) -> None:
    """Raises UserError for decoders without their drafter (`without` tells how to get one) or their baseline, before a
    model is loaded."""
    for name, spec in specs.items():
        if spec is None:
            raise UserError(f"decoder={name}: its _target_ gives no decoder")
        if spec.needs_draft and not drafter:
            raise UserError(f"decoder={name} needs a drafter: {without}, or choose another decoder")
        if spec.baseline not in specs:
            names = ",".join([spec.baseline, *specs])
            raise UserError(f"{name} is measured against {spec.baseline}: use decoder=[{names}]")


def _check_scale(cfg: DictConfig) -> None:
    """Raises UserError if the page lacks the numbers for pretrained targets; says so if such a target runs without."""
    chosen = HydraConfig.get().runtime.choices
    page, target = str(chosen["page"]), str(chosen["target"])
    if chosen["scale"] == "pretrained" and (ROOT / "recipes" / f"{page}.yaml").is_file() and not has_pretrained(page):
        raise UserError(
            f"recipes/{page}.yaml has no numbers for pretrained targets: leave out scale=pretrained, or data=gsm8k or "
            "data=jsonl, which choose it"
        )
    if chosen["scale"] == "embedded" and target not in _EMBEDDED_TARGETS and has_pretrained(page):
        log.info("target=%s runs with the embedded target's numbers; for a pretrained one's: scale=pretrained", target)


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


def _mistyped(error: ConfigCompositionException, args: Sequence[str], *, config: str) -> UserError | None:
    """For an unknown key Hydra advises to append it; we name the nearest key that exists."""
    found = re.search(r"Could not override '([^']+)'", str(error))
    if found is None:
        return None
    if gone := gone_group(found[1]):
        return UserError(gone)
    path, _, name = found[1].rpartition(".")
    rest = [a for a in args if not a.startswith("-") and override_key(a) != found[1]]
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
                check(cfg, config=config)
                if config == "train":
                    _check_scale(cfg)
                task(cfg)

        @functools.wraps(task)
        def main() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra lets exceptions through to the handler below
            warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
            if "LOCAL_RANK" not in os.environ:  # a rank belongs to the run that started it
                os.environ.pop(STARTED, None)
            with one_line_errors():
                register()
                args = resumed(sys.argv[1:], config=config)
                check_arguments(args)
                sys.argv = [sys.argv[0], *args]
                try:
                    hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(guarded)()
                except ConfigCompositionException as error:
                    raise _mistyped(error, args, config=config) or error from error

        return main

    return decorate
