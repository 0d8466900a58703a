"""The affine scan: the one recurrence under all seven algorithms, and the one gradient rule.

    y[t] = a[t] + b[t] * y[t -+ 1]

Its adjoint is the same scan run the other way with `b` shifted by one row:
`g[t] = dy[t] + b[t +- 1] * g[t +- 1]`, `da = g`, `db = g * y[t -+ 1]`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def blocked_scan(a: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    """The scan over axis 0 in plain PyTorch, in about 4 sqrt(T) operations.

    Time is cut into blocks of sqrt(T) rows that are walked side by side, each from a zero state,
    beside the product of their `b`; a short walk over the blocks gives the state that enters each.
    """
    length = a.shape[0]
    first = -1 if reverse else 0
    if init is None:
        # Without a state to enter, the first row reads no b.
        b = b.clone()
        b[first] = 0
        init = torch.zeros_like(a[0])
    size = max(1, 1 << round(math.log2(math.sqrt(length))))
    if length <= 16:
        size = length
    blocks = -(-length // size)
    padding = blocks * size - length
    if padding:
        # Rows that hand the state on unchanged.
        a = torch.cat([a, a.new_zeros(padding, *a.shape[1:])])
        b = torch.cat([b, b.new_ones(padding, *b.shape[1:])])
    batch = a.shape[1:]
    # states[0] is y from a zero state, states[1] the product of b.
    rows_a = torch.stack([a, torch.zeros_like(a)]).view(2, blocks, size, *batch)
    rows_b = b.reshape(1, blocks, size, *batch)
    stops = rows_b == 0
    states = torch.empty_like(rows_a)
    out, a_at, b_at, stop_at = states.unbind(2), rows_a.unbind(2), rows_b.unbind(2), stops.unbind(2)
    order = range(size - 1, -1, -1) if reverse else range(size)
    state = None
    for s in order:
        if state is None:
            torch.cat([a_at[s][:1], b_at[s]], out=out[s])
        else:
            torch.where(stop_at[s], a_at[s], torch.addcmul(a_at[s], b_at[s], state), out=out[s])
        state = out[s]
    y, product = states
    totals, factors = state
    entering = torch.empty_like(totals)
    carry = init
    for block in range(blocks - 1, -1, -1) if reverse else range(blocks):
        entering[block] = carry
        if blocks > 1:
            carry = _apply(totals[block], factors[block], carry)
    y = _apply(y, product, entering.unsqueeze(1))
    return y.view(blocks * size, *batch)[:length]


def _apply(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return torch.where(b == 0, a, torch.addcmul(a, b, y))
