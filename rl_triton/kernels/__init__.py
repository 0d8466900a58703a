"""The Triton side: imported lazily, so that the library works where Triton is missing."""

from __future__ import annotations

import torch

try:
    from .launch import interpreted, launch
except ImportError:
    interpreted, launch = False, None


def serves(device: torch.device | None) -> bool:
    """Whether calls with tensors on this device run on Triton kernels."""
    if launch is None or device is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and interpreted)
