"""Retrace, discounted returns, eligibility traces and episodic sums as TensorDict modules.

They read their inputs from the tensordict and call no network. `set_keys` renames entries, flat or nested.
Reward, done, terminated and truncated flags are read under `"next"`; a flag says that the episode ends at
row t. The time dimension is `time_dim` (of the call, else of the constructor), else the one named `"time"`,
else the last batch dimension; calls with tensors, which show no batch size, should name it. Entries
`[*B, T]` and `[*B, T, 1]` mean the same, and `valid` masks rows out of the computation. Without
`differentiable` the results carry no graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.utils import unravel_key
from torch import Tensor

from rl_triton import (
    compute_discounted_returns,
    compute_eligibility_traces,
    compute_episodic_prefix_sum,
    compute_retrace,
    compute_retrace_from_log_probs,
)

from ._common import Estimator, estimator_forward, match_rank, optional
from .functional import Coefficient
from .vtrace import joint_log_prob

__all__ = ["DiscountedReturn", "EligibilityTrace", "EpisodicPrefixSum", "Retrace"]


class _Recurrence(Estimator):
    """One function of the library with its inputs and outputs in a tensordict."""

    def __init__(self, *, differentiable: bool, time_dim: int | None, **coefficients: Coefficient):
        super().__init__(value_network=None, differentiable=differentiable)
        self.time_dim = time_dim
        for name, value in coefficients.items():
            # A float stays one, so that it is exact in fp64.
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def _coefficient(self, name: str, device: torch.device) -> Coefficient:
        value = getattr(self, name)
        return super()._coefficient(name, device) if isinstance(value, Tensor) else value

    def _transitions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor, Coefficient]:
        """`(reward, terminated, done, gamma)` of each row."""
        following = self._next(tensordict)
        reward = self._reward(following)
        done, terminated = self._flags(following)
        return reward, _align(terminated, reward), _align(done, reward), self._gamma(tensordict, reward)

    def _options(self, tensordict: TensorDictBase, time_dim: int | None, like: Tensor) -> dict[str, Any]:
        valid = optional(tensordict, self.tensor_keys.valid)
        return {
            "time_dim": self._get_time_dim(time_dim, tensordict),
            "valid": None if valid is None else _align(valid, like),
        }


class Retrace(_Recurrence):
    """Retrace(lambda) targets and advantages for the Q-values of stored actions.

    `y[t] = r + gamma E' - q + gamma lmbda c[t+1] y[t+1]`, target `y + q`, with `c = min(c_thresh, pi / mu)`
    and `E'` the current policy's expected Q-value at the next observation. The advantage is weighted by
    `min(rho_thresh, pi / mu)`.

    Discrete actions, the default, take `[*B, T, A]` entries: Q-values of all actions and the current
    policy's probabilities, here and under `"next"`. Without the probabilities under `"next"` those of row
    t+1 serve, and on cut rows those of row t, which is an approximation and warned about once. The stored
    action is an index or one-hot. With `continuous=True` the module takes the Q-value and log-probability
    of the stored action, and the expected Q-value under `"next"`.

    Keys, with their defaults:

    - `reward`, `done`, `terminated`, `truncated` (optional): under `"next"`, as named.
    - `sample_log_prob` (`"action_log_prob"`): the collecting policy's log-probability of the stored action.
    - discrete: `action` (`"action"`), `action_value` (`"action_value"`) and `action_probs`
      (`"action_probs"`), the last two also under `"next"`.
    - continuous: `value` (`"state_action_value"`), `log_pi` (`"log_pi"`) and, under `"next"`,
      `expected_value` (`"state_value"`).
    - `steps_to_next_obs`, `valid` (optional): as named.
    - written: `advantage`, `value_target`.

    Reference: Munos et al., 2016, https://arxiv.org/abs/1606.02647
    """

    @dataclass
    class _AcceptedKeys:
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_action_value"
        expected_value: NestedKey = "state_value"
        action_value: NestedKey = "action_value"
        action_probs: NestedKey = "action_probs"
        action: NestedKey = "action"
        log_pi: NestedKey = "log_pi"
        sample_log_prob: NestedKey = "action_log_prob"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        truncated: NestedKey = "truncated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        valid: NestedKey = "valid"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    def __init__(
        self,
        *,
        gamma: Coefficient,
        lmbda: Coefficient = 1.0,
        rho_thresh: float = 1.0,
        c_thresh: float = 1.0,
        continuous: bool = False,
        differentiable: bool = False,
        time_dim: int | None = None,
    ):
        super().__init__(differentiable=differentiable, time_dim=time_dim, gamma=gamma, lmbda=lmbda)
        self.rho_thresh = rho_thresh
        self.c_thresh = c_thresh
        self.continuous = continuous

    @property
    def in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        if self.continuous:
            policy = [keys.value, keys.log_pi, ("next", keys.expected_value)]
        else:
            per_action = [keys.action_value, keys.action_probs]
            policy = [keys.action, *per_action, *(("next", key) for key in per_action)]
        return [keys.sample_log_prob, *policy, *_next(keys, "reward", "done", "terminated")]

    @estimator_forward
    def forward(self, tensordict: TensorDictBase, *, time_dim: int | None = None) -> TensorDictBase:
        """Write advantages and value targets of the stored actions.

        Raises:
            KeyError: if an entry is missing.
        """
        keys = self.tensor_keys
        reward, terminated, done, gamma = self._transitions(tensordict)
        transitions = {
            "rewards": reward,
            "terminateds": terminated,
            "truncateds": done,
            "gamma": gamma,
            "lambda_": self._coefficient("lmbda", reward.device),
            "c_bar": self.c_thresh,
            "rho_bar": self.rho_thresh,
            **self._options(tensordict, time_dim, reward),
        }
        log_mu = joint_log_prob(_entry(tensordict, keys.sample_log_prob), reward, tensordict.ndim)
        if self.continuous:
            target, advantage = compute_retrace_from_log_probs(
                joint_log_prob(_entry(tensordict, keys.log_pi), reward, tensordict.ndim),
                log_mu,
                _align(_entry(tensordict, keys.value), reward),
                _align(_entry(tensordict, ("next", keys.expected_value)), reward),
                **transitions,
            )
        else:
            values = _per_action(_entry(tensordict, keys.action_value), reward)
            action = _index(_entry(tensordict, keys.action), values)
            next_probs = optional(tensordict, ("next", keys.action_probs))
            target, advantage = compute_retrace(
                _per_action(_entry(tensordict, keys.action_probs), reward),
                log_mu.exp(),
                _taken(values, action),
                _per_action(_entry(tensordict, ("next", keys.action_value)), reward),
                action,
                next_action_probs_target=None if next_probs is None else _per_action(next_probs, reward),
                **transitions,
            )
        tensordict.set(keys.advantage, advantage)
        tensordict.set(keys.value_target, target)
        return tensordict


class DiscountedReturn(_Recurrence):
    """Discounted returns, cut where an episode ends.

    `G[t] = r + (1 - terminated) gamma G[t+1]`. Truncated rows and the last row take the bootstrap entry for
    `G[t+1]`, or 0 without one.

    Keys, with their defaults:

    - `reward`, `done`, `terminated`, `truncated` (optional): under `"next"`, as named.
    - `bootstrap` (`"bootstrap_value"`, under `"next"`, optional): the value of the observation reached,
      read at truncated rows and the last row.
    - `steps_to_next_obs`, `valid` (optional): as named.
    - written: `value_target`.
    """

    @dataclass
    class _AcceptedKeys:
        value_target: NestedKey = "value_target"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        truncated: NestedKey = "truncated"
        bootstrap: NestedKey = "bootstrap_value"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        valid: NestedKey = "valid"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    def __init__(self, *, gamma: Coefficient, differentiable: bool = False, time_dim: int | None = None):
        super().__init__(differentiable=differentiable, time_dim=time_dim, gamma=gamma)

    @property
    def in_keys(self) -> list[NestedKey]:
        return _next(self.tensor_keys, "reward", "done", "terminated")

    @property
    def out_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.value_target]

    @estimator_forward
    def forward(self, tensordict: TensorDictBase, *, time_dim: int | None = None) -> TensorDictBase:
        """Write the returns.

        Raises:
            KeyError: if the reward or every end flag is missing.
        """
        reward, terminated, done, gamma = self._transitions(tensordict)
        bootstrap = optional(tensordict, ("next", self.tensor_keys.bootstrap))
        returns = compute_discounted_returns(
            reward,
            terminated,
            done,
            gamma,
            None if bootstrap is None else _align(bootstrap, reward),
            **self._options(tensordict, time_dim, reward),
        )
        return tensordict.set(self.tensor_keys.value_target, returns)


class EligibilityTrace(_Recurrence):
    """Accumulating eligibility traces, cleared after a done row.

    `z[t] = x[t] + (1 - done[t-1]) gamma lmbda z[t-1]`, with `z[-1]` the `seed_values` of the call.

    Keys, with their defaults:

    - `gradient` (`"gradient"`): what accumulates, `[*B, T, *F]`.
    - `done`: under `"next"`, as named.
    - `valid` (optional): as named.
    - written: `trace` (`"eligibility_trace"`).
    """

    @dataclass
    class _AcceptedKeys:
        gradient: NestedKey = "gradient"
        done: NestedKey = "done"
        valid: NestedKey = "valid"
        trace: NestedKey = "eligibility_trace"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    def __init__(
        self,
        *,
        gamma: Coefficient,
        lmbda: Coefficient,
        differentiable: bool = False,
        time_dim: int | None = None,
    ):
        super().__init__(differentiable=differentiable, time_dim=time_dim, gamma=gamma, lmbda=lmbda)

    @property
    def in_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.gradient, *_next(self.tensor_keys, "done")]

    @property
    def out_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.trace]

    @estimator_forward
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        time_dim: int | None = None,
        seed_values: Tensor | None = None,
    ) -> TensorDictBase:
        """Write the traces; `seed_values`, the last trace of the window before, has no time axis.

        Raises:
            KeyError: if an entry is missing.
        """
        keys = self.tensor_keys
        gradient = _entry(tensordict, keys.gradient)
        traces = compute_eligibility_traces(
            gradient,
            _align(_entry(tensordict, ("next", keys.done)), gradient),
            self._coefficient("gamma", gradient.device),
            self._coefficient("lmbda", gradient.device),
            seed_values,
            **self._options(tensordict, time_dim, gradient),
        )
        return tensordict.set(keys.trace, traces)


class EpisodicPrefixSum(_Recurrence):
    """Running sums within episodes; of rewards by default, which is the return so far.

    `y[t] = x[t] + (1 - done[t-1]) y[t-1]`, with `y[-1]` the `seed_values` of the call. With
    `boundary="starts_at"` the sum restarts on the rows that open an episode, which `is_init` marks.

    Keys, with their defaults:

    - `input` (`("next", "reward")`): what is summed, `[*B, T, *F]`.
    - `done`: under `"next"`, as named; read with `boundary="ends_at"`.
    - `is_init`: as named; read with `boundary="starts_at"`.
    - `valid` (optional): as named.
    - written: `prefix_sum` (`"prefix_sum"`).
    """

    @dataclass
    class _AcceptedKeys:
        input: NestedKey = ("next", "reward")
        done: NestedKey = "done"
        is_init: NestedKey = "is_init"
        valid: NestedKey = "valid"
        prefix_sum: NestedKey = "prefix_sum"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    def __init__(
        self, *, boundary: str = "ends_at", differentiable: bool = False, time_dim: int | None = None
    ):
        super().__init__(differentiable=differentiable, time_dim=time_dim)
        self.boundary = boundary

    @property
    def _boundary_key(self) -> NestedKey:
        keys = self.tensor_keys
        return keys.is_init if self.boundary == "starts_at" else _next(keys, "done")[0]

    @property
    def in_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.input, self._boundary_key]

    @property
    def out_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.prefix_sum]

    @estimator_forward
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        time_dim: int | None = None,
        seed_values: Tensor | None = None,
    ) -> TensorDictBase:
        """Write the sums; `seed_values`, the last sum of the window before, has no time axis.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if the boundary is neither `"ends_at"` nor `"starts_at"`.
        """
        keys = self.tensor_keys
        inputs = _entry(tensordict, keys.input)
        sums = compute_episodic_prefix_sum(
            inputs,
            _align(_entry(tensordict, self._boundary_key), inputs),
            seed_values,
            self.boundary,
            **self._options(tensordict, time_dim, inputs),
        )
        return tensordict.set(keys.prefix_sum, sums)


def _next(keys: Any, *names: str) -> list[NestedKey]:
    return [unravel_key(("next", getattr(keys, name))) for name in names]


def _entry(tensordict: TensorDictBase, key: NestedKey) -> Any:
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"the tensordict has no entry {key!r}")
    return value


def _align(tensor: Tensor, like: Tensor) -> Tensor:
    """The rank of `like`, by axes of size 1 at the end."""
    while tensor.dim() > like.dim() and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    return match_rank(tensor, like)


def _per_action(tensor: Tensor, like: Tensor) -> Tensor:
    """The shape of `like` and an axis of actions, from `[*B, T, A]`."""
    return tensor.view(*tensor.shape[:-1], *[1] * (like.dim() + 1 - tensor.dim()), tensor.shape[-1])


def _index(action: Tensor, values: Tensor) -> Tensor:
    """The stored action as an index, from an index or one-hot."""
    if action.numel() == values.numel():
        action = (action != 0).int().argmax(-1)
    return action.view(values.shape[:-1])


def _taken(values: Tensor, action: Tensor) -> Tensor:
    """The value of the action; that of an invalid row may lie anywhere."""
    index = action.long().clamp(0, values.shape[-1] - 1)
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)
