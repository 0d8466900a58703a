"""Retrace, backward: `y[t] = r + gamma E' - q + [not cut] gamma lambda c[t+1] y[t+1]`; target `y + q`.

`E' = sum_a pi(a|s') Q(s', a)` is given, or reduced here from action probabilities while they stream by.
"""

import triton
import triton.language as tl

from .tile import flag, load, load_where, locate, scale, shifted
from .transition import ahead_of, clipped, discounts, log_ratio, step_value, transition


@triton.jit
def retrace_log_terms(
    x, strides, at, T, A, gamma, lambda_, c_bar, rho_bar, bound_2,
    OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    terminated, truncated, cut, valid = transition(x, strides, at, T)
    expected = load(x.expected_next_q_values, strides.expected_next_q_values, at, DTYPE)
    expected = tl.where(terminated, 0.0, expected)
    ratio = log_ratio(x, strides, at, valid, DTYPE)
    following = log_ratio(x, strides, shifted(at, T, 1), cut == 0, DTYPE)
    return corrected(
        x, strides, at, T, gamma, lambda_, terminated, cut, valid, expected, ratio, following, c_bar, rho_bar,
        DTYPE, DENSE,
    )  # fmt: skip


@triton.jit
def retrace_terms(
    x, strides, at, T, A, gamma, lambda_, c_bar, rho_bar, bound_2,
    OPTION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    terminated, truncated, cut, valid = transition(x, strides, at, T)
    expected = expectation(x, strides, at, T, A, terminated, cut, DTYPE, BLOCK_A)
    ratio = probability_ratio(x, strides, at, valid, DTYPE)
    following = probability_ratio(x, strides, shifted(at, T, 1), cut == 0, DTYPE)
    return corrected(
        x, strides, at, T, gamma, lambda_, terminated, cut, valid, expected, ratio, following, c_bar, rho_bar,
        DTYPE, DENSE,
    )  # fmt: skip


@triton.jit
def corrected(
    x, strides, at, T, gamma, lambda_, terminated, cut, valid, expected, ratio, following, c_bar, rho_bar,
    DTYPE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    g, decay = discounts(x, strides, at, gamma, lambda_, terminated, cut, DTYPE)
    reward = step_value(x.rewards, strides.rewards, at, valid, DTYPE)
    q = step_value(x.q_values, strides.q_values, at, valid, DTYPE)
    a = reward + scale(g, expected) - q
    b = scale(decay, clipped(following, c_bar, DTYPE))
    rho = clipped(ratio, rho_bar, DTYPE)
    return a, b, ahead_of(x.q_values, strides.q_values, reward, q, expected, g, rho, at, T, cut, DTYPE, DENSE)


@triton.jit
def probability_ratio(x, strides, at, needed, DTYPE: tl.constexpr):
    """pi / mu of the action taken; 1 on rows that are not needed."""
    offset, mask = locate(strides.actions, at)
    action = tl.load(x.actions + offset, mask=mask & needed, other=0).to(tl.int64)
    offset, mask = locate(strides.action_probs_target, at)
    offset = offset + action * strides.action_probs_target[3]
    pi = tl.load(x.action_probs_target + offset, mask=mask & needed, other=0).to(DTYPE)
    mu = load_where(needed, x.action_probs_behavior, strides.action_probs_behavior, at, DTYPE)
    return tl.where(needed, pi / tl.where(needed, mu, 1.0), 1.0)


@triton.jit
def expectation(x, strides, at, T, A, terminated, cut, DTYPE: tl.constexpr, BLOCK_A: tl.constexpr):
    """`sum_a pi(a|s') Q(s', a)`, BLOCK_A actions at a time; a zero probability selects."""
    b, f, t, in_rows, in_time, first = at
    q_offset, q_mask = locate(strides.next_q_values_all, at)
    q_mask = q_mask & (terminated == 0)
    if x.next_action_probs_target is None:
        # The next row's policy; on a cut row its own stands in.
        own = (b, f, t + tl.where(cut, 0, 1), in_rows, in_time, first)
        p_ptr = x.action_probs_target
        p_stride = strides.action_probs_target
    else:
        own = at
        p_ptr = x.next_action_probs_target
        p_stride = strides.next_action_probs_target
    p_offset, p_mask = locate(p_stride, own)
    p_mask = p_mask & (terminated == 0)
    p_offset, q_offset = tl.broadcast(p_offset, q_offset)
    p_mask, q_mask = tl.broadcast(p_mask, q_mask)
    total = tl.zeros_like(q_offset).to(DTYPE)
    for start in range(0, A, BLOCK_A):
        action = start + tl.arange(0, BLOCK_A)[None, None, :]
        known = action < A
        p = tl.load(
            p_ptr + p_offset[:, :, None] + action * p_stride[3], mask=p_mask[:, :, None] & known, other=0
        ).to(DTYPE)
        q = tl.load(
            x.next_q_values_all + q_offset[:, :, None] + action * strides.next_q_values_all[3],
            mask=q_mask[:, :, None] & known,
            other=0,
        ).to(DTYPE)
        total += tl.sum(scale(p, q), axis=2)
    return total
