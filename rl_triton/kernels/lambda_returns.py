"""Lambda-returns, backward: `G[t] = r + gamma ((1 - lambda) v' + lambda G[t+1])`, on cut rows `r + gamma v'`.

Discounted returns are these with lambda = 1.
"""

import triton
import triton.language as tl

from .tile import coefficient, scale
from .transition import discounts, next_value, step_value, transition


@triton.jit
def lambda_returns_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    terminated, truncated, cut, valid = transition(x, strides, at, T, DENSE)
    g, decay = discounts(x, strides, at, numbers, terminated, cut, DTYPE)
    reward = step_value(x.rewards, strides.rewards, at, valid, DTYPE)
    bootstrapped = 1.0 - coefficient(x.lambda_, strides.lambda_, numbers[1], at, DTYPE)
    v_next = next_value(x, strides, at, T, reward, terminated, truncated, cut, DTYPE, DENSE)
    v_next = scale(tl.where(cut, 1.0, bootstrapped), v_next)
    return reward + scale(g, v_next), decay, (reward,)
