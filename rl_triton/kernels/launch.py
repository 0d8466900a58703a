"""Plan, then launch: everything that metadata decides is worked out once per kind of call and cached.

A call looks its plan up, allocates the outputs and launches. Compiled kernels are launched through their own
launcher with plain addresses; where its internals are not the known ones, Triton's public launch serves.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._layout import COEFFICIENTS, EDGES, PER_ACTION, Layout, resolve
from .gae import emit_gae, gae_terms
from .lambda_returns import lambda_returns_terms
from .retrace import retrace_log_terms, retrace_terms
from .tile import APPLY, REDUCE, WHOLE, emit_state, scan_kernel
from .traces import affine_terms, traces_terms
from .transition import emit_corrected
from .vtrace import vtrace_terms

interpreted = triton.knobs.runtime.interpret


class Spec(NamedTuple):
    """The device functions of an algorithm, and whether its outputs look one row ahead in scan order."""

    terms: Any
    emit: Any
    looks_ahead: bool = False


SPECS = {
    "gae": Spec(gae_terms, emit_gae),
    "lambda_returns": Spec(lambda_returns_terms, emit_state),
    "vtrace": Spec(vtrace_terms, emit_corrected, looks_ahead=True),
    "retrace": Spec(retrace_terms, emit_corrected, looks_ahead=True),
    "retrace_log": Spec(retrace_log_terms, emit_corrected, looks_ahead=True),
    "traces": Spec(traces_terms, emit_state),
    "affine": Spec(affine_terms, emit_state),
}


class Geometry(NamedTuple):
    """Tile sizes and grid of one shape class."""

    axes: str
    block_n: int
    block_t: int
    steps: int
    num_warps: int
    groups: int
    chunks: int
    length: int


def power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tune(B: int, T: int, F: int, actions: int, looks_ahead: bool) -> Geometry:
    """The tuning table."""
    if F >= 16 or (F > 1 and B == 1):
        axes = "features"
        steps = min(8, power_of_2(T))
        block_t = min(16, power_of_2(-(-T // steps)))
        block_n = min(32, power_of_2(F))
        groups = B * -(-F // block_n)
    else:
        axes = "time" if F == 1 else "mixed"
        steps = 1
        block_t = min(2048, power_of_2(T))
        block_n = min(max(1, 512 // block_t), power_of_2(B * F))
        groups = -(-B * F // block_n)
    if actions:
        block_t = min(block_t, 64)
        block_n = min(block_n, max(1, 128 // block_t))
        groups = B * -(-F // block_n) if axes == "features" else -(-B * F // block_n)
    num_warps = max(1, min(8, block_n * block_t // 128))
    chunks, length = 1, T
    block = block_t * steps
    if T > 4096 and groups < 264:
        length = -(-max(2048, -(-T // 1024)) // block) * block
        chunks = -(-T // length)
    return Geometry(axes, block_n, block_t, steps, num_warps, groups, chunks, length)


class Plan:
    """How one kind of call runs: strides, tiles, outputs, and one compiled kernel per pointer alignment."""

    def __init__(self, algorithm: Any, x: Any, time_dim: int, options: tuple[Any, ...], outputs: int) -> None:
        layout = resolve(x, time_dim)
        self.spec = SPECS[algorithm.name]
        self.shape, self.dtype, self.device = layout.shape, layout.dtype, x[0].device
        self.compute, self.outputs = layout.compute, outputs
        self.empty = 0 in layout.shape
        if self.empty:
            return
        axes = _merged(layout)
        self.copies = []
        strides = {}
        self.init_field = next(
            (i for i, name in enumerate(x._fields) if name in ("seed_values", "init")), None
        )
        actions = 0
        for i, (name, value) in enumerate(zip(x._fields, x)):
            strides[name] = None
            if not isinstance(value, Tensor):
                continue
            if name in PER_ACTION:
                actions = value.shape[-1]
            stride = _strides(name, value, layout)
            if stride is None:
                self.copies.append((i, _expanded(name, value, layout)))
                stride = _strides(name, value.expand(self.copies[-1][1]).contiguous(), layout)
            strides[name] = stride
        init_stride = None
        if self.init_field is not None:
            init_stride, strides[x._fields[self.init_field]] = strides[x._fields[self.init_field]], None
        self.fields = namedtuple(algorithm.inputs.__name__, x._fields)
        B, T, F = axes
        out = _strides("", torch.empty(layout.shape, device="meta"), layout)
        self.geometry = g = tune(B, T, F, actions, self.spec.looks_ahead)
        self.grid = (g.groups * g.chunks, 1, 1)
        reverse = bool(options[0]) if algorithm.name == "affine" else algorithm.name != "traces"
        option = int(options[0]) if algorithm.name == "traces" else 0
        self.partials = 2 * B * F * g.chunks if g.chunks > 1 else 0
        self.strides = (self.fields(**strides), out, init_stride)
        self.sizes = (B, T, F, actions, g.length, g.chunks)
        constants = (
            self.spec.terms,
            self.spec.emit,
            self.spec.looks_ahead,
            reverse,
            option,
            tl.float64 if layout.compute == torch.float64 else tl.float32,
            g.axes,
        )
        tiles = (g.block_n, g.block_t, g.steps, min(16, power_of_2(actions)), power_of_2(g.chunks))
        phases = (REDUCE, APPLY) if g.chunks > 1 else (WHOLE,)
        self.phases = [(*constants, phase.value, *tiles) for phase in phases]
        self.compiled: dict[Any, list[Callable[..., None]]] = {}

    def __call__(self, x: Any, scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
        outputs = tuple(
            [torch.empty(self.shape, dtype=self.dtype, device=self.device) for _ in range(self.outputs)]
        )
        if self.empty:
            return outputs
        if self.copies:
            x = x._replace(**{x._fields[i]: x[i].expand(shape).contiguous() for i, shape in self.copies})
        tensors = [value if isinstance(value, Tensor) else None for value in x]
        numbers = [
            float(v) if n in COEFFICIENTS and not isinstance(v, Tensor) else 1.0 for n, v in zip(x._fields, x)
        ]
        numbers = numbers[-2:] if "gamma" in x._fields else [1.0, 1.0]
        init = None
        if self.init_field is not None:
            init, tensors[self.init_field] = tensors[self.init_field], None
        partials = None
        if self.partials:
            partials = torch.empty(self.partials, dtype=self.compute, device=self.device)
        written = outputs if len(outputs) == 2 else (outputs[0], None)
        bounds = (*scalars, 0.0, 0.0, 0.0)[:3]
        strides, out, init_stride = self.strides
        arguments = (
            self.fields._make(tensors), strides, written, out, init, init_stride, partials,
            *numbers, *bounds, *self.sizes,
        )  # fmt: skip
        for constants in self.phases:
            scan_kernel[self.grid](*arguments, *constants, num_warps=self.geometry.num_warps)
        return outputs


_plans: dict[Any, Plan] = {}


def launch(
    algorithm: Any, x: Any, time_dim: int, scalars: tuple[float, ...], options: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Run an algorithm's kernel on the device of its inputs."""
    from . import output_count

    key = (algorithm, time_dim, options, *map(_describe, x))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = Plan(algorithm, x, time_dim, options, output_count(algorithm.name, options))
    return plan(x, scalars)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return type(value)


def _merged(layout: Layout) -> tuple[int, int, int]:
    """The sizes of the axes before time, of time, and of the axes after it."""
    before = after = 1
    for size in layout.shape[: layout.time_dim]:
        before *= size
    for size in layout.shape[layout.time_dim + 1 :]:
        after *= size
    return before, layout.shape[layout.time_dim], after


def _expanded(name: str, value: Tensor, layout: Layout) -> tuple[int, ...]:
    """The shape an input has once broadcast."""
    shape = layout.shape
    if name in EDGES:
        with_time = value.dim() == len(shape)
        return shape[: layout.time_dim] + ((1,) if with_time else ()) + shape[layout.time_dim + 1 :]
    return shape + tuple(value.shape[-1:]) if name in PER_ACTION else shape


def _strides(name: str, value: Tensor, layout: Layout) -> tuple[int | None, ...] | None:
    """Strides of an input over (B, T, F), None on axes it lacks or repeats; None if an axis has no one stride."""
    if name in COEFFICIENTS and value.dim() == 0:
        return None, None, None
    value = value.expand(_expanded(name, value, layout))
    sizes, strides = list(value.shape), list(value.stride())
    actions = ()
    if name in PER_ACTION:
        sizes.pop()
        actions = (strides.pop(),)
    at = layout.time_dim
    if len(sizes) < len(layout.shape):
        sizes.insert(at, 1)
        strides.insert(at, 0)
    merged = []
    for axes in (range(at), range(at, at + 1), range(at + 1, len(sizes))):
        stride = 0
        size = 1
        for axis in reversed(axes):
            if sizes[axis] == 1:
                continue
            if size > 1 and strides[axis] != stride * size:
                return None
            if size == 1:
                stride = strides[axis]
            size *= sizes[axis]
        merged.append(stride or None)
    return (*merged, *actions)
