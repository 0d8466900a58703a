"""What the flags make of a row, and the value of its next state: shared by all backward recurrences."""

import triton
import triton.language as tl

from .tile import beyond, coefficient, flag, load, load_next, neighbours, scale, store


@triton.jit
def transition(x, strides, at, T, DENSE: tl.constexpr):
    """(terminated, truncated, cut, valid); an invalid row counts as terminated and cut."""
    terminated = flag(x.terminateds, strides.terminateds, at)
    truncated = tl.full([1, 1], 0, tl.int1)
    valid = is_valid(x, strides, at)
    cut = terminated | (at[2] == T - 1)
    if x.truncateds is not None:
        truncated = flag(x.truncateds, strides.truncateds, at)
        cut = cut | truncated
    if x.valid is not None:
        followed = neighbours(valid, is_valid(x, strides, beyond(at, T, 1, DENSE)), at, 1, DENSE)
        cut = cut | (followed == 0) | (valid == 0)
        terminated = terminated | (valid == 0)
    return terminated, truncated, cut, valid


@triton.jit
def is_valid(x, strides, at):
    if x.valid is None:
        return tl.full([1, 1], 1, tl.int1)
    else:
        return flag(x.valid, strides.valid, at)


@triton.jit
def step_value(ptr, stride, at, valid, DTYPE: tl.constexpr):
    """A per-step value, 0 on invalid rows."""
    return tl.where(valid, load(ptr, stride, at, DTYPE), 0.0)


@triton.jit
def discounts(x, strides, at, numbers, terminated, cut, DTYPE: tl.constexpr):
    """(gamma where a next value counts, gamma * lambda where the trace goes on)."""
    g = coefficient(x.gamma, strides.gamma, numbers[0], at, DTYPE)
    decay = g * coefficient(x.lambda_, strides.lambda_, numbers[1], at, DTYPE)
    return tl.where(terminated, 0.0, g), tl.where(cut, 0.0, decay)


@triton.jit
def next_value(x, strides, at, T, own, terminated, truncated, cut, DTYPE: tl.constexpr, DENSE: tl.constexpr):
    """The value of `s'_t`: where it comes from depends on the row, whose own value is `own`."""
    last = at[2] == T - 1
    value = tl.zeros([1, 1], DTYPE)
    if x.next_values is not None:
        value = load(x.next_values, strides.next_values, at, DTYPE)
    elif x.value is not None:
        value = tl.where(cut, 0.0, load_next(x.value, strides.value, at, T, own, DTYPE, DENSE))
    if x.bootstrap_values is not None:
        needed = cut
        if x.next_values is not None:
            needed = (cut & (last == 0)) | (last & truncated)
        needed = needed & (terminated == 0)
        # Read whether needed or not: to wait for the flags first costs more than the bytes.
        bootstrap = load(x.bootstrap_values, strides.bootstrap_values, at, DTYPE)
        value = tl.where(needed, bootstrap, value)
    if x.last_value is not None:
        needed = last
        if x.bootstrap_values is not None:
            needed = last & (truncated == 0)
        value = tl.where(needed, load(x.last_value, strides.last_value, at, DTYPE), value)
    return tl.where(terminated, 0.0, value)


@triton.jit
def clipped(ratio, bound, DTYPE: tl.constexpr):
    """min(bound, ratio); a NaN stays one."""
    bound = tl.full([1, 1], bound, DTYPE)
    return tl.where(ratio > bound, bound, ratio)


@triton.jit
def log_ratio(x, strides, at, valid, DTYPE: tl.constexpr):
    """pi / mu from log-probabilities."""
    log_pi = step_value(x.log_pi_target, strides.log_pi_target, at, valid, DTYPE)
    log_mu = step_value(x.log_pi_behavior, strides.log_pi_behavior, at, valid, DTYPE)
    return tl.exp(log_pi - log_mu)


@triton.jit
def ahead_of(
    baseline, baseline_stride, reward, value, v_next, g, rho, at, T, cut,
    DTYPE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """What `emit_corrected` needs: an advantage looks ahead to the next target, on cut rows to `v_next`."""
    following = load_next(baseline, baseline_stride, at, T, value, DTYPE, DENSE)
    known = reward + scale(g, tl.where(cut, v_next, following)) - value
    return value, rho, known, tl.where(cut, 0.0, g)


@triton.jit
def emit_corrected(outputs, stride, at, y, ahead, kept):
    """Targets y + baseline, and advantages against the next row's target."""
    value, rho, known, g = kept
    store(outputs[0], stride, at, y + value)
    store(outputs[1], stride, at, scale(rho, known + scale(g, ahead)))
