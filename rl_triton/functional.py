"""The public functions. What is said here holds for all of them.

**Rows.** Row t is the transition from `s_t` to `s'_t`, the observation really reached, before any reset, with
reward `r_t`. `terminateds[t]`: the MDP ended there, and nothing is bootstrapped from `s'_t`. `truncateds[t]`:
the episode was cut there, and `V(s'_t)` stands for what was not seen; where both are set termination wins.
`dones[t]` is either of them: the episode ends at row t, which still belongs to it. Rows with `valid[t]` false
are no transitions: they output 0, and nothing of them is read into others. A row is *cut* if it is done, the
last one, or followed by an invalid one. Flags may have any dtype; nonzero is true.

**Shapes.** Inputs are `[num_envs, seq_len]`, or have any rank with time at `time_dim` (`[T, N]`:
`time_dim=0`). Per-step inputs share a rank and broadcast against each other; outputs have the common shape
and are contiguous. `last_value`, `seed_values` and `init` lack the time axis or have it with size 1. `gamma`
and `lambda_` are numbers, 0-d tensors, or tensors of the inputs' rank that broadcast (`[N, 1]`, `[1, T]`).

**Next values.** `v'[t]`, the value of `s'_t`, is `next_values[t]` where `next_values` is given, exactly as
given. Otherwise it is `values[t+1]`, except on truncated rows and rows before an invalid one:
`bootstrap_values[t]`; and on the last row: `last_value` if it is open, `bootstrap_values[T-1]` if it is
truncated, or the one of the two that is given. Where neither is, `v'` counts as 0. What is not needed is not
read: such slots may hold anything, NaN too. `next_values` excludes the other two.

**Numbers.** The output dtype is the promoted dtype of the floating inputs; flags, `gamma` and `lambda_` do
not count. bf16, fp16 and fp32 are computed in fp32, fp64 in fp64. Integer rewards, gradients and inputs are
promoted. A NaN that is used shows in its own episode and in no other. Gradients reach every floating input.

**Errors.** A `ValueError` or `TypeError` names the argument, what was expected and what came. Only metadata
is checked, so that no call waits for the device.
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
    """Generalised advantage estimates, and value targets with `return_targets`.

    `A[t] = r[t] + γ v'[t] − v[t] + γ λ A[t+1]`, target `A[t] + v[t]`

    Without `v'[t]` where row t terminated, and without `A[t+1]` where it is cut.

    Returns:
        Advantages, or `(advantages, targets)`.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or `next_values` comes with
            `bootstrap_values` or `last_value`.

    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2016,
    <https://arxiv.org/abs/1506.02438>.

    Examples:
        A time limit ends an episode at row 1, in a state worth 4; the window ends in one worth 2.

        >>> compute_gae(
        ...     rewards=torch.tensor([[1.0, 2.0, 3.0]]),
        ...     values=torch.tensor([[0.5, 1.0, 3.0]]),
        ...     terminateds=torch.tensor([[0, 0, 0]]),
        ...     truncateds=torch.tensor([[0, 1, 0]]),
        ...     gamma=0.9,
        ...     lambda_=0.8,
        ...     bootstrap_values=torch.tensor([[0.0, 4.0, 0.0]]),
        ...     last_value=torch.tensor([2.0]),
        ... )
        tensor([[4.7120, 4.6000, 1.8000]])
    """
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
    """V-trace targets and policy-gradient advantages, for rollouts of an older policy.

    `y[t] = ρ[t] (r[t] + γ v'[t] − v[t]) + γ λ c[t] y[t+1]`, target `y[t] + v[t]`, advantage
    `ρ_pg[t] (r[t] + γ target[t+1] − v[t])`

    With the ratio `π/μ = exp(log_pi_target − log_pi_behavior)` of the action taken, `ρ = min(rho_bar, π/μ)`,
    `c = min(c_bar, π/μ)` and `ρ_pg = min(rho_pg_bar, π/μ)`. A terminated row has no `v'[t]`; a cut row takes
    no `y[t+1]`, and its advantage `v'[t]` in place of `target[t+1]`. The advantage contains `ρ_pg`: a loss
    should not weigh it again. Rows must be in the order of time.

    Args:
        rho_pg_bar: `rho_bar` where it is not given.

    Returns:
        `(targets, advantages)`.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, a bar is negative, or
            `next_values` comes with `bootstrap_values` or `last_value`.

    Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
    Architectures, 2018, <https://arxiv.org/abs/1802.01561>.

    Examples:
        Ratios 2, which is clipped, 0.5 and 1; otherwise the window of `compute_gae`.

        >>> targets, advantages = compute_vtrace(
        ...     log_pi_target=torch.log(torch.tensor([[0.8, 0.3, 0.5]])),
        ...     log_pi_behavior=torch.log(torch.tensor([[0.4, 0.6, 0.5]])),
        ...     values=torch.tensor([[0.5, 1.0, 3.0]]),
        ...     rewards=torch.tensor([[1.0, 2.0, 3.0]]),
        ...     terminateds=torch.tensor([[0, 0, 0]]),
        ...     truncateds=torch.tensor([[0, 1, 0]]),
        ...     gamma=0.9,
        ...     bootstrap_values=torch.tensor([[0.0, 4.0, 0.0]]),
        ...     last_value=torch.tensor([2.0]),
        ... )
        >>> targets
        tensor([[3.9700, 3.3000, 4.8000]])
        >>> advantages
        tensor([[3.4700, 2.3000, 1.8000]])
    """
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
    """Retrace(λ) targets and advantages of the actions taken, from the probabilities of discrete actions.

    `y[t] = r[t] + γ E'[t] − q[t] + γ λ c[t+1] y[t+1]`, target `y[t] + q[t]`, advantage
    `ρ[t] (r[t] + γ target[t+1] − q[t])`

    With `E'[t] = Σ_a π(a|s'_t) Q(s'_t, a)`, the ratio `π/μ` of the action taken, `c = min(c_bar, π/μ)` and
    `ρ = min(rho_bar, π/μ)`. A terminated row has no `E'[t]`; a cut row takes no `y[t+1]`, and its advantage
    `E'[t]` in place of `target[t+1]`. An action of probability 0 is not read.

    Args:
        action_probs_target: `π(·|s_t)`; like the other two with a last axis of actions, behind the per-step
            shape. `time_dim` counts without that axis.
        action_probs_behavior: `μ` of the action taken, per step.
        q_values: `Q(s_t, a_t)` of the action taken, per step.
        next_q_values_all: `Q(s'_t, ·)`.
        actions: of any integer dtype. One outside of `[0, A)` is the caller's error, and nothing checks it.
        next_action_probs_target: `π(·|s'_t)`. Without it row t+1's `action_probs_target` serves and, on cut
            rows, row t's own, which is an approximation and warned about once.

    Returns:
        `(targets, advantages)`.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or a bar is negative.

    Munos et al., Safe and Efficient Off-Policy Reinforcement Learning, 2016,
    <https://arxiv.org/abs/1606.02647>.

    Examples:
        Ratios 2, which is clipped, 0.5 and 1; expected next Q-values 1, 4 and 2.

        >>> targets, advantages = compute_retrace(
        ...     action_probs_target=torch.tensor(
        ...         [[[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]]
        ...     ),
        ...     action_probs_behavior=torch.tensor([[0.25, 0.5, 0.5]]),
        ...     q_values=torch.tensor([[0.5, 1.0, 3.0]]),
        ...     next_q_values_all=torch.tensor([[[4.0, 0.0], [2.0, 6.0], [1.0, 3.0]]]),
        ...     actions=torch.tensor([[0, 0, 1]]),
        ...     rewards=torch.tensor([[1.0, 2.0, 3.0]]),
        ...     terminateds=torch.tensor([[0, 0, 0]]),
        ...     truncateds=torch.tensor([[0, 1, 0]]),
        ...     gamma=0.9,
        ...     next_action_probs_target=torch.tensor(
        ...         [[[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]]
        ...     ),
        ... )
        >>> targets
        tensor([[3.9700, 5.6000, 4.8000]])
        >>> advantages
        tensor([[5.5400, 2.3000, 1.8000]])
    """
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
    """Retrace(λ) as `compute_retrace`, from log-probabilities of the actions taken: for continuous actions.

    `y[t] = r[t] + γ E'[t] − q[t] + γ λ c[t+1] y[t+1]`, target `y[t] + q[t]`, advantage
    `ρ[t] (r[t] + γ target[t+1] − q[t])`

    With `π/μ = exp(log_pi_target − log_pi_behavior)`. A terminated row has no `E'[t]`; a cut row takes no
    `y[t+1]`, and its advantage `E'[t]` in place of `target[t+1]`.

    Args:
        expected_next_q_values: `E'[t]`, the expectation of `Q(s'_t, a)` over actions of the target policy, or
            an estimate of it from samples.

    Returns:
        `(targets, advantages)`.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or a bar is negative.

    Munos et al., Safe and Efficient Off-Policy Reinforcement Learning, 2016,
    <https://arxiv.org/abs/1606.02647>.

    Examples:
        >>> targets, advantages = compute_retrace_from_log_probs(
        ...     log_pi_target=torch.log(torch.tensor([[0.8, 0.3, 0.5]])),
        ...     log_pi_behavior=torch.log(torch.tensor([[0.4, 0.6, 0.5]])),
        ...     q_values=torch.tensor([[0.5, 1.0, 3.0]]),
        ...     expected_next_q_values=torch.tensor([[1.0, 4.0, 2.0]]),
        ...     rewards=torch.tensor([[1.0, 2.0, 3.0]]),
        ...     terminateds=torch.tensor([[0, 0, 0]]),
        ...     truncateds=torch.tensor([[0, 1, 0]]),
        ...     gamma=0.9,
        ... )
        >>> targets
        tensor([[3.9700, 5.6000, 4.8000]])
    """
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
    """λ-returns, the targets of TD(λ).

    `G[t] = r[t] + γ ((1 − λ) v'[t] + λ G[t+1])`

    A terminated row returns its reward; any other cut row `r[t] + γ v'[t]`.

    Args:
        next_values: `V(s'_t)` of every row.
        bootstrap_values: replaces `next_values[t]` on truncated rows and rows before an invalid one.
        last_value: replaces the last row's where that is open, or truncated without `bootstrap_values`.

    Returns:
        The returns.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.

    Sutton and Barto, Reinforcement Learning: An Introduction, 2018, chapter 12.

    Examples:
        >>> compute_lambda_returns(
        ...     rewards=torch.tensor([[1.0, 2.0, 3.0]]),
        ...     next_values=torch.tensor([[1.0, 4.0, 2.0]]),
        ...     terminateds=torch.tensor([[0, 0, 0]]),
        ...     truncateds=torch.tensor([[0, 1, 0]]),
        ...     gamma=0.9,
        ...     lambda_=0.8,
        ... )
        tensor([[5.2120, 5.6000, 4.8000]])
    """
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
    """Discounted returns, or rewards to go.

    `G[t] = r[t] + γ G[t+1]`

    A terminated row returns its reward; any other cut row `r[t] + γ v'[t]`, where `v'[t]` is
    `bootstrap_values[t]`, on an open last row `last_value`, and 0 where neither is given.

    Returns:
        The returns.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.

    Sutton and Barto, Reinforcement Learning: An Introduction, 2018, chapter 3.

    Examples:
        >>> compute_discounted_returns(
        ...     rewards=torch.tensor([[1.0, 2.0, 3.0]]),
        ...     terminateds=torch.tensor([[0, 0, 0]]),
        ...     truncateds=torch.tensor([[0, 1, 0]]),
        ...     gamma=0.9,
        ...     bootstrap_values=torch.tensor([[0.0, 4.0, 0.0]]),
        ...     last_value=torch.tensor([2.0]),
        ... )
        tensor([[6.0400, 5.6000, 4.8000]])
    """
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
    """Accumulating eligibility traces, forward in time.

    `z[t] = x[t] + γ[t−1] λ[t−1] z[t−1]`

    Without `z[t−1]` after a done row and after an invalid one. `z[−1]` is `seed_values`, weighed by row 0's
    γ and λ, or 0.

    Args:
        gradients: `x`, whatever accumulates.
        seed_values: the last trace of the window before, or 0 in envs that were done there.

    Returns:
        The traces.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.

    Sutton and Barto, Reinforcement Learning: An Introduction, 2018, chapter 12.

    Examples:
        >>> gradients, dones = torch.ones(1, 4), torch.tensor([[0, 1, 0, 0]])
        >>> compute_eligibility_traces(gradients, dones, gamma=0.9, lambda_=0.8)
        tensor([[1.0000, 1.7200, 1.0000, 1.7200]])
    """
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
    """Running sums that start anew with every episode.

    `y[t] = x[t] + y[t−1]`

    Without `y[t−1]` after a done row and after an invalid one. `y[−1]` is `seed_values`, or 0.

    Args:
        inputs: `x`, whatever is summed: rewards for the return so far, ones for the step count.
        seed_values: the last sum of the window before, or 0 in envs that were done there.
        boundary: `"ends_at"`: a done row is the last of its episode. `"starts_at"`: it is the first one.

    Returns:
        The sums.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device, or `boundary` is unknown.

    Blelloch, Prefix Sums and Their Applications, 1990: this is a segmented scan.

    Examples:
        >>> inputs = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> dones = torch.tensor([[0, 1, 0, 0]])
        >>> compute_episodic_prefix_sum(inputs, dones)
        tensor([[1., 3., 3., 7.]])
        >>> compute_episodic_prefix_sum(inputs, dones, boundary="starts_at")
        tensor([[1., 2., 5., 9.]])
    """
    if boundary not in ("ends_at", "starts_at"):
        raise ValueError(f"boundary must be 'ends_at' or 'starts_at', got {boundary!r}")
    x = (inputs, dones, valid, seed_values, 1.0, 1.0)
    return _ops.run(TRACES, x, time_dim, (), (boundary == "starts_at",))[0]


def affine_scan(
    a: Tensor, b: Tensor, *, init: Tensor | None = None, reverse: bool = False, time_dim: int = -1
) -> Tensor:
    """The first-order linear recurrence under all functions here, for those who have another one.

    `y[t] = a[t] + b[t] y[t−1]`, or `y[t] = a[t] + b[t] y[t+1]` with `reverse`

    There are no flags: a boundary is a row with `b[t] = 0`, which reads nothing of its neighbour, NaN
    included. Rows are composed in parallel: products of successive `b` must stay within the dtype's range
    too, not `y` alone.

    Args:
        init: the `y` before the first row, or with `reverse` after the last; 0 if it is not given.

    Returns:
        `y`, differentiable in `a`, `b` and `init`.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.

    Blelloch, Prefix Sums and Their Applications, 1990.

    Examples:
        >>> a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.5, 0.5])
        >>> affine_scan(a, b)
        tensor([1.0000, 2.5000, 4.2500])
        >>> affine_scan(a, b, reverse=True)
        tensor([2.7500, 3.5000, 3.0000])
    """
    return _ops.run(AFFINE, (a, b, init), time_dim, (), (reverse,))[0]


_warned_next_policy = False


def _warn_next_policy() -> None:
    """Once per process; never under torch.compile, where a warning would break the graph."""
    global _warned_next_policy
    if _warned_next_policy or torch.compiler.is_compiling():
        return
    _warned_next_policy = True
    warnings.warn(
        "compute_retrace without next_action_probs_target takes the policy of the next row, and on cut rows "
        "the row's own policy in place of the policy at the final observation",
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
