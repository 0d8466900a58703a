"""Which path a call takes, and the two operators that torch.compile and autograd see.

`rl_triton::fused` is a whole algorithm in one kernel launch, without gradients.
`rl_triton::affine_scan` is the bare scan with its adjoint: with gradients a call runs formulas -> scan ->
formulas, and only the scan needs a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels
from ._algorithms import AFFINE, ALGORITHMS, Algorithm
from ._layout import COEFFICIENTS, Layout, resolve, time_first
from .scan import doubling_scan, hidden, join, selecting_scan, time_innermost, transformed, wrapped

Outputs = tuple[Tensor, ...]

kernel_serves = kernels.serves

_plans: dict[Any, tuple[Callable[[tuple[Any, ...], tuple[float, ...]], Outputs], Any]] = {}
# Plans are small, but a caller whose shapes never repeat should not collect them for ever.
_PLANS_KEPT = 4096
# The last kernel plan of each kind of call. PyTorch's own guards compare a call with it in a quarter of the
# time that it takes to spell out the key.
_latest: dict[Any, tuple[Any, ...]] = {}
_Guards = getattr(getattr(torch._C, "_dynamo").guards, "TensorGuards", None)  # noqa: B009


def run(
    algorithm: Algorithm,
    x: tuple[Any, ...],
    time_dim: int,
    scalars: tuple[float, ...] = (),
    options: tuple[Any, ...] = (),
    within: bool = False,
) -> Any:
    """Run an algorithm by the plan that its inputs' metadata asks for.

    `x` holds the values of `algorithm.inputs`, `scalars` numbers that may change from call to call,
    `options` what is part of the plan. `within` an operator, tensors are as plain as they look.
    """
    if not within and wrapped():
        return Formulas(algorithm, x, time_dim, options)(x, scalars)
    if torch.compiler.is_compiling():
        return _traced(algorithm, x, time_dim, scalars, options)
    # The default dtype is the output's where no input floats.
    kind = (algorithm.name, time_dim, options, torch.get_default_dtype())
    latest = _latest.get(kind)
    if latest is not None:
        serves, types, tensors, guards, plan = latest
        if serves is kernel_serves and tuple(map(type, x)) == types and guards.check(*tensors(x)):
            return plan(x, scalars)
    # A view may carry a negation that PyTorch has put off; the guards above tell it from other tensors.
    x = tuple([v.resolve_neg() if isinstance(v, Tensor) else v for v in x])
    key = (
        *kind,
        kernel_serves,
        torch.is_grad_enabled(),
        *[
            (v.shape, v.stride(), v.dtype, v.device, v.requires_grad)
            if isinstance(v, Tensor)
            else v.__class__
            for v in x
        ],
    )
    known = _plans.get(key)
    if known is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        plan = _plan(algorithm, x, time_dim, options)
        known = _plans[key] = (plan, _guarded(x, plan))
    plan, guarded = known
    if guarded is not None:
        _latest[kind] = guarded
    return plan(x, scalars)


def _guarded(x: tuple[Any, ...], plan: Any) -> tuple[Any, ...] | None:
    """A kernel plan beside guards that recognise its inputs, made once so that calls may alternate."""
    indices = [i for i, v in enumerate(x) if isinstance(v, Tensor)]
    # An item getter for one index gives no tuple, and the guards do not tell grad mode from no_grad.
    differentiable = any(x[i].requires_grad for i in indices)
    if _Guards is None or isinstance(plan, Formulas) or differentiable or len(indices) < 2:
        return None
    guards = _Guards(
        *[x[i] for i in indices],
        dynamic_dims_sizes=[list(x[i].shape) for i in indices],
        dynamic_dims_strides=[list(x[i].stride()) for i in indices],
    )
    return kernel_serves, tuple(map(type, x)), itemgetter(*indices), guards, plan


def _plan(algorithm: Algorithm, x: tuple[Any, ...], time_dim: int, options: tuple[Any, ...]) -> Any:
    """One kernel launch where Triton serves and no gradient is asked for, else formulas around a scan."""
    if not _needs_grad(x) and isinstance(x[0], Tensor) and kernel_serves(x[0].device):
        layout = resolve(algorithm.inputs._make(x), time_dim)
        if 0 not in layout.shape:
            return kernels.Plan(algorithm, x, layout, options)
    return Formulas(algorithm, x, time_dim, options)


def _needs_grad(x: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in x)


class Formulas:
    """The algorithm in plain PyTorch around one scan; differentiable."""

    def __init__(
        self, algorithm: Algorithm, x: tuple[Any, ...], time_dim: int, options: tuple[Any, ...]
    ) -> None:
        self.algorithm, self.options = algorithm, options
        self.layout: Layout = resolve(algorithm.inputs._make(x), time_dim)

    def __call__(self, x: tuple[Any, ...], scalars: tuple[float, ...]) -> Outputs:
        algorithm, layout = self.algorithm, self.layout
        if 0 in layout.shape:
            # Adding nothing keeps the inputs in the graph.
            nothing = sum(v.sum() * 0 for v in x if isinstance(v, Tensor) and v.requires_grad)
            empty = x[0].new_empty(layout.shape, dtype=layout.dtype)
            return tuple(empty + nothing for _ in range(algorithm.outputs(self.options)))
        seen = transformed()
        inputs = algorithm.inputs
        steps = inputs._make([time_first(name, value, layout) for name, value in zip(inputs._fields, x)])
        if "gamma" in inputs._fields:
            steps = steps._replace(gamma=_number(steps.gamma, seen), lambda_=_number(steps.lambda_, seen))
        scan = algorithm.stage(steps, scalars, self.options)
        if seen or _needs_grad((scan.a, scan.b, scan.init)):
            y = _differentiable_scan(scan.a, scan.b, scan.init, scan.reverse)
        else:
            y = _scan(scan.a, scan.b, scan.init, scan.reverse)
        outputs = (output.movedim(0, layout.time_dim).contiguous() for output in scan.outputs(y))
        return tuple(y if y.dtype == layout.dtype else y.to(layout.dtype) for y in outputs)


def _number(coefficient: Any, seen: bool) -> Any:
    """A number as a float, and so one that a module holds as a tensor on the CPU."""
    if not isinstance(coefficient, Tensor):
        return float(coefficient)
    if seen or coefficient.requires_grad or coefficient.dim() > 0 or coefficient.device.type != "cpu":
        return coefficient
    return coefficient.item()


def _traced(
    algorithm: Algorithm,
    x: tuple[Any, ...],
    time_dim: int,
    scalars: tuple[float, ...],
    options: tuple[Any, ...],
) -> Outputs:
    """Under torch.compile: one operator, or formulas that the compiler fuses around the scan."""
    if _needs_grad(x):
        return Formulas(algorithm, x, time_dim, options)(x, scalars)
    tensors = [v if isinstance(v, Tensor) else None for v in x]
    numbers = [float(v) for v in x if v is not None and not isinstance(v, Tensor)]
    flags = [int(option) for option in options]
    return tuple(torch.ops.rl_triton.fused(algorithm.name, tensors, numbers, list(scalars), flags, time_dim))


_library = torch.library.Library("rl_triton", "DEF")
_library.define("affine_scan(Tensor a, Tensor b, Tensor? init, bool reverse) -> Tensor")
_library.define(
    "fused(str algorithm, Tensor?[] inputs, float[] numbers, float[] scalars, int[] options, int time_dim) "
    "-> Tensor[]"
)


def _scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    if a.numel() == 0:
        return _scan_fake(a, b, init, reverse)
    if not kernel_serves(a.device):
        return doubling_scan(a, b, init, reverse)
    if time_innermost(a):
        x = (a.movedim(0, -1), b.movedim(0, -1), init)
        return run(AFFINE, x, -1, (), (reverse,), within=True)[0].movedim(-1, 0)
    return run(AFFINE, (a, b, init), 0, (), (reverse,), within=True)[0]


def _scan_in_order(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    """The scan, its result in the memory order of `a`, which is what a compiler counts on."""
    y = _scan(a, b, init, reverse)
    if kernel_serves(a.device):
        return y
    # What the doubling scan returns is part of its buffers.
    like = _scan_fake(a, b, init, reverse)
    return y if y.stride() == like.stride() and y.storage_offset() == 0 else like.copy_(y)


def _scan_fake(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    if time_innermost(a):
        return a.new_empty(a.movedim(0, -1).shape).movedim(-1, 0)
    return a.new_empty(a.shape)


def _scan_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, b, init, ctx.reverse = inputs
    ctx.save_for_backward(b, init, output)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    b, init, y = ctx.saved_tensors
    reverse = ctx.reverse
    zero = torch.zeros_like(b[:1])
    b_shifted = join(b, [zero, b[:-1]] if reverse else [b[1:], zero])
    g = _differentiable_scan(grad, b_shifted, None, not reverse)
    db = g * _read(b, init, y, reverse) if ctx.needs_input_grad[1] else None
    first = -1 if reverse else 0
    dinit = None if init is None else b[first] * hidden(b[first], g[first])
    return g, db, dinit, None


def _read(b: Tensor, init: Tensor | None, y: Tensor, reverse: bool) -> Tensor:
    """What each coefficient has multiplied: a zero one nothing, if what is there is not finite."""
    edge = torch.zeros_like(y[:1]) if init is None else init.unsqueeze(0)
    neighbour = join(y, [y[1:], edge] if reverse else [edge, y[:-1]])
    return hidden(b, neighbour)


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
    return _differentiable_scan(a, b, batched(init, in_dims[2], 0), reverse), 1


class _TransformedScan(torch.autograd.Function):
    """The scan under `torch.func`, which does not look into operators."""

    setup_context = staticmethod(_scan_setup)

    @staticmethod
    def forward(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
        return torch.ops.rl_triton.affine_scan(a, b, init, reverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scan_backward(ctx, grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *x: Any) -> Any:
        return _scan_vmap(info, in_dims, *x)


def _differentiable_scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    if wrapped():
        # A compiler does not look into a rule of ours, and one for forward mode would not nest.
        plain = torch.compiler.is_compiling() or forward_ad._current_level >= 0
        return (selecting_scan if plain else _TransformedScan.apply)(a, b, init, reverse)
    return torch.ops.rl_triton.affine_scan(a, b, init, reverse)


def _unpack(
    name: str, inputs: list[Tensor | None], numbers: list[float]
) -> tuple[Algorithm, tuple[Any, ...]]:
    algorithm = ALGORITHMS[name]
    remaining = iter(numbers)
    return algorithm, tuple(
        next(remaining) if value is None and field in COEFFICIENTS else value
        for field, value in zip(algorithm.inputs._fields, inputs)
    )


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
    layout = resolve(algorithm.inputs._make(x), time_dim)
    count = algorithm.outputs(options)
    return [x[0].new_empty(layout.shape, dtype=layout.dtype) for _ in range(count)]


for _name, _implementation, _fake in (
    ("affine_scan", _scan_in_order, _scan_fake),
    ("fused", _fused, _fused_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rl_triton::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "rl_triton::affine_scan", _scan_backward, setup_context=_scan_setup, lib=_library
)
torch.library.register_vmap("rl_triton::affine_scan", _scan_vmap, lib=_library)
