"""The Triton side: imported lazily, so that the library works where Triton is missing."""

from __future__ import annotations

from typing import Any

import torch

try:
    from .launch import interpreted, launch
except ImportError:
    _available = False
else:
    _available = True


def output_count(algorithm: str, options: tuple[Any, ...] | list[int]) -> int:
    """How many tensors an algorithm returns."""
    if algorithm == "gae":
        return 1 + bool(options[0])
    return 2 if algorithm in ("vtrace", "retrace", "retrace_log") else 1


def serves(device: torch.device | None) -> bool:
    """Whether calls with tensors on this device run on Triton kernels."""
    if not _available or device is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and interpreted)
