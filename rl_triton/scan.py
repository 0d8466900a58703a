"""The affine scan: the one recurrence under all seven algorithms, and the one gradient rule.

    y[t] = a[t] + b[t] * y[t -+ 1]

Its adjoint is the same scan run the other way with `b` shifted by one row:
`g[t] = dy[t] + b[t +- 1] * g[t +- 1]`, `da = g`, `db = g * y[t -+ 1]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

_innermost_transform = getattr(torch._C, "_functorch").peek_interpreter_stack  # noqa: B009

# Elements below which a view costs more than the order it saves: 8 x 128 on a CPU.
_SMALL = 1 << 14


@torch.compiler.assume_constant_result
def _under_a_transform() -> bool:
    return _innermost_transform() is not None


def wrapped() -> bool:
    """Whether tensors may be wrapped by `torch.func` or be duals: nothing about them shows it."""
    return _under_a_transform() or forward_ad._current_level >= 0


def transformed() -> bool:
    """The same, or a compiler's."""
    return torch.compiler.is_compiling() or wrapped()


def time_innermost(x: Tensor) -> bool:
    """Whether time, axis 0, is what lies side by side in memory, as in a `[N, T]` rollout."""
    return x.dim() > 1 and x.stride(0) == 1


def join(like: Tensor, parts: list[Tensor]) -> Tensor:
    """Concatenated along time, in the memory order of `like`: operations on two orders at once are slow.

    Under a compiler, where views cost nothing, no size is looked at, so that none is compiled for.
    """
    if time_innermost(like) and (torch.compiler.is_compiling() or like.numel() > _SMALL):
        return torch.cat([part.movedim(0, -1) for part in parts], -1).movedim(-1, 0)
    return torch.cat(parts)


def doubling_scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    """The scan over axis 0 in plain PyTorch, in a few operations for each power of 2 in T.

    Without `init` the first row's `b` must be 0.
    """
    if a.device.type == "cpu":
        y = _in_buffers(a, b, init, reverse)
        # Where all is finite no zero has met an infinity or a NaN, and there was nothing to select.
        if math.isfinite(y.sum().item()):
            return y
    return selecting_scan(a, b, init, reverse)


def selecting_scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    """Hillis and Steele: a row composes its map with that of the row `distance` before it in scan order.

    A zero on either side of a product selects, and is differentiated as any other number. Compilers and
    transforms look into all of it.
    """

    def behind(x: Tensor, edge: Tensor) -> Tensor:
        return join(x, [x, edge] if reverse else [edge, x])

    length = a.shape[0]
    if init is not None:
        # The first row's map takes the state that enters, and nothing after.
        first, rest = (slice(length - 1, None), slice(length - 1)) if reverse else (slice(1), slice(1, None))
        entered = torch.addcmul(a[first], *_factors(b[first], init.unsqueeze(0)))
        a, b = behind(a[rest], entered), behind(b[rest], torch.zeros_like(entered))
    distance = 1
    # Once for a single row too, lest its `a` be handed back.
    while distance < max(2, length):
        before = slice(distance, None) if reverse else slice(length - distance)
        # Beyond the window all maps are 0: what they add to a row that is complete is nothing.
        edge = torch.zeros_like(a[:distance])
        a = torch.addcmul(a, *_factors(b, behind(a[before], edge)))
        if 2 * distance < length:
            b = torch.mul(*_factors(b, behind(b[before], edge)))
        distance *= 2
    return a


def _factors(b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of `b * y`: a zero `b` reads no infinity or NaN, and a state of 0 stays 0 behind an overflow."""
    return torch.where((y == 0) & torch.isinf(b), 0, b), hidden(b, y)


def hidden(c: Tensor, x: Tensor) -> Tensor:
    """`x` as a product with `c` reads it: a zero hides an infinity or a NaN, but no number."""
    return torch.where((c == 0) & ~torch.isfinite(x), 0, x)


def _in_buffers(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    """The same, bit for bit where all is finite, in two operations for each power of 2."""
    length = a.shape[0]
    # The maps beyond the window stay 0.
    margin = 1 << max(0, length - 1).bit_length() >> 1
    first, begin, sign = (-1, 0, 1) if reverse else (0, margin, -1)
    end = begin + length
    # Two pairs of buffers in turn: the maps of all rows, and of the window's alone.
    if time_innermost(a):
        buffers = a.new_zeros(4, *a.shape[1:], length + margin).movedim(-1, 1)
    else:
        buffers = a.new_zeros(4, length + margin, *a.shape[1:])
    maps = [(buffer, buffer[begin:end]) for buffer in buffers.unbind(0)]
    (a_all, a_rows), (b_all, b_rows), *spare = maps
    a_rows.copy_(a)
    b_rows.copy_(b)
    if init is not None:
        a_rows[first] = torch.addcmul(a[first], b[first], init)
        b_rows[first] = 0
    distance = 1
    while distance < length:
        before = slice(begin + sign * distance, end + sign * distance)
        torch.addcmul(a_rows, b_rows, a_all[before], out=spare[0][1])
        if 2 * distance < length:
            torch.mul(b_rows, b_all[before], out=spare[1][1])
        (a_all, a_rows), (b_all, b_rows), *spare = *spare, (a_all, a_rows), (b_all, b_rows)
        distance *= 2
    return a_rows
