"""V-trace, backward: `y[t] = rho (r + gamma v' - v) + [not cut] gamma lambda c y[t+1]`; target `y + v`."""

import triton
import triton.language as tl

from .tile import scale
from .transition import ahead_of, clipped, discounts, log_ratio, next_value, step_value, transition


@triton.jit
def vtrace_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    _, _, rho_bar, c_bar, rho_pg_bar = numbers
    terminated, truncated, cut, valid = transition(x, strides, at, T, DENSE)
    g, decay = discounts(x, strides, at, numbers, terminated, cut, DTYPE)
    ratio = log_ratio(x, strides, at, valid, DTYPE)
    reward = step_value(x.rewards, strides.rewards, at, valid, DTYPE)
    value = step_value(x.value, strides.value, at, valid, DTYPE)
    v_next = next_value(x, strides, at, T, value, terminated, truncated, cut, DTYPE, DENSE)
    a = scale(clipped(ratio, rho_bar, DTYPE), reward + scale(g, v_next) - value)
    b = scale(decay, clipped(ratio, c_bar, DTYPE))
    rho = clipped(ratio, rho_pg_bar, DTYPE)
    return a, b, ahead_of(x.value, strides.value, reward, value, v_next, g, rho, at, T, cut, DTYPE, DENSE)
