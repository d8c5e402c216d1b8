"""What a result needs to be reproducible: code, versions, machine, settings."""

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

_PACKAGES = ("dspec", "torch", "transformers", "lightning", "hydra-core", "datasets", "numpy")


def _git(*args: str) -> str | None:
    root = Path(__file__).resolve().parent
    try:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # not a clone, or no git


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def fingerprint(module: nn.Module) -> str:
    """A digest of a module's weights, their names, dtypes and shapes: what its responses and samples depend on.

    It hashes the bytes tensor by tensor, so it is the same on every device and with any number of threads.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(memoryview(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]


def provenance(*, seed: int, dtype: str, config: dict[str, Any], prompt_policy: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready; the same on every run of the same code, config and machine."""
    status = _git("status", "--porcelain")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "git": {"sha": _git("rev-parse", "HEAD"), "dirty": bool(status) if status is not None else None},
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "gpu": gpu, "platform": platform.system()},
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "seed": seed,
        "prompt_policy": prompt_policy,
        "config": config,
    }
