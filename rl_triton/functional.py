"""The public functions. Shapes, flags and next values mean the same in all of them.

Inputs are `[num_envs, seq_len]` unless `time_dim` says otherwise. Row t is the transition from `s_t` to `s'_t` with
reward `r_t`; `terminateds[t]` says that the MDP ended there, `truncateds[t]` that the episode was cut
there and goes on unseen. Flags may have any dtype, nonzero is true. Rows with `valid[t]` false are no
transitions: they output 0 and nothing of them is read.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from . import _ops
from ._algorithms import (
    AFFINE,
    ELIGIBILITY,
    GAE,
    LAMBDA_RETURNS,
    RETRACE,
    RETRACE_LOG,
    TRACES,
    VTRACE,
)
from ._layout import check_bound


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 0.95,
    bootstrap_values: Tensor | None = None,
    last_value: Tensor | None = None,
    *,
    next_values: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
    return_targets: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    _exclusive(next_values, bootstrap_values, last_value)
    x = (
        rewards,
        terminateds,
        truncateds,
        valid,
        next_values,
        _required("values", values),
        bootstrap_values,
        last_value,
        gamma,
        lambda_,
    )
    outputs = _ops.run(GAE, x, time_dim, (), (return_targets,))
    return outputs if return_targets else outputs[0]


def compute_vtrace(
    log_pi_target: Tensor,
    log_pi_behavior: Tensor,
    values: Tensor,
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap_values: Tensor | None = None,
    last_value: Tensor | None = None,
    *,
    lambda_: float | Tensor = 1.0,
    rho_pg_bar: float | None = None,
    next_values: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> tuple[Tensor, Tensor]:
    _exclusive(next_values, bootstrap_values, last_value)
    rho_bar = check_bound("rho_bar", rho_bar)
    bounds = (
        rho_bar,
        check_bound("c_bar", c_bar),
        rho_bar if rho_pg_bar is None else check_bound("rho_pg_bar", rho_pg_bar),
    )
    x = (
        rewards,
        log_pi_target,
        log_pi_behavior,
        terminateds,
        truncateds,
        valid,
        next_values,
        _required("values", values),
        bootstrap_values,
        last_value,
        gamma,
        lambda_,
    )
    return _ops.run(VTRACE, x, time_dim, bounds)


def compute_retrace(
    action_probs_target: Tensor,
    action_probs_behavior: Tensor,
    q_values: Tensor,
    next_q_values_all: Tensor,
    actions: Tensor,
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 1.0,
    c_bar: float = 1.0,
    rho_bar: float = 1.0,
    *,
    next_action_probs_target: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> tuple[Tensor, Tensor]:
    if next_action_probs_target is None:
        _warn_next_policy()
    x = (
        rewards,
        action_probs_target,
        action_probs_behavior,
        q_values,
        next_q_values_all,
        actions,
        next_action_probs_target,
        terminateds,
        truncateds,
        valid,
        gamma,
        lambda_,
    )
    return _ops.run(RETRACE, x, time_dim, (check_bound("c_bar", c_bar), check_bound("rho_bar", rho_bar)))


def compute_retrace_from_log_probs(
    log_pi_target: Tensor,
    log_pi_behavior: Tensor,
    q_values: Tensor,
    expected_next_q_values: Tensor,
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 1.0,
    c_bar: float = 1.0,
    rho_bar: float = 1.0,
    *,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> tuple[Tensor, Tensor]:
    x = (
        rewards,
        log_pi_target,
        log_pi_behavior,
        q_values,
        expected_next_q_values,
        terminateds,
        truncateds,
        valid,
        gamma,
        lambda_,
    )
    return _ops.run(RETRACE_LOG, x, time_dim, (check_bound("c_bar", c_bar), check_bound("rho_bar", rho_bar)))


def compute_lambda_returns(
    rewards: Tensor,
    next_values: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 0.95,
    bootstrap_values: Tensor | None = None,
    *,
    last_value: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    x = (
        rewards,
        terminateds,
        truncateds,
        valid,
        _required("next_values", next_values),
        None,
        bootstrap_values,
        last_value,
        gamma,
        lambda_,
    )
    return _ops.run(LAMBDA_RETURNS, x, time_dim)[0]


def compute_discounted_returns(
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    bootstrap_values: Tensor | None = None,
    *,
    last_value: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    x = (rewards, terminateds, truncateds, valid, None, None, bootstrap_values, last_value, gamma, 1.0)
    return _ops.run(LAMBDA_RETURNS, x, time_dim)[0]


def compute_eligibility_traces(
    gradients: Tensor,
    dones: Tensor,
    gamma: float | Tensor,
    lambda_: float | Tensor,
    seed_values: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    x = (gradients, dones, valid, seed_values, gamma, lambda_)
    return _ops.run(ELIGIBILITY, x, time_dim, (), (False,))[0]


def compute_episodic_prefix_sum(
    inputs: Tensor,
    dones: Tensor,
    seed_values: Tensor | None = None,
    boundary: str = "ends_at",
    *,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    if boundary not in ("ends_at", "starts_at"):
        raise ValueError(f"boundary must be 'ends_at' or 'starts_at', got {boundary!r}")
    x = (inputs, dones, valid, seed_values, 1.0, 1.0)
    return _ops.run(TRACES, x, time_dim, (), (boundary == "starts_at",))[0]


def affine_scan(
    a: Tensor, b: Tensor, *, init: Tensor | None = None, reverse: bool = False, time_dim: int = -1
) -> Tensor:
    return _ops.run(AFFINE, (a, b, init), time_dim, (), (reverse,))[0]


_warned_next_policy = False


def _warn_next_policy() -> None:
    """Once per process; never under torch.compile, where a warning would break the graph."""
    global _warned_next_policy
    if _warned_next_policy or torch.compiler.is_compiling():
        return
    _warned_next_policy = True
    warnings.warn(
        "compute_retrace without next_action_probs_target takes the policy of the next row, and on cut rows the "
        "row's own policy in place of the policy at the final observation",
        stacklevel=3,
    )


def _required(name: str, value: Tensor) -> Tensor:
    if value is None:
        raise TypeError(f"{name} must be a torch.Tensor, got None")
    return value


def _exclusive(
    next_values: Tensor | None, bootstrap_values: Tensor | None, last_value: Tensor | None
) -> None:
    if next_values is None:
        return
    for name, value in (("bootstrap_values", bootstrap_values), ("last_value", last_value)):
        if value is not None:
            raise ValueError(
                f"{name} must be None when next_values is given, which names every next value itself"
            )
