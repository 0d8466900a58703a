"""Which path a call takes, and the two operators that torch.compile and autograd see.

`rl_triton::fused` is a whole algorithm in one kernel launch, without gradients. `rl_triton::affine_scan` is the
bare scan with its adjoint: with gradients a call runs formulas -> scan -> formulas, and only the
scan needs a rule of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import kernels
from ._algorithms import AFFINE, ALGORITHMS, Algorithm
from ._layout import resolve, time_first
from .scan import blocked_scan

kernel_serves = kernels.serves


def run(
    algorithm: Algorithm,
    x: Any,
    time_dim: int,
    scalars: tuple[float, ...] = (),
    options: tuple[Any, ...] = (),
) -> tuple[Tensor, ...]:
    """Run an algorithm on the path that fits: kernel, operator under torch.compile, or formulas."""
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in x):
        return formulas(algorithm, x, time_dim, scalars, options)
    if torch.compiler.is_compiling():
        tensors = [value if isinstance(value, Tensor) else None for value in x]
        numbers = [float(value) for value in x if value is not None and not isinstance(value, Tensor)]
        return tuple(
            torch.ops.rl_triton.fused(
                algorithm.name, tensors, numbers, list(scalars), [int(option) for option in options], time_dim
            )
        )
    if kernel_serves(getattr(x[0], "device", None)) and torch._C._functorch.peek_interpreter_stack() is None:
        return kernels.launch(algorithm, x, time_dim, scalars, options)
    return formulas(algorithm, x, time_dim, scalars, options)


def formulas(
    algorithm: Algorithm, x: Any, time_dim: int, scalars: tuple[float, ...], options: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """The algorithm in plain PyTorch around one scan; differentiable."""
    layout = resolve(x, time_dim)
    steps = x._make(time_first(name, value, layout) for name, value in zip(x._fields, x))
    scan = algorithm.stage(steps, scalars, options)
    y = torch.ops.rl_triton.affine_scan(scan.a, scan.b, scan.init, scan.reverse)
    return tuple(
        output.movedim(0, layout.time_dim)
        .to(layout.dtype, memory_format=torch.contiguous_format)
        .contiguous()
        for output in scan.outputs(y)
    )


_library = torch.library.Library("rl_triton", "DEF")
_library.define("affine_scan(Tensor a, Tensor b, Tensor? init, bool reverse) -> Tensor")
_library.define(
    "fused(str algorithm, Tensor?[] inputs, float[] numbers, float[] scalars, int[] options, int time_dim) "
    "-> Tensor[]"
)


def _scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    if a.numel() == 0:
        return torch.empty_like(a, memory_format=torch.contiguous_format)
    if kernel_serves(a.device):
        return kernels.launch(AFFINE, AFFINE.inputs(a, b, init), 0, (), (reverse,))[0]
    return blocked_scan(a, b, init, reverse)


def _scan_fake(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    return a.new_empty(a.shape)


def _scan_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, b, init, ctx.reverse = inputs
    ctx.save_for_backward(b, init, output)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    b, init, y = ctx.saved_tensors
    reverse = ctx.reverse
    zero = torch.zeros_like(b[:1])
    b_shifted = torch.cat([zero, b[:-1]] if reverse else [b[1:], zero])
    g = torch.ops.rl_triton.affine_scan(grad, b_shifted, None, not reverse)
    edge = zero if init is None else init.unsqueeze(0)
    neighbour = torch.cat([y[1:], edge] if reverse else [edge, y[:-1]])
    # A zero coefficient has not read its neighbour: what is not finite there stays out of its gradient.
    db = g * torch.where((b == 0) & ~torch.isfinite(neighbour), 0, neighbour)
    first = -1 if reverse else 0
    dinit = None if init is None else torch.where(b[first] == 0, 0, g[first] * b[first])
    return g, db, dinit, None


def _scan_vmap(info: Any, in_dims: tuple[Any, ...], a: Tensor, b: Tensor, init: Any, reverse: bool) -> Any:
    def batched(value: Any, dim: int | None, to: int) -> Any:
        if value is None:
            return None
        return (
            value.unsqueeze(to).expand(*value.shape[:to], info.batch_size, *value.shape[to:])
            if dim is None
            else value.movedim(dim, to)
        )

    a, b = batched(a, in_dims[0], 1), batched(b, in_dims[1], 1)
    return torch.ops.rl_triton.affine_scan(a, b, batched(init, in_dims[2], 0), reverse), 1


def _unpack(name: str, inputs: list[Tensor | None], numbers: list[float]) -> Any:
    algorithm = ALGORITHMS[name]
    remaining = iter(numbers)
    values = (
        next(remaining) if value is None and field in ("gamma", "lambda_") else value
        for field, value in zip(algorithm.inputs._fields, inputs)
    )
    return algorithm, algorithm.inputs._make(values)


def _fused(
    name: str,
    inputs: list[Any],
    numbers: list[float],
    scalars: list[float],
    options: list[int],
    time_dim: int,
) -> list[Tensor]:
    algorithm, x = _unpack(name, inputs, numbers)
    with torch.no_grad():
        return list(run(algorithm, x, time_dim, tuple(scalars), tuple(options)))


def _fused_fake(
    name: str,
    inputs: list[Any],
    numbers: list[float],
    scalars: list[float],
    options: list[int],
    time_dim: int,
) -> list[Tensor]:
    algorithm, x = _unpack(name, inputs, numbers)
    layout = resolve(x, time_dim)
    return [x[0].new_empty(layout.shape, dtype=layout.dtype) for _ in range(algorithm.outputs(options))]


for _name, _implementation, _fake in (("affine_scan", _scan, _scan_fake), ("fused", _fused, _fused_fake)):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rl_triton::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "rl_triton::affine_scan", _scan_backward, setup_context=_scan_setup, lib=_library
)
torch.library.register_vmap("rl_triton::affine_scan", _scan_vmap, lib=_library)
