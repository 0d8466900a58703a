"""Plan, then launch: everything that metadata decides is worked out once per kind of call and cached.

A call looks its plan up, allocates the outputs and launches. Compiled kernels are launched through their own
launcher with plain addresses; where its internals are not the known ones, Triton's public launch serves.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
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

    def __init__(self, algorithm: Any, x: Any, time_dim: int, options: tuple[Any, ...]) -> None:
        layout = resolve(x, time_dim)
        self.shape, self.dtype, self.device = layout.shape, layout.dtype, x[0].device
        self.compute, self.outputs = layout.compute, algorithm.outputs(options)
        self.empty = 0 in layout.shape
        if self.empty:
            return

        # Axes that merge into no single stride are copied, the rest is read where it lies.
        self.copies: dict[str, tuple[int, ...]] = {}
        strides: dict[str, Any] = dict.fromkeys(x._fields)
        actions = 0
        for name, value in zip(x._fields, x):
            if not isinstance(value, Tensor):
                continue
            if name in PER_ACTION:
                actions = value.shape[-1]
            strides[name] = _strides(name, value, layout)
            if strides[name] is None:
                self.copies[name] = shape = _expanded(name, value, layout)
                strides[name] = _strides(name, torch.empty(shape, device="meta"), layout)
        self.init = next((i for i, name in enumerate(x._fields) if name in ("seed_values", "init")), None)
        init_stride = None
        if self.init is not None:
            init_stride, strides[x._fields[self.init]] = strides[x._fields[self.init]], None
        out_stride = _strides("", torch.empty(layout.shape, device="meta"), layout)
        # Triton's own tuple has an attribute `values`.
        names = ["value" if name == "values" else name for name in x._fields]
        self.fields = namedtuple(algorithm.inputs.__name__, names)
        self.strides = (self.fields._make(strides.values()), out_stride, init_stride)
        self.coefficients = "gamma" in x._fields

        spec = SPECS[algorithm.name]
        B, T, F = _merged(layout)
        g = tune(B, T, F, actions, spec.looks_ahead)
        self.grid = (g.groups * g.chunks, 1, 1)
        self.num_warps = g.num_warps
        self.partials = 2 * B * F * g.chunks if g.chunks > 1 else 0
        phases = (REDUCE, APPLY) if g.chunks > 1 else (WHOLE,)
        self.phases = [
            (
                *(B, T, F, actions, g.length, g.chunks),
                spec.terms,
                spec.emit,
                spec.looks_ahead,
                bool(options[0]) if algorithm.name == "affine" else algorithm.name != "traces",
                int(options[0]) if algorithm.name == "traces" else 0,
                tl.float64 if layout.compute == torch.float64 else tl.float32,
                g.axes,
                (F if g.axes == "features" else T) % 16 == 0,
                phase.value,
                *(g.block_n, g.block_t, g.steps, min(16, power_of_2(actions)), power_of_2(g.chunks)),
            )
            for phase in phases
        ]
        self.launchers: dict[Any, list[Callable[..., None]]] = {}

    def __call__(self, x: Any, scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
        if interpreted:
            return self._interpret(x, scalars)
        shape, dtype, device = self.shape, self.dtype, self.device
        outputs = [torch.empty(shape, dtype=dtype, device=device) for _ in range(self.outputs)]
        if self.empty:
            return tuple(outputs)
        if self.copies:
            x = self._copied(x)
        pointers = [value.data_ptr() if isinstance(value, Tensor) else None for value in x]
        first = outputs[0].data_ptr()
        second = outputs[1].data_ptr() if len(outputs) == 2 else None
        partials = None
        if self.partials:
            scratch = torch.empty(self.partials, dtype=self.compute, device=device)
            partials = scratch.data_ptr()
        alignment = 0
        for pointer in pointers:
            if pointer is not None:
                alignment |= pointer
        if alignment & 15:
            alignment = tuple([pointer is None or pointer & 15 == 0 for pointer in pointers])
        else:
            alignment = None
        launchers = self.launchers.get(alignment)
        index = device.index
        switch = torch._C._cuda_getDevice() != index
        with torch.cuda.device(index) if switch else _NOTHING:
            if launchers is None:
                launchers = self.launchers[alignment] = self._compile(x, outputs)
            arguments = self._arguments(x, pointers, (first, second), partials, scalars)
            stream = torch._C._cuda_getCurrentRawStream(index)
            for launcher, constants in zip(launchers, self.phases):
                launcher(stream, arguments + constants)
        return tuple(outputs)

    def _arguments(self, x: Any, pointers: Any, outputs: Any, partials: Any, scalars: Any) -> tuple[Any, ...]:
        init = None
        if self.init is not None:
            init = pointers[self.init]
            pointers[self.init] = None
        gamma = lambda_ = 1.0
        if self.coefficients:
            gamma, lambda_ = x[-2:]
            gamma = 1.0 if isinstance(gamma, Tensor) else float(gamma)
            lambda_ = 1.0 if isinstance(lambda_, Tensor) else float(lambda_)
        bounds = scalars if len(scalars) == 3 else (*scalars, 0.0, 0.0, 0.0)[:3]
        strides, out_stride, init_stride = self.strides
        return (
            self.fields._make(pointers), strides, outputs, out_stride, init, init_stride, partials,
            gamma, lambda_, *bounds,
        )  # fmt: skip

    def _copied(self, x: Any) -> Any:
        return x._replace(
            **{name: getattr(x, name).expand(shape).contiguous() for name, shape in self.copies.items()}
        )

    def tensor_arguments(self, x: Any, outputs: Any, scalars: tuple[float, ...] = ()) -> tuple[Any, ...]:
        """The kernel's arguments with tensors in place of addresses, as a compiler or interpreter wants them."""
        tensors = [value if isinstance(value, Tensor) else None for value in x]
        partials = outputs[0].new_empty(self.partials, dtype=self.compute) if self.partials else None
        outputs = tuple(outputs) if len(outputs) == 2 else (outputs[0], None)
        return self._arguments(x, tensors, outputs, partials, scalars)

    def _compile(self, x: Any, outputs: list[Tensor]) -> list[Callable[..., None]]:
        arguments = self.tensor_arguments(x, outputs)
        options = {"num_warps": self.num_warps, "enable_fp_fusion": True}
        return [
            _launcher(scan_kernel.warmup(*arguments, *constants, grid=self.grid, **options), self.grid)
            for constants in self.phases
        ]

    def _interpret(self, x: Any, scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
        # The interpreter truncates where hardware rounds, so that it writes the compute dtype.
        outputs = [torch.empty(self.shape, dtype=self.compute) for _ in range(self.outputs)]
        if not self.empty:
            x = self._copied(x)
            arguments = self.tensor_arguments(x, outputs, scalars)
            for constants in self.phases:
                scan_kernel[self.grid](*arguments, *constants, num_warps=self.num_warps)
        return tuple(output.to(self.dtype) for output in outputs)


_NOTHING = nullcontext()
_plans: dict[Any, Plan] = {}
# Plans are small, but a caller whose shapes never repeat should not collect them for ever.
_PLANS_KEPT = 4096


def launch(
    algorithm: Any, x: Any, time_dim: int, scalars: tuple[float, ...], options: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Run an algorithm's kernel on the device of its inputs."""
    key = (
        algorithm,
        time_dim,
        options,
        *[(v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else type(v) for v in x],
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        plan = _plans[key] = Plan(algorithm, x, time_dim, options)
    return plan(x, scalars)


def _launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int, tuple[Any, ...]], None]:
    """A function that launches a compiled kernel on a stream, with as little in between as can be."""
    run = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    no_scratch = not (getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1))
    if no_scratch and hasattr(run, "launch") and hasattr(run, "launch_cooperative_grid"):
        launch, options = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
        if hasattr(run, "kernel_signature"):
            # Triton 3.7 parses the arguments by description.
            annotations, signature = run.arg_annotations, run.kernel_signature
            before = (*options, metadata, None, None, None, None, None, annotations, signature)
            return lambda stream, arguments: launch(*grid, stream, function, *before, arguments)
        # Triton 3.6 compiles a launcher per signature.
        before = (*options, None, None, metadata, None, None, None)
        return lambda stream, arguments: launch(*grid, stream, function, *before, *arguments)
    # Any other version or backend: the compiled kernel's own entry.
    return lambda stream, arguments: run(*grid, stream, function, metadata, None, None, None, *arguments)


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
