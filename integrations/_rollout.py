"""What the `[T, N]` helpers share: checks that name the caller's arguments, and the shift by one row."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_rollout(rewards: Any, per_step: dict[str, Any], per_env: dict[str, Any], gae_lambda: Any) -> None:
    """Raise unless every per-step tensor is shaped like `rewards` and every per-env one like a row of it.

    `values`, `next_value` and `final_values` must be floating; flags may have any dtype.
    """
    _check_tensor("rewards", rewards, rewards)
    if rewards.dim() < 1:
        raise ValueError("rewards must have shape [T, N], got a 0-d tensor")
    shape, row = list(rewards.shape), list(rewards.shape[1:])
    for name, value in per_step.items():
        _check_tensor(name, value, rewards)
        if list(value.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} like rewards, got {list(value.shape)}")
    for name, value in per_env.items():
        _check_tensor(name, value, rewards)
        if list(value.shape) not in (row, [1, *row]):
            raise ValueError(f"{name} must have shape {row} or {[1, *row]}, got {list(value.shape)}")
    if not isinstance(gae_lambda, (Real, Tensor)):
        raise TypeError(f"gae_lambda must be a number or a torch.Tensor, got {type(gae_lambda).__name__}")


def shift(steps: Tensor, edge: Tensor) -> Tensor:
    """Row t of the result is row t+1 of `steps`, its last row is `edge`."""
    rows = torch.cat([steps[1:], edge.reshape(1, *steps.shape[1:])])
    # An empty window has no last row either.
    return rows[: steps.shape[0]]


def _check_tensor(name: str, value: Any, rewards: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.device != rewards.device:
        raise ValueError(f"{name} must be on {rewards.device} like rewards, got {value.device}")
    if name.endswith(("value", "values")) and not value.is_floating_point():
        raise TypeError(f"{name} must have a floating dtype, got {value.dtype}")
