"""GAE, backward: `A[t] = r + gamma v' - v + [not cut] gamma lambda A[t+1]`; target `A + v`."""

import triton
import triton.language as tl

from .tile import scale, store
from .transition import discounts, next_value, step_value, transition


@triton.jit
def gae_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    terminated, truncated, cut, valid = transition(x, strides, at, T, DENSE)
    g, decay = discounts(x, strides, at, numbers, terminated, cut, DTYPE)
    value = step_value(x.value, strides.value, at, valid, DTYPE)
    v_next = next_value(x, strides, at, T, value, terminated, truncated, cut, DTYPE, DENSE)
    delta = step_value(x.rewards, strides.rewards, at, valid, DTYPE) + scale(g, v_next) - value
    return delta, decay, (value,)


@triton.jit
def emit_gae(outputs, stride, at, y, ahead, kept):
    store(outputs[0], stride, at, y)
    if outputs[1] is not None:
        store(outputs[1], stride, at, y + kept[0])
