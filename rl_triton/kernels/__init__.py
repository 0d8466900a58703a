"""The Triton side: imported lazily, so that the library works where Triton is missing."""

from __future__ import annotations

import torch

try:
    from .launch import Plan, interpreted
except (ImportError, AttributeError):
    # No Triton, or one too old for the kernels: the doctor says which.
    interpreted, Plan = False, None


def serves(device: torch.device | None) -> bool:
    """Whether calls with tensors on this device run on Triton kernels."""
    if Plan is None or device is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and interpreted)
