"""V-trace over tensordicts, on the action that was stored."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import CompositeDistribution, set_composite_lp_aggregate
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import value as torchrl_value
from torchrl.objectives.utils import hold_out_net
from torchrl.objectives.value import ValueEstimatorBase
from torchrl.objectives.value.advantages import _call_actor_net, _standardize_by_group

from ._common import Estimator, estimator_forward, match_rank, own_fields, standardize
from .functional import Coefficient, clipped_vtrace

# Where a collecting policy leaves its log-probability, by the setting of `composite_lp_aggregate`.
LOG_PROB_KEYS = ("action_log_prob", "sample_log_prob")

# As a function, because torch.compile cannot follow `super()` to a property.
_base_in_keys: Any = ValueEstimatorBase.in_keys.fget


class VTrace(Estimator, torchrl_value.VTrace):
    """TorchRL's `VTrace` with importance weights of the stored action.

    `vs[t] = v + rho (r + gamma v' - v) + gamma c (vs[t+1] - v[t+1])`

    with `rho = min(rho_thresh, pi / mu)` and `c = min(c_thresh, pi / mu)`, where `pi` is the probability
    that the current actor gives to the action in the tensordict, and `mu` the stored one. TorchRL's module
    scores the actor's mode or a fresh sample instead. Constructor, keys and calls are TorchRL's; `gamma`
    may be any tensor that broadcasts, and `Estimator` describes what else is added. The advantage contains
    `rho`.

    Log-probabilities may be `[*B, T]` or `[*B, T, 1]`, have one entry per action dimension, which are
    summed, or be a tensordict of a composite policy. Where `sample_log_prob` is not set they are read from
    `"action_log_prob"`, `"sample_log_prob"` or the keys that the actor writes.

    Keys, on top of `Estimator`'s:

    - `action`: in the root, the stored action; what the actor writes by default. Without an action in the
      tensordict TorchRL's weights are used, with one warning.
    - `log_pi`: in the root, log-probabilities of the stored action under the current policy. With this
      entry no actor is called, and `actor_network` may be None.

    Reference: Espeholt et al., 2018, https://arxiv.org/abs/1802.01561
    """

    @own_fields
    @dataclasses.dataclass
    class _AcceptedKeys(Estimator._AcceptedKeys):
        action: NestedKey = "action"
        log_pi: NestedKey = "log_pi"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: Any

    def __init__(
        self,
        *,
        gamma: Coefficient,
        rho_thresh: Coefficient = 1.0,
        c_thresh: Coefficient = 1.0,
        **kwargs: Any,
    ):
        # TorchRL's constructor takes a scalar gamma only.
        super().__init__(
            gamma=0.0 if isinstance(gamma, Tensor) else gamma,
            rho_thresh=rho_thresh,
            c_thresh=c_thresh,
            **kwargs,
        )
        if isinstance(gamma, Tensor):
            self.gamma = gamma.to(self._device)
        thresholds = {"rho_thresh": rho_thresh, "c_thresh": c_thresh}
        # The number in a buffer that has not been written to, known without reading it back from the device.
        self._numbers = {
            name: (getattr(self, name), float(number))
            for name, number in thresholds.items()
            if not isinstance(number, Tensor)
        }
        self._warned = False

    def _number(self, name: str) -> float | None:
        """What a threshold's buffer holds, where that is known."""
        buffer = getattr(self, name)
        of, number = self._numbers.get(name, (None, None))
        return number if of is buffer and buffer._version == 0 else None

    def _threshold(self, name: str, device: torch.device) -> Coefficient:
        """A number, which spares a handful of operations, or the buffer."""
        number = None if torch.compiler.is_compiling() else self._number(name)
        return self._coefficient(name, device) if number is None else number

    def _apply(self, fn: Callable, *args: Any, **kwargs: Any) -> VTrace:
        known = {name: self._number(name) for name in self._numbers}
        super()._apply(fn, *args, **kwargs)
        # Moving the buffers does not change what they hold.
        self._numbers = {name: (getattr(self, name), number) for name, number in known.items()}
        return self

    @property
    def in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        networks = _base_in_keys(self)
        log_prob = keys.sample_log_prob
        needed = log_prob if isinstance(log_prob, list) else [log_prob]
        if self.actor_network is None:
            needed = [*needed, keys.log_pi]
        else:
            needed = [*needed, *self._action_keys, *self.actor_network.in_keys]
        return networks + [key for key in needed if key not in networks]

    @property
    def _action_keys(self) -> list[NestedKey]:
        """The key that was set, else what the actor writes."""
        key = self.tensor_keys.action
        written = getattr(self.actor_network, "dist_sample_keys", None)
        return written if written and key == self._AcceptedKeys.action else [key]

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
            KeyError: if reward, end flags or log-probabilities are missing.
            ValueError: if a value is missing and nothing takes its place.
        """
        following = self._next(tensordict)
        reward = self._reward(following)
        time_dim = self._get_time_dim(time_dim, tensordict)
        value, next_value, bootstrap = self._values(tensordict, following, params, target_params, time_dim)
        done, terminated = self._ends(tensordict, following, time_dim)
        valid = self._valid(tensordict, value)
        target, advantage = clipped_vtrace(
            joint_log_prob(self._log_pi(tensordict), value, tensordict.ndim),
            joint_log_prob(self._log_mu(tensordict), value, tensordict.ndim),
            value,
            reward,
            terminated,
            done,
            self._gamma(tensordict, reward),
            rho_thresh=self._threshold("rho_thresh", reward.device),
            c_thresh=self._threshold("c_thresh", reward.device),
            bootstrap_values=bootstrap,
            next_values=next_value,
            valid=valid,
            time_dim=time_dim,
        )
        if self.average_adv:
            advantage = self._standardized(tensordict, advantage, valid)
        tensordict.set(self.tensor_keys.advantage, advantage)
        tensordict.set(self.tensor_keys.value_target, target)
        return tensordict

    def _standardized(self, tensordict: TensorDictBase, advantage: Tensor, valid: Tensor | None) -> Tensor:
        groups = self._group_ids(tensordict)
        valid = torch.ones_like(advantage, dtype=torch.bool) if valid is None else valid.expand_as(advantage)
        if groups is None:
            return standardize(advantage, valid, eps=1e-5)
        return _standardize_by_group(advantage, groups, valid, eps=1e-5).masked_fill(~valid, 0)

    def _log_mu(self, tensordict: TensorDictBase) -> Tensor | TensorDictBase:
        """What the collecting policy wrote."""
        for key in self._log_mu_keys():
            if isinstance(key, list):
                if key and all(tensordict.get(part, None) is not None for part in key):
                    return tensordict.select(*key)
            elif (log_mu := tensordict.get(key, None)) is not None:
                return log_mu
        raise KeyError(f"the tensordict has no entry {self.tensor_keys.sample_log_prob!r}")

    def _log_mu_keys(self) -> Iterator[Any]:
        """The key that was set, else those where a policy leaves its log-probability."""
        yield self.tensor_keys.sample_log_prob
        if self.tensor_keys.sample_log_prob in LOG_PROB_KEYS:
            yield from LOG_PROB_KEYS
            yield getattr(self.actor_network, "log_prob_keys", [])

    def _log_pi(self, tensordict: TensorDictBase) -> Tensor | TensorDictBase:
        """The stored action's log-probability under the current policy."""
        log_pi = tensordict.get(self.tensor_keys.log_pi, None)
        if log_pi is not None:
            return log_pi
        actor = self.actor_network
        if actor is None:
            raise KeyError(
                f"the tensordict has no entry {self.tensor_keys.log_pi!r}, and there is no actor_network to "
                "score the stored action"
            )
        keys = self._action_keys
        stored = all(tensordict.get(key, None) is not None for key in keys)
        # Gradients may reach the actor's inputs, but not the parameters it holds.
        with hold_out_net(actor):
            if not stored:
                self._warn_no_action()
                unused: Any = None
                return _call_actor_net(actor, tensordict, params=unused, log_prob_key=unused)
            dist = actor.get_dist(tensordict.select(*actor.in_keys, strict=False))
            if isinstance(dist, CompositeDistribution):
                with set_composite_lp_aggregate(True):
                    return dist.log_prob(tensordict.select(*keys))
            action, shape = tensordict.get(keys[0]), dist.batch_shape + dist.event_shape
            # An index stored as `[*B, T, 1]` must not broadcast against `[*B, T]` distributions.
            return dist.log_prob(action.view(shape) if action.numel() == shape.numel() else action)

    def _warn_no_action(self) -> None:
        """Once per module; never under torch.compile, where a warning would break the graph."""
        if self._warned or torch.compiler.is_compiling():
            return
        self._warned = True
        warnings.warn(
            f"VTrace found no stored action under {self._action_keys}: as in TorchRL the importance weights "
            "are those of the actor's mode or of a fresh sample",
            stacklevel=2,
        )


def joint_log_prob(log_prob: Tensor | TensorDictBase, like: Tensor, batch_dims: int) -> Tensor:
    """One log-probability per row in the rank of `like`, summed over the dimensions of an action."""
    if not isinstance(log_prob, Tensor) and is_tensor_collection(log_prob):
        log_prob = cast(Any, log_prob).sum(dim="feature", reduce=True)
    log_prob = match_rank(log_prob, like)
    if log_prob.shape == like.shape:
        return log_prob
    return match_rank(log_prob.flatten(max(like.dim() - 1, batch_dims)).sum(-1), like)
