"""TD(lambda) and TD(1) in place of TorchRL's modules."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import value as torchrl_value
from torchrl.objectives.value.advantages import _standardize_by_group

from rl_triton import compute_discounted_returns, compute_lambda_returns

from ._common import (
    Estimator,
    as_bool,
    check_ranks,
    estimator_forward,
    last_row,
    match_rank,
    optional,
    shift,
    standardize,
)

__all__ = ["TD1Estimator", "TDLambdaEstimator"]


class _ReturnEstimator(Estimator):
    """The return is the value target; the advantage is what it exceeds the value by."""

    average_rewards: bool
    _reward_eps: float

    @estimator_forward
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write advantages and value targets.

        Raises:
            KeyError: if the reward, the end flags or the group ids are missing.
            ValueError: if a value is missing and there is no network to compute it.
            RuntimeError: if next value, reward and flags differ in rank.
        """
        following = self._next(tensordict)
        time_dim = self._get_time_dim(time_dim, tensordict)
        value, next_value, bootstrap = self._values(tensordict, following, params, target_params, time_dim)
        if bootstrap is not None:
            next_value = shift(value, last_row(bootstrap, time_dim), time_dim)
        target = self._estimate(tensordict, following, next_value, bootstrap, time_dim)
        advantage = target - value
        valid = self._valid(tensordict, advantage)
        tensordict.set(
            self.tensor_keys.advantage, advantage if valid is None else advantage.masked_fill(~valid, 0)
        )
        tensordict.set(self.tensor_keys.value_target, target)
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The returns alone; `next_value`, if given, replaces the tensordict's entry and the network's."""
        following = self._next(tensordict)
        time_dim = self._get_time_dim(time_dim, tensordict)
        bootstrap = None
        if next_value is None:
            bootstrap = optional(following, self.tensor_keys.bootstrap)
            if bootstrap is None:
                next_value = self._next_value(tensordict, target_params, kwargs)
            else:
                value = self._root_value(tensordict, target_params)
                bootstrap = match_rank(bootstrap, value)
                next_value = shift(value, last_row(bootstrap, time_dim), time_dim)
        return self._estimate(tensordict, following, next_value, bootstrap, time_dim)

    def _estimate(
        self,
        tensordict: TensorDictBase,
        following: TensorDictBase,
        next_value: Tensor,
        bootstrap: Tensor | None,
        time_dim: int,
    ) -> Tensor:
        reward = self._reward(following)
        gamma = self._gamma(tensordict, reward)
        if self.average_rewards:
            reward = self._standardized(tensordict, reward)
            # Whoever reads the rewards later sees the ones that the returns are made of.
            following.set(self.tensor_keys.reward, reward)
        done, terminated = self._ends(tensordict, following, time_dim)
        check_ranks(reward=reward, next_value=next_value, done=done, terminated=terminated)
        rows = reward, next_value, terminated, done
        return self._returns(*rows, gamma, bootstrap, self._valid(tensordict, reward), time_dim)

    def _standardized(self, tensordict: TensorDictBase, reward: Tensor) -> Tensor:
        groups = self._group_ids(tensordict)
        valid = optional(tensordict, self.tensor_keys.valid)
        if valid is not None:
            valid = match_rank(as_bool(valid), reward).expand_as(reward)
        if groups is not None:
            return _standardize_by_group(reward, groups, valid, self._reward_eps)
        if valid is not None:
            return standardize(reward, valid, eps=self._reward_eps)
        return (reward - reward.mean()) / reward.std().clamp_min(self._reward_eps)

    def _returns(
        self,
        reward: Tensor,
        next_value: Tensor,
        terminated: Tensor,
        done: Tensor,
        gamma: Tensor,
        bootstrap: Tensor | None,
        valid: Tensor | None,
        time_dim: int,
    ) -> Tensor:
        raise NotImplementedError


class TDLambdaEstimator(_ReturnEstimator, torchrl_value.TDLambdaEstimator):
    """TorchRL's `TDLambdaEstimator` with the recursion in one kernel.

    `G[t] = r + (1 - terminated) gamma ((1 - lmbda) V(s') + lmbda G[t+1])`, with `V(s')` for `G[t+1]` where
    the episode or the window ends.

    Takes all arguments of TorchRL's class, and `single_pass` and `bootstrap_budget`. `vectorized` is accepted
    and changes nothing.

    Reference: Sutton and Barto, 2018, chapter 12
    """

    _reward_eps = 1e-4

    def _returns(self, reward, next_value, terminated, done, gamma, bootstrap, valid, time_dim):
        lmbda = self._coefficient("lmbda", reward.device)
        return compute_lambda_returns(
            reward, next_value, terminated, done, gamma, lmbda, bootstrap, valid=valid, time_dim=time_dim
        )


class TD1Estimator(_ReturnEstimator, torchrl_value.TD1Estimator):
    """TorchRL's `TD1Estimator` with the recursion in one kernel.

    `G[t] = r + (1 - terminated) gamma G[t+1]`, with `V(s')` for `G[t+1]` where the episode or the window
    ends.

    Takes all arguments of TorchRL's class, and `single_pass` and `bootstrap_budget`.
    """

    _reward_eps = 1e-5

    def _returns(self, reward, next_value, terminated, done, gamma, bootstrap, valid, time_dim):
        bootstrap = next_value if bootstrap is None else bootstrap
        return compute_discounted_returns(
            reward, terminated, done, gamma, bootstrap, valid=valid, time_dim=time_dim
        )
