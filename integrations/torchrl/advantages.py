"""Generalised advantage estimation in place of TorchRL's modules, for one agent and for several."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import value as torchrl_value

from rl_triton import compute_gae

from ._common import Estimator, as_bool, check_ranks, estimator_forward, standardize

__all__ = ["GAE", "MultiAgentGAE"]


class GAE(Estimator, torchrl_value.GAE):
    """TorchRL's `GAE` with the recursion in one kernel.

    `A[t] = r + (1 - terminated) gamma V(s') - V(s) + (1 - done) gamma lmbda A[t+1]`, target `A + V(s)`.

    Takes all arguments of TorchRL's class, and `single_pass` and `bootstrap_budget`. `vectorized` is accepted
    and changes nothing. Flags may have any dtype, reward and flags may broadcast to the value, and nothing
    behind a terminated row is read, with `auto_reset_env` too.

    Reference: Schulman et al., 2016, https://arxiv.org/abs/1506.02438
    """

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
            RuntimeError: if value, reward and flags differ in rank.
        """
        advantage, target, valid = self._estimate(tensordict, params, target_params, time_dim)
        if self.average_gae:
            advantage = self._normalize(tensordict, advantage, valid)
        tensordict.set(self.tensor_keys.advantage, advantage)
        tensordict.set(self.tensor_keys.value_target, target)
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The value targets alone."""
        return self._estimate(tensordict, params, target_params, time_dim)[1]

    def _estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
        time_dim: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        following = self._next(tensordict)
        reward = self._reward(following)
        time_dim = self._get_time_dim(time_dim, tensordict)
        gamma, lmbda = self._gamma(tensordict, reward), self._coefficient("lmbda", reward.device)
        value, next_value, bootstrap = self._values(tensordict, following, params, target_params, time_dim)
        done, terminated = self._ends(tensordict, following, time_dim)
        reward, done, terminated = self._prepare_signals(reward, done, terminated, value)
        check_ranks(value=value, reward=reward, done=done, terminated=terminated)
        if gamma.dim():
            gamma = self._broadcast_optional(gamma, value)
        if self.auto_reset_env and next_value is not None:
            # What follows a truncated row is the next episode's first observation.
            truncated = self._truncated(following, done, terminated, value)
            next_value = torch.where(truncated, value, next_value)
            terminated = as_bool(terminated) | as_bool(done) & ~truncated
        valid = self._valid(tensordict, value)
        advantage, target = compute_gae(
            reward,
            value,
            terminated,
            done,
            gamma,
            lmbda,
            bootstrap,
            next_values=next_value,
            valid=valid,
            time_dim=time_dim,
            return_targets=True,
        )
        return advantage, target, valid

    def _truncated(
        self, following: TensorDictBase, done: Tensor, terminated: Tensor, value: Tensor
    ) -> Tensor:
        truncated = following.get(self.tensor_keys.truncated, None)
        if truncated is None:
            return as_bool(done) & ~as_bool(terminated)
        return as_bool(self._broadcast_optional(truncated, value))

    def _normalize(self, tensordict: TensorDictBase, advantage: Tensor, valid: Tensor | None) -> Tensor:
        groups = self._group_ids(tensordict)
        if valid is None:
            return self._normalize_advantage(advantage, groups=groups)
        if groups is None and tensordict.get("shifted_valid", None) is None:
            # The deviation of a sample, as TorchRL's without a mask: an all-true mask changes nothing.
            return standardize(advantage, valid, self._statistics_dims(advantage))
        return self._normalize_advantage(advantage, valid, groups).masked_fill(~valid, 0)

    def _statistics_dims(self, advantage: Tensor) -> tuple[int, ...]:
        return tuple(range(advantage.dim()))


class MultiAgentGAE(GAE, torchrl_value.MultiAgentGAE):
    """TorchRL's `MultiAgentGAE` with the recursion in one kernel.

    Values have an agent axis, `agent_dim`, that reward, done and terminated may lack or have with size 1: the
    team's signals then serve every agent. Advantages are standardised per agent.
    """

    def _statistics_dims(self, advantage: Tensor) -> tuple[int, ...]:
        agent_dim = self.agent_dim % advantage.dim()
        return tuple(dim for dim in range(advantage.dim()) if dim != agent_dim)
