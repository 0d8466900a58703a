"""Plan, then launch: everything that metadata decides is worked out once per kind of call and cached.

A call looks its plan up, allocates the outputs and launches. Compiled kernels are launched through their own
launcher with plain addresses; where its internals are not the known ones, Triton's public launch serves.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._algorithms import Algorithm
from .._layout import COEFFICIENTS, EDGES, PER_ACTION, Layout
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
    block_a: int
    num_warps: int
    stages: int
    groups: int
    chunks: int
    length: int


def power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tune(B: int, T: int, F: int, actions: int) -> Geometry:
    """The tuning table, measured on an H200 on data outside the cache: NOTES.md has the ratios to a copy."""
    rows = B * F
    steps = min(4, power_of_2(T))
    segments = power_of_2(-(-T // steps))
    # Blocks that are on their way while one is scanned.
    stages, block_a = 3, 1
    if F >= 16 or (F > 1 and B == 1):
        axes = "features"
        if actions:
            block_n, block_t = 16, 8
        elif T <= 8:
            block_n, block_t = 64, 2
        elif rows >= 8192:
            block_n, block_t = 32, 4
        elif rows >= 2048 or T > _ONE_LAUNCH:
            block_n, block_t = 16, 8
        else:
            block_n, block_t, stages = 4, 128, 1
        block_n, block_t = min(block_n, power_of_2(F)), min(block_t, segments)
        groups = B * -(-F // block_n)
    else:
        # Four rows of time are one vector of fp32.
        axes = "time" if F == 1 else "mixed"
        if actions:
            threads, block_t = (32, 32) if actions <= 8 else (32, 16) if T <= 128 else (64, 32)
        elif rows < 2048:
            threads, block_t = (128, 128) if T <= _ONE_LAUNCH else (64, 64)
        else:
            threads, block_t = 64, 16 if T <= 128 else 64
        block_t = min(block_t, segments)
        # Spread few rows over all multiprocessors rather than fill one.
        block_n = min(threads // block_t, power_of_2(max(1, rows // 256)))
        groups = -(-rows // block_n)
    if actions:
        # Many actions are reduced eight at a time, without a second tile of them in flight.
        block_a = min(4 if actions <= 8 else 8, power_of_2(actions))
        stages = 2 if actions <= 8 and axes != "features" else 1
    block = block_t * steps
    length = T
    if T > _ONE_LAUNCH and groups < 264:
        least = 256 if axes == "features" else 1024
        length = -(-max(least, -(-T // 512)) // block) * block
    if length <= block:
        stages = 1
    num_warps = max(1, min(16, block_n * block_t // 32))
    return Geometry(
        axes, block_n, block_t, steps, block_a, num_warps, stages, groups, -(-T // length), length
    )


# Up to here a call is one launch, however few its rows.
_ONE_LAUNCH = 4096


class Plan:
    """How one kind of call runs: strides, tiles, outputs, and one compiled kernel per pointer alignment."""

    def __init__(
        self, algorithm: Algorithm, x: tuple[Any, ...], layout: Layout, options: tuple[Any, ...]
    ) -> None:
        fields = algorithm.inputs._fields
        self.shape, self.dtype, self.compute = tuple(layout.shape), layout.dtype, layout.compute
        self.contiguous = torch.empty(self.shape, device="meta").stride()
        self.device = x[0].device
        self.outputs = algorithm.outputs(options)

        # Axes that merge into no single stride are copied, the rest is read where it lies.
        self.copies: dict[int, tuple[int, ...]] = {}
        strides: list[Any] = [None] * len(x)
        actions = 0
        for i, (name, value) in enumerate(zip(fields, x)):
            if not isinstance(value, Tensor):
                continue
            if name in PER_ACTION:
                actions = value.shape[-1]
            strides[i] = _strides(name, value, layout)
            if strides[i] is None:
                self.copies[i] = _expanded(name, value, layout)
                strides[i] = _strides(name, torch.empty(self.copies[i], device="meta"), layout)
        self.init = next((i for i, name in enumerate(fields) if name in ("seed_values", "init")), None)
        init_stride = None
        if self.init is not None:
            init_stride, strides[self.init] = strides[self.init], None
        # Triton's own tuple has an attribute `values`.
        names = ["value" if name == "values" else name for name in fields]
        self.fields = namedtuple(algorithm.inputs.__name__, names)
        out_stride = _strides("", torch.empty(self.shape, device="meta"), layout)
        self.strides = (self.fields._make(strides), out_stride, init_stride)
        self.coefficients = "gamma" in fields

        spec = SPECS[algorithm.name]
        B, T, F = _merged(layout)
        g = tune(B, T, F, actions)
        self.grid = (g.groups * g.chunks, 1, 1)
        self.num_warps = g.num_warps
        self.partials = 2 * B * F * g.chunks if g.chunks > 1 else 0
        phases = (REDUCE, APPLY) if g.chunks > 1 else (WHOLE,)
        self.phases = [
            (
                *(B, T, F, g.length, g.chunks, actions),
                spec.terms,
                spec.emit,
                spec.looks_ahead,
                bool(options[0]) if algorithm.name == "affine" else algorithm.name != "traces",
                int(options[0]) if algorithm.name == "traces" else _vector(fields, strides, actions),
                tl.float64 if self.compute == torch.float64 else tl.float32,
                g.axes,
                (F if g.axes == "features" else T) % 4 == 0,
                phase.value,
                *(g.block_n, g.block_t, g.steps, g.block_a),
                power_of_2(max(g.chunks, g.block_t)),
                # Blocks of doubles might not fit in the shared memory of every GPU.
                g.stages if self.compute == torch.float32 else 1,
            )
            for phase in phases
        ]
        self.launchers: dict[Any, list[Callable[..., None]]] = {}

    def __call__(self, x: tuple[Any, ...], scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
        if self.copies:
            x = tuple(
                v.expand(self.copies[i]).contiguous() if i in self.copies else v for i, v in enumerate(x)
            )
        if interpreted:
            return self._interpret(x, scalars)
        index = self.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self._launch(x, scalars, index)
        return self._launch(x, scalars, index)

    def _launch(self, x: tuple[Any, ...], scalars: tuple[float, ...], index: int) -> tuple[Tensor, ...]:
        """The hot path: allocate, gather addresses, launch."""
        first = _empty(self.shape, self.contiguous, self.dtype)
        outputs = (first,) if self.outputs == 1 else (first, _empty(self.shape, self.contiguous, self.dtype))
        addresses = [v.data_ptr() if isinstance(v, Tensor) else 0 for v in x]
        misaligned = 0
        for address in addresses:
            misaligned |= address
        if misaligned & 15:
            misaligned = tuple([address & 15 == 0 for address in addresses])
        else:
            misaligned = 0
        launchers = self.launchers.get(misaligned)
        if launchers is None:
            launchers = self.launchers[misaligned] = self._compile(x, outputs)
        partials = None
        if self.partials:
            scratch = _empty((self.partials,), (1,), self.compute)
            partials = scratch.data_ptr()
        written = (first.data_ptr(), outputs[1].data_ptr() if self.outputs == 2 else None)
        arguments = self._arguments(x, addresses, written, partials, scalars)
        stream = torch._C._cuda_getCurrentRawStream(index)
        for launcher, constants in zip(launchers, self.phases):
            launcher(stream, arguments + constants)
        return outputs

    def _arguments(
        self, x: tuple[Any, ...], pointers: list[Any], outputs: Any, partials: Any, scalars: tuple[float, ...]
    ) -> tuple[Any, ...]:
        """The kernel's arguments; pointers are addresses, or tensors for a compiler or interpreter."""
        init = None
        if self.init is not None:
            init = pointers[self.init] if x[self.init] is not None else None
            pointers[self.init] = None
        gamma = lambda_ = 1.0
        if self.coefficients:
            gamma, lambda_ = x[-2], x[-1]
            if isinstance(gamma, Tensor):
                gamma = 1.0
            if isinstance(lambda_, Tensor):
                lambda_ = 1.0
        strides, out_stride, init_stride = self.strides
        return (
            tuple(pointers), strides, outputs, out_stride, init, init_stride, partials,
            gamma, lambda_, *scalars, *_NO_BOUNDS[len(scalars) :],
        )  # fmt: skip

    def tensor_arguments(
        self, x: tuple[Any, ...], outputs: tuple[Tensor, ...], scalars: tuple[float, ...] = ()
    ) -> tuple[Any, ...]:
        tensors = [v if isinstance(v, Tensor) else None for v in x]
        partials = outputs[0].new_empty(self.partials, dtype=self.compute) if self.partials else None
        pointers, *others = self._arguments(x, tensors, (*outputs, None)[:2], partials, scalars)
        return self.fields._make(pointers), *others

    def _compile(self, x: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> list[Callable[..., None]]:
        arguments = self.tensor_arguments(x, outputs)
        return [
            _launcher(
                scan_kernel.warmup(*arguments, *constants, grid=self.grid, **self.compile_options), self.grid
            )
            for constants in self.phases
        ]

    @property
    def compile_options(self) -> dict[str, Any]:
        # Triton's default for fusing multiply and add is about to change.
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}

    def _interpret(self, x: tuple[Any, ...], scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
        # The interpreter truncates where hardware rounds, so that it writes the compute dtype.
        outputs = tuple(torch.empty(self.shape, dtype=self.compute) for _ in range(self.outputs))
        arguments = self.tensor_arguments(x, outputs, scalars)
        for constants in self.phases:
            scan_kernel[self.grid](*arguments, *constants, **self.compile_options)
        return tuple(output.to(self.dtype) for output in outputs)


_NO_BOUNDS = (0.0, 0.0, 0.0)

# The allocation that compiled graphs use costs a fraction of `torch.empty`.
_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
if _empty is None:

    def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


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


def _vector(fields: tuple[str, ...], strides: list[Any], actions: int) -> int:
    """How many actions, next to each other in memory, begin at multiples of their number: 4, 2 or 1."""
    sizes = {actions}
    for name, stride in zip(fields, strides):
        if name in PER_ACTION and stride is not None:
            *outer, _, inner = stride
            sizes |= {size for size in outer if size} | ({1} if inner != 1 else set())
    return math.gcd(4, *sizes) if actions else 0


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
    """Strides over (B, T, F), None on axes that are absent or repeated; None in all if one axis has several.

    Behind them: 1 if every stride but one of 1 is a multiple of 4, else None; then the stride over actions.
    """
    if name in COEFFICIENTS and value.dim() == 0:
        return None, None, None, None
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
    # Only a compiler knows a 1 from other numbers.
    aligned = not interpreted and not any(stride % 4 for stride in merged if stride not in (None, 1))
    return (*merged, 1 if aligned else None, *actions)
