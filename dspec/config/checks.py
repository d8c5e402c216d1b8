"""Checks of a composed config that import nothing heavy: keys, missing parts, ranges. Types: dspec/config/types.py."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from dspec.config.leaves import flat
from dspec.config.old_names import check_config
from dspec.config.recipes import CONF
from dspec.errors import UserError

_KEYLESS = {"recipe", "page", "page_scale", "scale", "hardware", "hydra"}  # groups merged under other keys

_PARTS = ("method", "data", "optimizer", "trainer", "evaluation", "callbacks", "report")  # of a training run

# Minima of integers, by a leaf's name or path: refused before torch is imported.
_LEAST = {
    "count": 1,
    "batch_size": 1,
    "max_new_tokens": 1,
    "evaluation.warmup": 0,
    "evaluation.generate_prompts": 0,
    "data.validation": 0,
    "data.window": 1,
    "accumulate_grad_batches": 1,
    "num_anchors": 1,
    "block_size": 1,
    "num_layers": 1,
    "row_length": 1,
    "folds": 1,
    "bins": 1,
    "num_drafts": 1,
    "num_orders": 1,
    "max_ngram": 1,
    "blocks": 1,
    "pool_size": 0,
    "candidates": 0,
    "refinement_passes": 0,
    "tokens_per_step": 1,
    "branches": 0,
    "segment": 1,
}
_RATIOS = ("append_ratio", "activate_ratio", "threshold")
OF_DIFFUSION = tuple(f"eval.decoders.{name}" for name in ("diffusion", "fast_dllm", "d2f", "lopa"))


def check(cfg: DictConfig, *, config: str) -> None:
    """Raises UserError for a config of conf/<config>.yaml with an invalid key, part or value."""
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    leaves = flat(values)
    check_config(leaves)
    _check_keys(values, config=config)
    _check_nulls(values, train=config == "train")
    _check_plain_values(values)
    for path, value in leaves.items():
        if value == "???" and "." in path:
            raise UserError(f"{path} is not set: pass {path}=<value>")
        if not path.startswith("search."):  # lists of such values
            _check_range(path, value)
    _check_copies(values.get("decoder") or {})
    if config == "train":
        _check_one_process(values.get("decoder") or {})
        _check_tuning(values["method"])
    if not cfg.get("checkpoint"):  # its run may say which blocks the decoders have
        check_blocks(cfg)


def known_keys(config: str) -> set[str]:
    """Top-level keys that a config composed from conf/<config>.yaml may have."""
    return _keys(config) - _KEYLESS


def _keys(config: str) -> set[str]:
    """Top-level keys of conf/<config>.yaml and of the group-less configs in its defaults list."""
    found: set[str] = set()
    for key, value in (yaml.safe_load((CONF / f"{config}.yaml").read_text("utf-8")) or {}).items():
        if key != "defaults":
            found.add(key)
            continue
        for entry in value:
            if isinstance(entry, dict):
                found.add(next(iter(entry)).split()[-1].split("/")[0])
            elif entry != "_self_":
                found |= _keys(entry)
    return found


def _check_keys(values: Mapping[str, Any], *, config: str) -> None:
    """Raises UserError for top-level keys that conf/<config>.yaml does not know (Hydra merges those silently)."""
    known = known_keys(config)
    if unknown := sorted(set(map(str, values)) - known - {"hydra"}):
        raise UserError(
            f"unknown key {', '.join(unknown)}{_nearest(unknown[0], known)}; the config has: {', '.join(sorted(known))}"
        )


def _nearest(key: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _check_nulls(values: Any, *, train: bool) -> None:
    """Raises UserError for a part that no run can do without, set to null or, in training, taken away."""
    needed = ("target", *_PARTS, "policy", "judge", "speed", "search", "profile", "serving", "study")
    if gone := [key for key in needed if key in values and values[key] is None and (key != "target" or train)]:
        raise UserError(f"{gone[0]}=null: a run needs it; leave it out to keep the default")
    if gone := [key for key in ("target", "decoder", "benchmark", *_PARTS) if train and key not in values]:
        raise UserError(f"the config has no {gone[0]}: a run needs it; leave out what took it away (~{gone[0]}, or [])")
    for name, node in (values.get("benchmark") or {}).items():
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise UserError(f"benchmark.{name} is no benchmark of this run: choose it too, or leave its keys out")
    if gone := [name for name, node in (values.get("decoder") or {}).items() if node is None]:
        raise UserError(f"decoder.{gone[0]}=null: use decoder=[...] with the names of those to run")


def _check_plain_values(values: Any) -> None:
    """Raises UserError for values that are no parameter of any constructor, and so have no annotation. Interpolations
    are checked where they are used."""
    plain = {path: values[path] for path in ("seed", "limit", "label", "checkpoint") if path in values}
    plain |= {f"optimizer.{key}": value for key, value in (values.get("optimizer") or {}).items()}
    for path, value in plain.items():
        if isinstance(value, str) and "${" in value:
            continue
        if path == "seed":
            if value is None:
                raise UserError("seed=null: a run needs an integer seed, such as seed=0")
            _check_least(path, value, 0)
        elif path == "limit" and value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{path}={value} must be an integer of at least 1 (null: all)")
        elif path in ("label", "checkpoint") and value is not None and not isinstance(value, str):
            raise UserError(f"{path}={value} must be a string: quote it, '{path}=\"{value}\"'")
        elif path == "optimizer.cycles":
            _check_least(path, value, 1)
        elif path == "optimizer.warmup" and not (_is_number(value) and 0 <= value <= 1):
            raise UserError(f"{path}={value} is a fraction of all steps: it must be a number in [0, 1]")


def _check_range(path: str, value: Any) -> None:
    """Raises UserError for a number out of range; another type is left to the constructor's annotation."""
    name = path.rpartition(".")[2]
    if name == "seed" and _is_number(value):
        _check_least(path, value, 0)
        if value >= 2**32:
            raise UserError(f"{path}={value} must be below 2**32")
    elif name == "limit" and _is_number(value) and value < 1:
        raise UserError(f"{path}={value} must be an integer of at least 1 (null: all)")
    elif (name in _LEAST or path in _LEAST) and _is_number(value):
        _check_least(path, value, _LEAST[name if name in _LEAST else path])
    elif path == "trainer.max_steps" and _is_number(value) and (value == 0 or value < -1):
        raise UserError(f"{path}={value} must be an integer of at least 1 (-1: run for trainer.max_epochs)")
    elif name == "top_p" and _is_number(value) and not 0 < value <= 1:
        raise UserError(f"{path}={value} must be above 0 and at most 1")
    elif name in _RATIOS and _is_number(value) and not 0 <= value <= 1:
        raise UserError(f"{path}={value} is a ratio or a probability: it must lie in [0, 1]")
    elif name == "temperatures" and not (isinstance(value, str) and "${" in value):
        _check_temperatures(path, value)


def _check_least(path: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise UserError(f"{path}={value} must be an integer of at least {least}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _check_temperatures(path: str, value: Any) -> None:
    numbers = value if isinstance(value, list) else []
    if not numbers or not all(_is_number(t) and t >= 0 for t in numbers):
        example = f"[{value}]" if isinstance(value, int | float) else "[0.0,1.0]"
        raise UserError(f"{path}={value} must be a list of at least one temperature, 0 or above: {path}={example}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"{path}={value} has a duplicate temperature: list each once")


def _check_copies(decoders: Mapping[str, Any]) -> None:
    """Raises UserError for a decoder without the one whose settings it copies."""
    for path, value in flat(dict(decoders)).items():
        copied = re.fullmatch(r"\$\{decoder\.(\w+)\.\w+\}", str(value))
        if copied and copied[1] not in decoders:
            name = path.partition(".")[0]
            raise UserError(f"{name} copies the settings of {copied[1]}: use decoder=[...,{name},{copied[1]}]")


def _check_one_process(decoders: Mapping[str, Any]) -> None:
    """Raises UserError for a decoder that would wait for other ranks: a training run evaluates in the first one."""
    for name, node in decoders.items():
        if (seconds := node.get("process_timeout_s")) is not None:
            raise UserError(
                f"decoder.{name}.process_timeout_s={seconds}: a training run decodes in one process; divide branches "
                "afterwards: torchrun ... -m eval.run checkpoint=<run folder>"
            )


def _check_tuning(method: Mapping[str, Any]) -> None:
    """Raises UserError for D2F with method/tuning=full, whose constructor would complain of the page's keys."""
    tuning = method.get("tuning")
    chosen = tuning.get("_target_") if isinstance(tuning, Mapping) else tuning
    if method.get("_target_") == "dspec.methods.d2f.D2F" and chosen in (None, "dspec.tuning.FullFineTuning"):
        raise UserError(
            "recipe=d2f needs method/tuning=lora: its teacher is the model without the adapters, which full "
            "fine-tuning does not have"
        )


def check_blocks(cfg: DictConfig) -> None:
    """Raises UserError for a decoder of diffusion LMs whose blocks are larger than an answer may be. Values are
    resolved: a training run's decoders refer to its blocks."""
    budgets = {
        f"benchmark.{name}.max_new_tokens": size
        for name in cfg.get("benchmark") or {}
        if _is_number(size := OmegaConf.select(cfg, f"benchmark.{name}.max_new_tokens"))
    }
    for name, node in (cfg.get("decoder") or {}).items():
        size = OmegaConf.select(cfg, f"decoder.{name}.block_size")
        if node.get("_target_") not in OF_DIFFUSION or not _is_number(size):
            continue
        if small := [path for path in budgets if budgets[path] < size]:
            raise UserError(
                f"decoder.{name}.block_size={size} is larger than {small[0]}={budgets[small[0]]}: lower it, or set it "
                "to null (one block over the whole answer)"
            )
