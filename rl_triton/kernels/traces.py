"""Eligibility traces and prefix sums, forward: `y[t] = x[t] + gamma[t-1] lambda[t-1] y[t-1]`.

A boundary starts anew. The prefix sum is a trace without decay.
"""

import triton
import triton.language as tl

from .tile import coefficient, flag, load, shifted
from .transition import step_value

STARTS_AT = tl.constexpr(1)


@triton.jit
def traces_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    b, f, t, in_rows, in_time = at
    before = shifted(at, T, -1)
    if OPTION == STARTS_AT:
        cut = flag(x.dones, strides.dones, at)
    else:
        # A flag that is the same for all steps has a row -1 too.
        cut = flag(x.dones, strides.dones, before) & (t > 0)
    valid = tl.full([1, 1], 1, tl.int1)
    if x.valid is not None:
        valid = flag(x.valid, strides.valid, at)
        cut = cut | (valid == 0) | ((flag(x.valid, strides.valid, before) == 0) & (t > 0))
    # A seed enters row 0 with that row's own decay.
    decays_at = (b, f, tl.maximum(t - 1, 0), in_rows, in_time)
    g = coefficient(x.gamma, strides.gamma, numbers[0], decays_at, DTYPE)
    decay = g * coefficient(x.lambda_, strides.lambda_, numbers[1], decays_at, DTYPE)
    value = step_value(x[0], strides[0], at, valid, DTYPE)
    return value, tl.where(cut, 0.0, decay), (value,)


@triton.jit
def affine_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The bare scan: `a` and `b` as given."""
    a = load(x.a, strides.a, at, DTYPE)
    return a, load(x.b, strides.b, at, DTYPE), (a,)
