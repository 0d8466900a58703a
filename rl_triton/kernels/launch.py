"""Plan, then launch: everything that metadata decides is worked out once per kind of call and cached.

A call looks its plan up, allocates the outputs and launches. Compiled kernels are launched through their own
launcher with plain addresses; where its internals are not the known ones, Triton's public launch serves.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cache, reduce
from itertools import compress, count
from operator import itemgetter, or_
from types import SimpleNamespace
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


# Up to here a call is one launch, however few its rows.
_ONE_LAUNCH = 4096
# Fewer programs than this leave multiprocessors idle.
_PROGRAMS = 264


def tune(B: int, T: int, F: int, width: int, actions: int) -> Geometry:
    """The tuning table, from sweeps on an H200 (tests/sweep_tiles.py); NOTES.md has the ratios to a copy.

    `width` counts the bytes of a row in all inputs with a time axis but those per action.
    """
    rows = B * F
    axes = "features" if F >= 16 or (F > 1 and B == 1) else "time" if F == 1 else "mixed"
    if axes == "features":
        steps, threads, block_n, stages = _columns(rows, T, width, actions)
    elif actions:
        steps, threads, block_t, stages = _rows_of_actions(rows, T, actions)
    else:
        steps, threads, block_t, stages = _rows(rows, T)
    steps = min(steps, power_of_2(T))
    segments = power_of_2(-(-T // steps))
    if axes == "features":
        block_t = min(threads // block_n, segments)
        block_n = min(block_n, power_of_2(F))
        groups = B * -(-F // block_n)
    else:
        block_t = min(block_t, segments)
        # Spread few rows over all multiprocessors rather than fill one.
        block_n = min(threads // block_t, power_of_2(max(1, rows // 256)))
        groups = -(-rows // block_n)
    block_a = min(4, power_of_2(actions)) if actions else 1
    block = block_t * steps
    length = T
    if T > _ONE_LAUNCH and groups < _PROGRAMS:
        least = 256 if axes == "features" else 1024
        length = -(-max(least, -(-T // 1024)) // block) * block
    # Blocks that are on their way while one is scanned.
    stages = min(stages, -(-length // block))
    num_warps = max(1, min(16, block_n * block_t // 32))
    return Geometry(
        axes, block_n, block_t, steps, block_a, num_warps, stages, groups, -(-T // length), length
    )


def _rows(rows: int, T: int) -> tuple[int, int, int, int]:
    """Time innermost: the steps of a segment, threads, segments of a block, stages."""
    if T <= 128 and rows * T <= 2**21:
        # Small rollouts end before the instructions that eight rows to a segment save would count.
        return 4, 64, 16, 3
    # Two blocks, so that one is on its way, and no more segments than a warp has lanes.
    block_t = max(4, min(32, power_of_2(T) // 16))
    return 8, 32 if block_t == 32 else 64, block_t, 3


def _rows_of_actions(rows: int, T: int, actions: int) -> tuple[int, int, int, int]:
    """The same for Retrace: short segments take fewer registers, and more rows to hide their latency."""
    if actions <= 4:
        stages = 2 if rows >= 2048 else 3
        return 2 if rows >= 4096 and rows * T >= 2**19 else 4, 32, 32, stages
    if actions <= 8:
        return 4, 32, 32, 1
    split = T > _ONE_LAUNCH and rows < _PROGRAMS
    return 2 if split or (rows >= 2048 and rows * T >= 2**19) else 4, 32, 32, 1


def _columns(rows: int, T: int, width: int, actions: int) -> tuple[int, int, int, int]:
    """Features innermost: the steps of a segment, threads, columns of a block, stages."""
    if actions:
        block_n = 32 if rows >= 16384 else 8 if rows >= 2048 else 4
        return 4, 512 if rows < 2048 and actions <= 8 else 128, block_n, 1
    if T <= 128:
        return 4, 128, 64 if T <= 8 else 4 if rows < 2048 else 16 if rows < 8192 else 32, 3
    # Few columns make few programs; where rows are narrow, shared memory has room for long segments.
    one_launch = T <= _ONE_LAUNCH
    if rows < 2048 and one_launch:
        return 8, 128, 4 if rows < 1024 else 8, 3
    steps = 8 if width <= 10 or (rows < 4096 and one_launch) else 4
    return steps, 128, 16 if rows < 16384 else 32, 3


class Plan:
    """How one kind of call runs: strides, tiles, outputs, and one compiled kernel per pointer alignment."""

    def __init__(
        self, algorithm: Algorithm, x: tuple[Any, ...], layout: Layout, options: tuple[Any, ...]
    ) -> None:
        fields = algorithm.inputs._fields
        self.shape, self.dtype, self.compute = tuple(layout.shape), layout.dtype, layout.compute
        contiguous = torch.empty(self.shape, device="meta").stride()
        self.device = x[0].device
        self.outputs = algorithm.outputs(options)

        # Axes that merge into no single stride are copied, the rest is read where it lies.
        self.copies: dict[int, tuple[int, ...]] = {}
        strides: list[Any] = [None] * len(x)
        width = actions = 0
        for i, (name, value) in enumerate(zip(fields, x)):
            if not isinstance(value, Tensor):
                continue
            if name in PER_ACTION:
                actions = value.shape[-1]
            strides[i] = _strides(name, value, layout)
            if strides[i] is None:
                self.copies[i] = _expanded(name, value, layout)
                strides[i] = _strides(name, torch.empty(self.copies[i], device="meta"), layout)
            if name not in PER_ACTION and strides[i][1] is not None:
                width += value.element_size()
        init = next((i for i, name in enumerate(fields) if name in ("seed_values", "init")), None)
        init_stride = None
        if init is not None:
            init_stride, strides[init] = strides[init], None
        out_stride = _strides("", torch.empty(self.shape, device="meta"), layout)

        spec = SPECS[algorithm.name]
        B, T, F = _merged(layout)
        g = tune(B, T, F, width, actions)
        self.grid = (g.groups * g.chunks, 1, 1)
        self.num_warps = g.num_warps
        partials = 2 * B * F * g.chunks if g.chunks > 1 else 0
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
                math.gcd(F if g.axes == "features" else T, 8),
                phase.value,
                *(g.block_n, g.block_t, g.steps, g.block_a),
                power_of_2(max(g.chunks, g.block_t)),
                # Blocks of doubles might not fit in the shared memory of every GPU.
                g.stages if self.compute == torch.float32 else 1,
            )
            for phase in phases
        ]
        self.launchers: dict[Any, list[Callable[..., None]]] = {}

        # A call's values: its tensors, what it allocates, its numbers. The kernel's arguments name them.
        value = map(Value, count())
        given = {i: next(value) for i, v in enumerate(x) if isinstance(v, Tensor)}
        self.tensors = itemgetter(*given)
        self.allocations = [(self.shape, contiguous, self.dtype)] * self.outputs
        outputs = [next(value) for _ in range(self.outputs)]
        if partials:
            self.allocations.append(((partials,), (1,), self.compute))
        partials = next(value) if partials else None
        # For a coefficient that is a tensor the 1 that stands behind a call's inputs is the number.
        at = {name: i for i, name in enumerate(fields) if i not in given}
        self.numbers = itemgetter(at.get("gamma", -1), at.get("lambda_", -1))
        numbers = [next(value) for _ in ("gamma", "lambda_", *_NO_BOUNDS)]
        init = given.pop(init, None)
        # Triton's own tuple has an attribute `values`.
        names = ["value" if name == "values" else name for name in fields]
        kernel_inputs = namedtuple(algorithm.inputs.__name__, names)
        self.arguments = (
            kernel_inputs(*[given.get(i) for i in range(len(x))]), kernel_inputs(*strides),
            (*outputs, None)[:2], out_stride, init, init_stride, partials, *numbers,
        )  # fmt: skip

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
        allocated = tuple([_empty(*how) for how in self.allocations])
        values: list[Any] = [*map(Tensor.data_ptr, self.tensors(x)), *map(Tensor.data_ptr, allocated)]
        alignment: Any = 0
        if reduce(or_, values) & 15:
            alignment = tuple([address & 15 == 0 for address in values])
        launchers = self.launchers.get(alignment)
        if launchers is None:
            tensors = self.values((*self.tensors(x), *allocated), x, scalars)
            launchers = self.launchers[alignment] = [self._launcher(tensors, phase) for phase in self.phases]
        values = self.values(values, x, scalars)
        stream = torch._C._cuda_getCurrentRawStream(index)
        for launcher in launchers:
            launcher(stream, values)
        return allocated[: self.outputs]

    def values(self, tensors: Sequence[Any], x: tuple[Any, ...], scalars: tuple[float, ...]) -> list[Any]:
        """A call's values; pointers are addresses, or tensors for a compiler or interpreter."""
        return [*tensors, *self.numbers((*x, 1.0)), *scalars, *_NO_BOUNDS[len(scalars) :]]

    def compile(self, values: list[Any], constants: tuple[Any, ...]) -> Any:
        arguments = _filled(self.arguments, values)
        return scan_kernel.warmup(*arguments, *constants, grid=self.grid, **self.compile_options)

    def _launcher(self, values: list[Any], constants: tuple[Any, ...]) -> Callable[..., None]:
        """A function of a stream and a call's values that launches one phase."""
        reads, launch = _launch(self.compile(values, constants))
        arguments = [*compress(_flat((*self.arguments, *constants)), reads)]
        fixed = [argument for argument in arguments if not isinstance(argument, Value)]
        behind = count(len(values))
        order = itemgetter(*[x if isinstance(x, Value) else next(behind) for x in arguments])
        grid = self.grid
        return lambda stream, values: launch(grid, stream, order(values + fixed))

    def _interpret(self, x: tuple[Any, ...], scalars: tuple[float, ...]) -> tuple[Tensor, ...]:
        # The interpreter truncates where hardware rounds, so that it writes the compute dtype.
        allocated = [torch.empty(shape, dtype=self.compute) for shape, _, _ in self.allocations]
        arguments = _filled(self.arguments, self.values((*self.tensors(x), *allocated), x, scalars))
        for constants in self.phases:
            scan_kernel[self.grid](*arguments, *constants, **self.compile_options)
        return tuple(output.to(self.dtype) for output in allocated[: self.outputs])

    @property
    def compile_options(self) -> dict[str, Any]:
        # Triton's default for fusing multiply and add is about to change.
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


class Value(int):
    """Stands in a kernel's arguments for one of a call's values, by its position."""


def _filled(arguments: Any, values: Sequence[Any]) -> Any:
    """Arguments, or some of them, with a call's values in their places."""
    if isinstance(arguments, Value):
        return values[arguments]
    if not isinstance(arguments, tuple):
        return arguments
    make = getattr(arguments, "_make", tuple)
    return make(_filled(argument, values) for argument in arguments)


def _flat(nested: Iterable[Any]) -> Iterator[Any]:
    for item in nested:
        if isinstance(item, tuple):
            yield from _flat(item)
        else:
            yield item


_NO_BOUNDS = (0.0, 0.0, 0.0)

# The allocation that compiled graphs use costs a fraction of `torch.empty`.
_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
if _empty is None:

    def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


@cache
def _launch(compiled: Any) -> tuple[list[bool], Callable[..., None]]:
    """Which arguments a compiled kernel reads, and a function of grid, stream and these that launches it.

    The time of Triton's launchers goes by their arguments, those of absent tensors and constants too, and by
    what they do for hooks and scratch memory: this is one for what the kernel reads, without the rest.
    """
    kinds = [*_flat(compiled.src.signature.values())]
    reads = [kind != "constexpr" for kind in kinds]
    compiled = copy(compiled)
    compiled.src = SimpleNamespace(signature=dict(enumerate(compress(kinds, reads))), constants={})
    run = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    no_scratch = not (getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1))
    if no_scratch and hasattr(run, "launch") and hasattr(run, "launch_cooperative_grid"):
        launch, options = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
        if hasattr(run, "kernel_signature"):
            # Triton 3.7 parses the arguments by description.
            annotations, signature = run.arg_annotations, run.kernel_signature
            before = (*options, metadata, None, None, None, None, None, annotations, signature)
            return reads, lambda grid, stream, x: launch(*grid, stream, function, *before, x)
        # Triton 3.6 compiles a launcher per signature.
        before = (*options, None, None, metadata, None, None, None)
        return reads, lambda grid, stream, x: launch(*grid, stream, function, *before, *x)
    # Any other version or backend: the compiled kernel's own entry.
    return reads, lambda grid, stream, x: run(*grid, stream, function, metadata, None, None, None, *x)


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

    Behind them: 1 if every stride but one of 1 is a multiple of 4, else None; the same for 8; then the stride
    over actions.
    """
    if name in COEFFICIENTS and value.dim() == 0:
        return None, None, None, None, None
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
    unit = math.gcd(*(stride for stride in merged if stride not in (None, 1)))
    markers = (None if interpreted or unit % of else 1 for of in (4, 8))
    return (*merged, *markers, *actions)
