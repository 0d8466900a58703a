"""The affine scan: the one recurrence under all seven algorithms, and the one gradient rule.

    y[t] = a[t] + b[t] * y[t -+ 1]

Its adjoint is the same scan run the other way with `b` shifted by one row:
`g[t] = dy[t] + b[t +- 1] * g[t +- 1]`, `da = g`, `db = g * y[t -+ 1]`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def doubling_scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    """The scan over axis 0 in plain PyTorch, in two operations for each power of 2 in T.

    Without `init` the first row's `b` must be 0.
    """
    if a.device.type == "cpu":
        y = _scan(a, b, init, reverse, select=False)
        # Where all is finite no zero has met an infinity or a NaN, and there was nothing to select.
        if torch.isfinite(y.sum()):
            return y
    return _scan(a, b, init, reverse, select=True)


def _scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool, select: bool) -> Tensor:
    """Hillis and Steele: each row composes its map with that of the row `distance` before it in scan order."""
    length = a.shape[0]
    # Beyond the window all maps are 0: what they add to a row that is complete is nothing.
    margin = 1 << max(0, length - 1).bit_length() >> 1
    first, begin, sign = (-1, 0, 1) if reverse else (0, margin, -1)
    end = begin + length
    buffers = a.new_zeros(4, length + margin, *a.shape[1:]).unbind(0)
    (a_all, b_all), others = buffers[:2], buffers[2:]
    a_all[begin:end].copy_(a)
    b_all[begin:end].copy_(b)
    if init is not None:
        a_all[begin:end][first] = _step(a[first], b[first], init, select)
        b_all[begin:end][first] = 0
    distance = 1
    while distance < length:
        before = slice(begin + sign * distance, end + sign * distance)
        a_rows, b_rows = a_all[begin:end], b_all[begin:end]
        _step(a_rows, b_rows, a_all[before], select, out=others[0][begin:end])
        if 2 * distance < length:
            _step(None, b_rows, b_all[before], select, out=others[1][begin:end])
        (a_all, b_all), others = others, (a_all, b_all)
        distance *= 2
    return a_all[begin:end]


def _step(a: Tensor | None, b: Tensor, y: Tensor, select: bool, out: Tensor | None = None) -> Tensor:
    """`a + b * y`, with a zero `b` selecting `a` if asked for."""
    if not select:
        return torch.mul(b, y, out=out) if a is None else torch.addcmul(a, b, y, out=out)
    stepped = b * y if a is None else torch.addcmul(a, b, y)
    return torch.where(b == 0, torch.zeros_like(b) if a is None else a, stepped, out=out)
