"""Retrace, backward: `y[t] = r + gamma E' - q + [not cut] gamma lambda c[t+1] y[t+1]`; target `y + q`.

`E' = sum_a pi(a|s') Q(s', a)` is given, or reduced here from action probabilities while they stream by.
"""

import triton
import triton.language as tl

from .tile import beyond, load, locate, neighbours, scale
from .transition import ahead_of, clipped, discounts, is_valid, log_ratio, step_value, transition


@triton.jit
def retrace_log_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    terminated, truncated, cut, valid = transition(x, strides, at, T, DENSE)
    expected = load(x.expected_next_q_values, strides.expected_next_q_values, at, DTYPE)
    expected = tl.where(terminated, 0.0, expected)
    ratio = log_ratio(x, strides, at, valid, DTYPE)
    on = beyond(at, T, 1, DENSE)
    following = neighbours(ratio, log_ratio(x, strides, on, is_valid(x, strides, on), DTYPE), at, 1, DENSE)
    return corrected(
        x, strides, at, T, numbers, terminated, cut, valid, expected, ratio, following, DTYPE, DENSE
    )


@triton.jit
def retrace_terms(
    x, strides, at, T, numbers,
    A: tl.constexpr, OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    terminated, truncated, cut, valid = transition(x, strides, at, T, DENSE)
    expected = expectation(x, strides, at, terminated, cut, A, OPTION, DTYPE, BLOCK_A)
    ratio = probability_ratio(x, strides, at, valid, DTYPE)
    on = beyond(at, T, 1, DENSE)
    needed = is_valid(x, strides, on)
    if DENSE > 1:
        # Only the first row of the next segment: the gather is what costs.
        needed = needed & (on[2] % DENSE == 0)
    following = probability_ratio(x, strides, on, needed, DTYPE)
    following = neighbours(ratio, following, at, 1, DENSE)
    return corrected(
        x, strides, at, T, numbers, terminated, cut, valid, expected, ratio, following, DTYPE, DENSE
    )


@triton.jit
def corrected(
    x, strides, at, T, numbers, terminated, cut, valid, expected, ratio, following,
    DTYPE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    _, _, c_bar, rho_bar, _ = numbers
    g, decay = discounts(x, strides, at, numbers, terminated, cut, DTYPE)
    reward = step_value(x.rewards, strides.rewards, at, valid, DTYPE)
    q = step_value(x.q_values, strides.q_values, at, valid, DTYPE)
    a = reward + scale(g, expected) - q
    b = scale(decay, clipped(following, c_bar, DTYPE))
    rho = clipped(ratio, rho_bar, DTYPE)
    return a, b, ahead_of(x.q_values, strides.q_values, reward, q, expected, g, rho, at, T, cut, DTYPE, DENSE)


@triton.jit
def probability_ratio(x, strides, at, needed, DTYPE: tl.constexpr):
    """pi / mu of the action taken where needed, else 1: the action of an invalid row may be anything."""
    offset, mask = locate(strides.actions, at)
    action = tl.load(x.actions + offset, mask=mask & needed, other=0).to(tl.int64)
    offset, mask = locate(strides.action_probs_target, at)
    offset = offset + action * strides.action_probs_target[5]
    pi = tl.load(x.action_probs_target + offset, mask=mask & needed, other=0).to(DTYPE)
    mu = load(x.action_probs_behavior, strides.action_probs_behavior, at, DTYPE)
    return tl.where(needed, pi / tl.where(needed, mu, 1.0), 1.0)


@triton.jit
def expectation(
    x, strides, at, terminated, cut,
    A: tl.constexpr, VECTOR: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """`sum_a pi(a|s') Q(s', a)`, BLOCK_A actions at a time; a zero probability selects."""
    b, f, t, in_rows, in_time = at
    if x.next_action_probs_target is None:
        # The next row's policy; on a cut row its own stands in.
        at_p = (b, f, t + tl.where(cut, 0, 1), in_rows, in_time)
        p_ptr = x.action_probs_target
        p_stride = strides.action_probs_target
    else:
        at_p = at
        p_ptr = x.next_action_probs_target
        p_stride = strides.next_action_probs_target
    # Read whether needed or not: to wait for the flags first costs more than the bytes.
    inside = (in_rows & in_time)[:, :, None]
    products = tl.zeros([inside.shape[0], inside.shape[1], BLOCK_A], DTYPE)
    for start in tl.static_range(0, A, BLOCK_A):
        action = start + tl.arange(0, BLOCK_A)[None, None, :]
        # Masks change every VECTOR elements at most.
        mask = inside & (action // VECTOR < A // VECTOR)
        p = tl.load(p_ptr + action_offset(p_stride, at_p, action, VECTOR), mask=mask, other=0).to(DTYPE)
        q_offset = action_offset(strides.next_q_values_all, at, action, VECTOR)
        products += scale(p, tl.load(x.next_q_values_all + q_offset, mask=mask, other=0).to(DTYPE))
    return tl.where(terminated, 0.0, tl.sum(products, axis=2))


@triton.jit
def action_offset(stride, at, action, VECTOR: tl.constexpr):
    """Offsets on a third axis; what is a multiple of VECTOR is shown to the compiler as one."""
    offset, _ = locate(stride, at)
    offset = offset[:, :, None]
    if VECTOR > 1:
        offset = offset // VECTOR * VECTOR
    return offset + action * stride[5]
