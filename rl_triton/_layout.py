"""Shapes, dtypes and every error message: what a call's metadata says before any data is touched.

All functions take their inputs as one NamedTuple whose field names carry the role:
per-step tensors share a rank and broadcast, flags may have any dtype, edges lack the time axis,
coefficients are numbers or tensors.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLAGS = frozenset({"terminateds", "truncateds", "dones", "valid"})
EDGES = frozenset({"last_value", "seed_values", "init"})
COEFFICIENTS = frozenset({"gamma", "lambda_"})
PER_ACTION = frozenset({"action_probs_target", "next_q_values_all", "next_action_probs_target"})
ACTIONS = frozenset({"actions"})
MAY_BE_INTEGER = frozenset({"rewards", "gradients", "inputs", "seed_values"})
OPTIONAL = (
    frozenset(
        {"truncateds", "valid", "values", "next_values", "bootstrap_values", "next_action_probs_target"}
    )
    | EDGES
)

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Layout(NamedTuple):
    """What all inputs of a call agree on."""

    shape: tuple[int, ...]
    time_dim: int
    dtype: torch.dtype
    compute: torch.dtype

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.shape[: self.time_dim] + self.shape[self.time_dim + 1 :]


def check_bound(name: str, value: float) -> float:
    """A clipping bound: a number, not negative (infinity switches the clip off)."""
    # Asking for `Real` costs a microsecond.
    if type(value) is not float and not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not value >= 0:
        raise ValueError(f"{name} must be a number >= 0, got {value}")
    return float(value)


def resolve(x: NamedTuple, time_dim: int) -> Layout:
    """Check the inputs of one call against each other, from metadata alone."""
    fields = x._asdict()
    first = x._fields[0]
    lead = fields[first]
    _check_tensor(first, lead)
    rank = lead.dim() - (first in PER_ACTION)
    if rank < 1:
        raise ValueError(f"{first} must have a time axis, got shape {_size(lead)}")
    if not isinstance(time_dim, int) or isinstance(time_dim, bool):
        raise TypeError(f"time_dim must be an int, got {type(time_dim).__name__}")
    if not -rank <= time_dim < rank:
        raise ValueError(
            f"time_dim must be in [{-rank}, {rank - 1}] for inputs of rank {rank}, got {time_dim}"
        )
    time_dim %= rank

    shape = [1] * rank
    floating: list[torch.dtype] = []
    for name, value in fields.items():
        if name in COEFFICIENTS:
            continue
        if value is None:
            if name in OPTIONAL:
                continue
            raise TypeError(f"{name} must be a torch.Tensor, got None")
        _check_tensor(name, value)
        if value.device != lead.device:
            raise ValueError(f"{name} must be on {lead.device} like {first}, got {value.device}")
        _check_dtype(name, value, floating)
        if name not in EDGES:
            _check_step(name, value, shape, rank, first)

    actions = None
    for name, value in fields.items():
        if name in COEFFICIENTS:
            _check_coefficient(name, value, shape, lead)
        elif value is None:
            continue
        elif name in EDGES:
            _check_edge(name, value, shape, time_dim)
        elif name in PER_ACTION:
            if value.shape[-1] == 0:
                raise ValueError(
                    f"{name} must have at least one action on its last axis, got shape {_size(value)}"
                )
            if actions is not None and value.shape[-1] != actions[1]:
                raise ValueError(
                    f"{name} must have {actions[1]} actions on its last axis like {actions[0]}, "
                    f"got {value.shape[-1]}"
                )
            actions = (name, value.shape[-1])

    dtype = torch.get_default_dtype()
    if floating:
        dtype = floating[0]
        for other in floating[1:]:
            dtype = torch.promote_types(dtype, other)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return Layout(tuple(shape), time_dim, dtype, compute)


def time_first(name: str, value: Any, layout: Layout) -> Any:
    """An input as the formulas read it: time on axis 0, expanded, in the compute dtype."""
    if not isinstance(value, Tensor):
        return value
    if name in FLAGS:
        value = value if value.dtype == torch.bool else value != 0
    elif name in ACTIONS:
        value = value.long()
    elif value.dtype != layout.compute:
        value = value.to(layout.compute)
    if name in EDGES:
        if value.dim() == len(layout.shape):
            value = value.squeeze(layout.time_dim)
        return value.expand(layout.batch_shape)
    if name in COEFFICIENTS and value.dim() == 0:
        return value
    shape = layout.shape + value.shape[-1:] if name in PER_ACTION else layout.shape
    if value.shape != shape:
        value = value.expand(shape)
    return value.movedim(layout.time_dim, 0) if layout.time_dim else value


def _size(value: Tensor) -> str:
    return str(list(value.shape))


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {value.layout}")


def _check_dtype(name: str, value: Tensor, floating: list[torch.dtype]) -> None:
    dtype = value.dtype
    if name in FLAGS:
        if dtype.is_complex:
            raise TypeError(f"{name} must be flags of a real dtype, got {dtype}")
    elif name in ACTIONS:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    elif dtype in FLOATS:
        floating.append(dtype)
    elif name not in MAY_BE_INTEGER or dtype.is_floating_point or dtype.is_complex:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {dtype}")


def _check_step(name: str, value: Tensor, shape: list[int], rank: int, first: str) -> None:
    """Broadcast one per-step input into `shape`, in place."""
    size = value.shape[:-1] if name in PER_ACTION else value.shape
    if value.dim() != rank + (name in PER_ACTION):
        axes = f"{rank} axes and a last one for the actions" if name in PER_ACTION else f"{rank} axes"
        raise ValueError(f"{name} must have {axes} to match {first}, got shape {_size(value)}")
    for axis in range(rank):
        if shape[axis] == 1:
            shape[axis] = size[axis]
        elif size[axis] != 1 and size[axis] != shape[axis]:
            raise ValueError(f"{name} must broadcast to shape {list(shape)}, got shape {_size(value)}")


def _check_edge(name: str, value: Tensor, shape: list[int], time_dim: int) -> None:
    size = list(value.shape)
    batch = shape[:time_dim] + shape[time_dim + 1 :]
    if len(size) == len(shape):
        if size[time_dim] != 1:
            raise ValueError(
                f"{name} must have shape {batch}, or a time axis of size 1 at axis {time_dim}, "
                f"got shape {size}"
            )
        size = size[:time_dim] + size[time_dim + 1 :]
    if len(size) != len(batch) or any(s not in (1, b) for s, b in zip(size, batch)):
        raise ValueError(
            f"{name} must have shape {batch} (the inputs' without time), got shape {_size(value)}"
        )


def _check_coefficient(name: str, value: Any, shape: list[int], lead: Tensor) -> None:
    if not isinstance(value, Tensor):
        if not isinstance(value, Real):
            got = "None" if value is None else type(value).__name__
            raise TypeError(f"{name} must be a number or a torch.Tensor, got {got}")
        return
    if value.dtype not in FLOATS:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {value.dtype}")
    if value.device != lead.device:
        raise ValueError(f"{name} must be on {lead.device} like the other inputs, got {value.device}")
    if value.dim() == 0:
        return
    if value.dim() != len(shape) or any(s not in (1, n) for s, n in zip(value.shape, shape)):
        raise ValueError(
            f"{name} must be a number, a 0-d tensor or broadcast to shape {list(shape)} with as many axes, "
            f"got shape {_size(value)}"
        )
