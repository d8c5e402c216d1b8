"""The widest floating-point type that a device has."""

import torch


def widest(device: torch.device) -> torch.dtype:
    """float64 where it exists; Apple's GPUs (mps) have float32 at most."""
    return torch.float32 if device.type == "mps" else torch.float64
