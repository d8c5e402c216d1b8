"""Devices: which one a name means in this process, and whether it can compute."""

import os
import subprocess
import sys
from functools import cache

import torch

from dspec.errors import UserError

_BF16_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


@cache
def check_bfloat16() -> None:
    """Raises UserError if a bfloat16 matmul crashes the process (CPUs that report AMX but may not use it)."""
    if subprocess.run([sys.executable, "-c", _BF16_PRODUCT], stderr=subprocess.DEVNULL).returncode < 0:
        raise UserError(
            "bfloat16 crashes on this CPU (illegal instruction in oneDNN): set the environment variable "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or use target.dtype=float32 trainer.precision=32-true"
        )


def local_device(device: str) -> str:
    """`device`, with "cuda" replaced by this process's own GPU: by its local rank among those that it sees (schedulers
    may make only one GPU visible to each process).

    Raises UserError for a device that torch does not know or cannot use here.
    """
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        named = "null" if device is None else device
        raise UserError(f"target.device={named} is unknown to torch: use cpu, cuda or cuda:<number>") from error
    if asked.type != "cuda":
        return _usable(device)
    if not torch.cuda.is_available():
        raise UserError(f"target.device={device}: torch sees no CUDA GPU here; use target.device=cpu")
    count = torch.cuda.device_count()
    if asked.index is None:
        rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        return f"cuda:{int(rank) % count}"
    if asked.index >= count:
        raise UserError(
            f"target.device={device}: torch sees {count} GPU(s) here, numbered from 0; use target.device=cuda"
        )
    return device


def _usable(device: str) -> str:
    """`device` if a tensor can be made and read there; torch says only then what it was built for."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"target.device={device}: torch cannot use it here; use cpu, cuda or cuda:<number>") from error
    return device
