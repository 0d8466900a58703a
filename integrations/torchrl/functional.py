"""TorchRL's functionals by name and signature, on the kernels of this library.

Arguments, shapes and results are those of `torchrl.objectives.value.functional`: tensors `[*B, T, *F]` with
`time_dim=-2` by default, flags that say the episode ends at row t, and `terminated` defaulting to `done`.
Flags may have any dtype, and nothing behind a terminated row is read. Every `vec_` name is the same function
as its plain one. What no recurrence here computes is handed on to TorchRL: `rolling_gamma=False` and TD(0).
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torchrl.objectives.value import functional
from torchrl.objectives.value.functional import td0_advantage_estimate, td0_return_estimate

from rl_triton import compute_discounted_returns, compute_gae, compute_lambda_returns, compute_vtrace

__all__ = [
    "generalized_advantage_estimate",
    "reward2go",
    "td0_advantage_estimate",
    "td0_return_estimate",
    "td1_advantage_estimate",
    "td1_return_estimate",
    "td_lambda_advantage_estimate",
    "td_lambda_return_estimate",
    "vec_generalized_advantage_estimate",
    "vec_td1_advantage_estimate",
    "vec_td1_return_estimate",
    "vec_td_lambda_advantage_estimate",
    "vec_td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]

Coefficient = float | Tensor

# Its annotations leave out the tensors that its functions take.
_torchrl: Any = functional


def generalized_advantage_estimate(
    gamma: Coefficient,
    lmbda: Coefficient,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets, `(advantage, value_target)`.

    `A[t] = r + (1 - terminated) gamma v' - v + (1 - done) gamma lmbda A[t+1]`, target `A + v`.

    Raises:
        RuntimeError: if the tensors differ in shape.

    Reference: Schulman et al., 2016, https://arxiv.org/abs/1506.02438
    """
    terminated = done if terminated is None else terminated
    _check_shapes(
        state_value=state_value,
        next_state_value=next_state_value,
        reward=reward,
        done=done,
        terminated=terminated,
    )
    advantage, target = compute_gae(
        reward,
        state_value,
        terminated,
        done,
        coefficient(gamma, reward),
        coefficient(lmbda, reward),
        next_values=next_state_value,
        time_dim=time_dim,
        return_targets=True,
    )
    return advantage, target


def td_lambda_return_estimate(
    gamma: Coefficient,
    lmbda: Coefficient,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """Lambda-returns.

    `G[t] = r + (1 - terminated) gamma ((1 - lmbda) v' + lmbda G[t+1])`, with `v'` for `G[t+1]` on done and
    last rows.
    `rolling_gamma=False`, which ties a per-step gamma to the whole trajectory ahead, runs TorchRL's loop.

    Raises:
        RuntimeError: if the tensors differ in shape.
    """
    if rolling_gamma is False:
        return _torchrl.td_lambda_return_estimate(
            gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma, time_dim=time_dim
        )
    terminated = done if terminated is None else terminated
    _check_shapes(next_state_value=next_state_value, reward=reward, done=done, terminated=terminated)
    return compute_lambda_returns(
        reward,
        next_state_value,
        terminated,
        done,
        coefficient(gamma, reward),
        coefficient(lmbda, reward),
        time_dim=time_dim,
    )


def td_lambda_advantage_estimate(
    gamma: Coefficient,
    lmbda: Coefficient,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """Lambda-returns less the value, `td_lambda_return_estimate(...) - state_value`.

    Raises:
        RuntimeError: if the tensors differ in shape.
    """
    _check_shapes(state_value=state_value, reward=reward)
    returns = td_lambda_return_estimate(
        gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma, time_dim=time_dim
    )
    return returns - state_value


def td1_return_estimate(
    gamma: Coefficient,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """Discounted returns.

    `G[t] = r + (1 - terminated) gamma G[t+1]`, with `v'` for `G[t+1]` on done and last rows.
    `rolling_gamma=False`, which ties a per-step gamma to the whole trajectory ahead, runs TorchRL's loop.

    Raises:
        RuntimeError: if the tensors differ in shape.
    """
    if rolling_gamma is False:
        return _torchrl.td1_return_estimate(
            gamma, next_state_value, reward, done, terminated, rolling_gamma, time_dim=time_dim
        )
    terminated = done if terminated is None else terminated
    _check_shapes(next_state_value=next_state_value, reward=reward, done=done, terminated=terminated)
    return compute_discounted_returns(
        reward, terminated, done, coefficient(gamma, reward), next_state_value, time_dim=time_dim
    )


def td1_advantage_estimate(
    gamma: Coefficient,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """Discounted returns less the value, `td1_return_estimate(...) - state_value`.

    Raises:
        RuntimeError: if the tensors differ in shape.
    """
    _check_shapes(state_value=state_value, reward=reward)
    returns = td1_return_estimate(gamma, next_state_value, reward, done, terminated, rolling_gamma, time_dim)
    return returns - state_value


def vtrace_advantage_estimate(
    gamma: Coefficient,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: Coefficient = 1.0,
    c_thresh: Coefficient = 1.0,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """V-trace advantages and value targets, `(advantage, value_target)`.

    `vs[t] = v + rho (r + gamma v' - v) + gamma c (vs[t+1] - v[t+1])`

    with `rho = min(rho_thresh, pi / mu)` and `c = min(c_thresh, pi / mu)`. `log_pi` is the current policy's
    log-probability of the stored action, `log_mu` the collecting policy's. The advantage contains `rho`.
    The thresholds may be tensors that broadcast.

    Raises:
        RuntimeError: if the tensors differ in shape.

    Reference: Espeholt et al., 2018, https://arxiv.org/abs/1802.01561
    """
    terminated = done if terminated is None else terminated
    _check_shapes(
        log_pi=log_pi,
        log_mu=log_mu,
        state_value=state_value,
        next_state_value=next_state_value,
        reward=reward,
        done=done,
        terminated=terminated,
    )
    targets, advantages = clipped_vtrace(
        log_pi,
        log_mu,
        state_value,
        reward,
        terminated,
        done,
        coefficient(gamma, reward),
        rho_thresh=rho_thresh,
        c_thresh=c_thresh,
        next_values=next_state_value,
        time_dim=time_dim,
    )
    return advantages, targets


def reward2go(reward: Tensor, done: Tensor, gamma: Coefficient, *, time_dim: int = -2) -> Tensor:
    """Discounted rewards to go, without a bootstrap at the window's end.

    `G[t] = r + (1 - done) gamma G[t+1]`

    Raises:
        ValueError: if `reward` and `done` differ in shape.
    """
    if reward.shape != done.shape:
        got = f"{list(reward.shape)} and {list(done.shape)}"
        raise ValueError(f"reward and done must have one shape, got {got}")
    return compute_discounted_returns(reward, done, gamma=coefficient(gamma, reward), time_dim=time_dim)


vec_generalized_advantage_estimate = generalized_advantage_estimate
vec_td_lambda_return_estimate = td_lambda_return_estimate
vec_td_lambda_advantage_estimate = td_lambda_advantage_estimate
vec_td1_return_estimate = td1_return_estimate
vec_td1_advantage_estimate = td1_advantage_estimate


def coefficient(value: Coefficient, like: Tensor) -> Coefficient:
    """A discount in one of the forms that TorchRL takes, as the core takes it.

    TorchRL also accepts integer tensors, any tensor of one element, tensors of a lower rank (aligned on the
    right) and another device.
    """
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        value = value.to(torch.get_default_dtype())
    value = value.to(like.device)
    if value.numel() == 1:
        return value.reshape(())
    return value.reshape((1,) * (like.ndim - value.ndim) + value.shape)


def clipped_vtrace(
    log_pi: Tensor,
    log_mu: Tensor,
    values: Tensor,
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor,
    gamma: Coefficient,
    *,
    rho_thresh: Coefficient,
    c_thresh: Coefficient,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`compute_vtrace` whose bars may be tensors, which are never read back to the host."""
    inputs = (values, rewards, terminateds, truncateds, gamma)
    if not isinstance(rho_thresh, Tensor) and not isinstance(c_thresh, Tensor):
        return compute_vtrace(log_pi, log_mu, *inputs, rho_thresh, c_thresh, **options)

    log_ratio = log_pi.to(torch.promote_types(log_pi.dtype, torch.float32)) - log_mu
    bars = (x if isinstance(x, Tensor) else log_ratio.new_full((), x) for x in (rho_thresh, c_thresh))
    log_rho, log_c = (log_ratio.clamp(max=bar.to(log_ratio).log()) for bar in bars)
    # The core clips one ratio with two bars. It gets the ratio clipped to rho, and c as rho * lambda_.
    # Where rho is 0 nothing is carried, and the quotient of two zeros must not be formed.
    zero = log_rho == -math.inf
    lambda_ = (log_c.masked_fill(zero, 0) - log_rho.masked_fill(zero, 0)).exp()
    on_policy = log_rho.new_zeros((1,) * log_rho.ndim)
    targets, advantages = compute_vtrace(
        log_rho, on_policy, *inputs, math.inf, math.inf, lambda_=lambda_, **options
    )
    steps = (log_pi, log_mu, values, rewards, options.get("next_values"), options.get("bootstrap_values"))
    dtype = reduce(torch.promote_types, (x.dtype for x in steps if x is not None))
    return targets.to(dtype), advantages.to(dtype)


def _check_shapes(**tensors: Tensor) -> None:
    """TorchRL's rule: no broadcasting between the tensors of one call."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise RuntimeError(f"all tensors must have one shape, got {got}")
