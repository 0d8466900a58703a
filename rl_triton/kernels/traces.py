"""Eligibility traces and prefix sums, forward: `y[t] = x[t] + gamma[t-1] lambda[t-1] y[t-1]`.

A boundary starts anew. The prefix sum is a trace without decay.
"""

import triton
import triton.language as tl

from .tile import beyond, coefficient, flag, load, neighbours
from .transition import is_valid, step_value

STARTS_AT = tl.constexpr(1)


@triton.jit
def traces_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    first = at[2] == 0
    before = beyond(at, T, -1, DENSE)
    cut = flag(x.dones, strides.dones, at)
    if OPTION != STARTS_AT:
        # A flag that is the same for all steps has a row -1 too.
        cut = neighbours(cut, flag(x.dones, strides.dones, before), at, -1, DENSE) & (first == 0)
    valid = is_valid(x, strides, at)
    if x.valid is not None:
        preceded = neighbours(valid, is_valid(x, strides, before), at, -1, DENSE)
        cut = cut | (valid == 0) | ((preceded == 0) & (first == 0))
    decay = trace_decay(x, strides, at, numbers, DTYPE)
    if (x.gamma is not None) or (x.lambda_ is not None):
        # A seed enters row 0 with that row's own decay.
        previous = neighbours(decay, trace_decay(x, strides, before, numbers, DTYPE), at, -1, DENSE)
        decay = tl.where(first, decay, previous)
    value = step_value(x[0], strides[0], at, valid, DTYPE)
    return value, tl.where(cut, 0.0, decay), (value,)


@triton.jit
def trace_decay(x, strides, at, numbers, DTYPE: tl.constexpr):
    g = coefficient(x.gamma, strides.gamma, numbers[0], at, DTYPE)
    return g * coefficient(x.lambda_, strides.lambda_, numbers[1], at, DTYPE)


@triton.jit
def affine_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The bare scan: `a` and `b` as given."""
    a = load(x.a, strides.a, at, DTYPE)
    return a, load(x.b, strides.b, at, DTYPE), (a,)
