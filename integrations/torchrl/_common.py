"""What the estimators here share: flags of any dtype, masks, and where the value of s'_t comes from.

TorchRL calls the value network on every root and every next observation. The next observation of row t
needs a call of its own only where row t+1 does not hold it: where the episode is truncated, before an
invalid row, and in the last row. `Estimator` can leave the other calls out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from torchrl.objectives.utils import hold_out_net
from torchrl.objectives.value import ValueEstimatorBase
from torchrl.objectives.value.advantages import _self_set_grad_enabled, _self_set_skip_existing
from torchrl.objectives.value.functional import SHAPE_ERR

Keys = TypeVar("Keys", bound=type)


def own_fields(cls: Keys) -> Keys:
    """Give a dataclass its inherited defaults as attributes of its own: `set_keys` looks names up there."""
    for field in dataclasses.fields(cls):
        setattr(cls, field.name, field.default)
    return cls


def estimator_forward(forward: Any) -> Any:
    """What TorchRL wraps an estimator's forward in: `skip_existing`, `differentiable`, calls with tensors."""
    dispatched = dispatch(forward)

    @wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A call with a tensordict need not look up the keys that a call with tensors fills.
        if args and isinstance(args[0], TensorDictBase):
            return forward(self, *args, **kwargs)
        return dispatched(self, *args, **kwargs)

    return _self_set_skip_existing(_self_set_grad_enabled(call))


def optional(data: TensorDictBase, key: NestedKey) -> Tensor | None:
    """An entry that is mostly absent: to look for it first costs less than a `get` that finds nothing."""
    return data.get(key) if key in data else None


def same_memory(params: Any, target_params: Any) -> bool:
    """Whether both are the same parameters, as those of a loss that keeps no target network."""
    return params is not None and all(
        value.data_ptr() == target_params.get(key).data_ptr() for key, value in params.items(True, True)
    )


def as_bool(flags: Tensor) -> Tensor:
    return flags if flags.dtype == torch.bool else flags != 0


def match_rank(tensor: Tensor, like: Tensor) -> Tensor:
    """Append axes of size 1 until `tensor` has the rank of `like`."""
    while tensor.dim() < like.dim():
        tensor = tensor.unsqueeze(-1)
    return tensor


def check_ranks(**tensors: Tensor) -> None:
    """TorchRL's error where a signal lacks an axis; one of size 1 may broadcast."""
    if len({tensor.dim() for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise RuntimeError(f"{SHAPE_ERR} Got {shapes}.")


def last_row(values: Tensor, time_dim: int) -> Tensor:
    return values.narrow(time_dim, values.shape[time_dim] - 1, 1)


def shift(values: Tensor, last: Tensor, time_dim: int) -> Tensor:
    """`values[t+1]` in row t, and `last` (a time axis of size 1) in the last row."""
    return torch.cat([values.narrow(time_dim, 1, values.shape[time_dim] - 1), last], time_dim)


def unravel(index: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """`torch.unravel_index` without its copy of the shape to the device."""
    coordinates = []
    for size in reversed(shape):
        coordinates.append(index % size)
        index = index // size
    return tuple(reversed(coordinates))


def standardize(x: Tensor, valid: Tensor, dims: tuple[int, ...] | None = None, eps: float = 1e-4) -> Tensor:
    """Zero mean and unit variance over the entries that `valid` selects; the others become 0."""
    dims = tuple(range(x.dim())) if dims is None else dims
    valid = valid.expand_as(x)
    count = valid.sum(dims, keepdim=True)
    mean = torch.where(valid, x, 0).sum(dims, keepdim=True) / count.clamp_min(1)
    centered = torch.where(valid, x - mean, 0)
    variance = centered.square().sum(dims, keepdim=True) / (count - 1).clamp_min(1)
    return centered / variance.sqrt().clamp_min(eps)


def finite_next(root: TensorDictBase, following: TensorDictBase, in_keys: list[NestedKey]) -> TensorDictBase:
    """Replace NaN in next observations by the root's, without asking the device whether there is any.

    Collectors that store observations once leave NaN behind the end of a trajectory. Where the episode
    terminated the value is not read; where it was truncated, `V(s_t)` stands in for a bootstrap.
    """
    following = following.copy()
    for key in in_keys:
        observation, successor = root.get(key, None), following.get(key, None)
        if observation is None or successor is None or observation.shape != successor.shape:
            continue
        if observation.is_floating_point():
            following.set(key, torch.where(successor.isnan(), observation, successor))
    return following


class Estimator(ValueEstimatorBase):
    """Mixed in before one of TorchRL's estimators, whose recursion the subclass then replaces.

    Keyword Args:
        single_pass: run the value network once over the root, and again only on the next observations of
            rows that need a bootstrap: truncated ones, ones before an invalid row, the last. The same
            values as from two passes wherever `("next", obs)[t]` equals `obs[t+1]`. Finding the rows
            costs one synchronisation with the device. A network with `"is_init"` among its `in_keys`
            is recurrent: there the next observations are inserted into its sequences, so that each is
            valued with the hidden state of its own episode.
        bootstrap_budget: the same for at most this many such rows per call, without a synchronisation.
            Rows beyond the budget are marked in `"shifted_valid"` and output 0. Recurrent networks get
            this many extra steps per sequence.

    Keys, on top of TorchRL's (`set_keys`):

    - `bootstrap`: under `"next"`, `V(s'_t)` in truncated rows and the last row; other rows are not read.
      With this entry no next observation is valued.
    - `truncated`: under `"next"`. Read if `done` or `terminated` is absent, or if it has another name
      than the default one, which rollouts hold inside `done` already.
    - `valid`: in the root. Rows where it is false are no transitions: they output 0 and enter no statistics.
    """

    @own_fields
    @dataclasses.dataclass
    class _AcceptedKeys(ValueEstimatorBase._AcceptedKeys):
        bootstrap: NestedKey = "bootstrap_value"
        truncated: NestedKey = "truncated"
        valid: NestedKey = "valid"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    value_network: Any

    def __init__(self, *, single_pass: bool = False, bootstrap_budget: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.single_pass = single_pass
        self.bootstrap_budget = self._check_positive_int(bootstrap_budget, "bootstrap_budget")
        if self.shifted and (single_pass or bootstrap_budget is not None):
            raise ValueError("shifted=True cannot be combined with single_pass or bootstrap_budget")

    def _next(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_dims < 1:
            raise RuntimeError(
                "Expected input tensordict to have at least one dimension, got "
                f"tensordict.batch_size = {tensordict.batch_size}"
            )
        following = tensordict.get("next", None)
        if following is None:
            raise KeyError("the tensordict has no entry 'next'")
        return following

    def _get_time_dim(self, time_dim: int | None, data: TensorDictBase) -> int:
        return super()._get_time_dim(time_dim, data)  # pyright: ignore[reportReturnType]

    def _reward(self, following: TensorDictBase) -> Tensor:
        reward = following.get(self.tensor_keys.reward, None)
        if reward is None:
            raise KeyError(f"the tensordict has no entry {('next', self.tensor_keys.reward)!r}")
        return reward

    def _flags(self, following: TensorDictBase) -> tuple[Tensor, Tensor]:
        """`(done, terminated)`, from what the data holds of done, terminated and truncated."""
        keys = self.tensor_keys
        done, terminated = following.get(keys.done, None), following.get(keys.terminated, None)
        if done is not None and terminated is not None and keys.truncated == "truncated":
            return done, terminated
        truncated = optional(following, keys.truncated)
        if terminated is None:
            if done is None:
                raise KeyError(f"the tensordict has no entry {('next', keys.done)!r}")
            return done, done if truncated is None else as_bool(done) & ~as_bool(truncated)
        if done is None:
            done = terminated
        return done if truncated is None else as_bool(done) | as_bool(truncated), terminated

    def _ends(
        self, tensordict: TensorDictBase, following: TensorDictBase, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        """`(done, terminated)` as the recursion takes them."""
        done, terminated = self._flags(following)
        valid = tensordict.get("shifted_valid", None) if self.shifted else None
        if valid is not None:
            # TorchRL bootstraps the last row that the budget reaches, a terminated one too.
            last = match_rank(self._shifted_last_valid(valid, time_dim), terminated)
            terminated = as_bool(terminated) & ~last
        return done, terminated

    def _coefficient(self, name: str, device: torch.device) -> Tensor:
        """The buffer on the data's device, a floating one; a single element has no axes."""
        value = getattr(self, name)
        if value.device != device:
            value = value.to(device)
            setattr(self, name, value)
        if not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        return value.reshape(()) if value.dim() and value.numel() == 1 else value

    def _gamma(self, tensordict: TensorDictBase, reward: Tensor) -> Tensor:
        """The discount of each row: gamma to the power of the steps that the row stands for."""
        gamma = self._coefficient("gamma", reward.device)
        steps = optional(tensordict, self.tensor_keys.steps_to_next_obs)
        return gamma if steps is None else gamma ** steps.view_as(reward)

    def _valid(self, tensordict: TensorDictBase, like: Tensor) -> Tensor | None:
        """The rows that count, by the user's mask and by a budget that ran out."""
        valid, shifted = optional(tensordict, self.tensor_keys.valid), optional(tensordict, "shifted_valid")
        if valid is not None:
            valid = match_rank(as_bool(valid), like)
        if shifted is None:
            return valid
        shifted = match_rank(shifted, like)
        return shifted if valid is None else valid & shifted

    def _values(
        self,
        tensordict: TensorDictBase,
        following: TensorDictBase,
        params: Any,
        target_params: Any,
        time_dim: int,
    ) -> tuple[Tensor, Any, Any]:
        """`(value, next_value, bootstrap)`: of the last two the one that serves, the other is None."""
        key = self.tensor_keys.value
        bootstrap = optional(following, self.tensor_keys.bootstrap)
        if bootstrap is not None:
            value = self._root_value(tensordict, params)
            return value, None, match_rank(bootstrap, value)
        if self.value_network is None:
            value, next_value = self._root_value(tensordict, params), following.get(key, None)
            if next_value is None:
                raise self._missing(("next", key))
            return value, next_value, None

        if self.single_pass or self.bootstrap_budget is not None:
            if target_params is not None and not same_memory(params, target_params):
                raise ValueError(
                    "target_params need a second pass: leave single_pass and bootstrap_budget off"
                )
            value, next_value, valid = self._call_value_net_once(tensordict, following, params, time_dim)
        else:
            if params is not None:
                params = params.detach()
                if target_params is None:
                    target_params = params.clone(False)
            own = params is None and target_params is None
            with hold_out_net(self.value_network) if own else nullcontext():
                value, next_value, valid = self._call_value_nets(
                    data=tensordict,
                    params=params,
                    next_params=target_params,
                    single_call=self.shifted,
                    value_key=key,
                    detach_next=True,
                    vmap_randomness=str(self.vmap_randomness),
                    time_dim=time_dim,
                )
        if valid is not None:
            tensordict.set("shifted_valid", valid)
        return value, next_value, None

    def _missing(self, key: NestedKey) -> ValueError:
        return ValueError(
            f"The tensor with key {key} is missing, and there is no value network and no entry "
            f"{('next', self.tensor_keys.bootstrap)} to take its place."
        )

    def _root_value(self, tensordict: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        key = self.tensor_keys.value
        if self.value_network is None:
            value = tensordict.get(key, None)
            if value is None:
                raise ValueError(f"The tensor with key {key} is missing, and no value network was provided.")
            return value
        with self._network(params) as net:
            value = self._run(net, tensordict.select(*net.in_keys, key, strict=False), key)
        tensordict.set(key, value)
        return value

    def _next_value(
        self, tensordict: TensorDictBase, target_params: TensorDictBase | None, kwargs: Any
    ) -> Tensor:
        key = self.tensor_keys.value
        if self.value_network is None:
            next_value = tensordict.get(("next", key), None)
        else:
            tensordict = self._sanitize_next_obs_nan(tensordict, self.value_network.in_keys)
            next_value = super()._next_value(tensordict, target_params, kwargs)
        if next_value is None:
            raise self._missing(("next", key))
        return next_value

    @staticmethod
    def _sanitize_next_obs_nan(data: TensorDictBase, in_keys: list[NestedKey]) -> TensorDictBase:
        return data.copy().set("next", finite_next(data, data.get("next"), in_keys))

    @contextmanager
    def _network(self, params: TensorDictBase | None) -> Iterator[Any]:
        """The value network, with `params` or its own; gradients reach its inputs, not the parameters."""
        net = self.value_network
        with (
            hold_out_net(net)
            if params is None
            else params.detach().to_module(net, preserve_module_state=False)
        ):
            yield net

    def _run(self, net: Callable, data: TensorDictBase, key: NestedKey) -> Tensor:
        """The network's values, in as many calls as the chunk options ask for."""
        if self.value_chunk_size is None and self.num_chunks is None:
            return net(data).get(key)
        dim = self._resolve_value_chunk_dim(data.ndim)
        return torch.cat([net(chunk).get(key) for chunk in self._split_value_net_input(data)], dim)

    def _call_value_nets(
        self,
        data: TensorDictBase,
        params: TensorDictBase | None,
        next_params: TensorDictBase | None,
        single_call: bool,
        value_key: NestedKey,
        detach_next: bool,
        vmap_randomness: str = "error",
        *,
        value_net: TensorDictModuleBase | None = None,
        time_dim: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """TorchRL's two streams, as two plain calls where the parameters are the network's own.

        Under `vmap` recurrent layers and dropout fail or need special care.
        """
        net = self.value_network if value_net is None else value_net
        valid = None
        if single_call:
            value, next_value, valid = self._call_value_net_shifted(
                data=self._sanitize_next_obs_nan(self._with_bool_flags(data), net.in_keys),
                params=params,
                next_params=next_params,
                value_key=value_key,
                ndim=self._get_time_dim(time_dim, data) + 1,
                value_net=net,
                _call_value_net=lambda inputs: self._run(net, inputs, value_key),
            )
        elif params is None and next_params is None:
            root = data.select(*net.in_keys, value_key, strict=False)
            following = data.get("next").select(*net.in_keys, value_key, strict=False)
            following = finite_next(root, following, net.in_keys)
            if "is_init" in root:
                # The stream of next observations starts anew where the root's does.
                following.set("is_init", following["is_init"] | root["is_init"])
            value, next_value = self._run(net, root, value_key), self._run(net, following, value_key)
        else:
            value, next_value, _ = super()._call_value_nets(
                data, params, next_params, False, value_key, False, vmap_randomness, value_net=net
            )
        data.set(value_key, value)
        data.set(("next", value_key), next_value)
        return value, next_value.detach() if detach_next else next_value, valid

    def _with_bool_flags(self, data: TensorDictBase) -> TensorDictBase:
        """A shallow copy with the flags in the only dtype that TorchRL's shifted pass reads."""
        done, terminated = self._flags(data.get("next"))
        data = data.copy()
        data.set(("next", self.tensor_keys.done), as_bool(done))
        data.set(("next", self.tensor_keys.terminated), as_bool(terminated))
        return data

    def _needs_bootstrap(self, data: TensorDictBase, following: TensorDictBase, time_dim: int) -> Tensor:
        """Where, in the shape of the batch, row t+1 does not hold the value of row t's next observation."""
        done, terminated = (as_bool(flags) for flags in self._flags(following))
        inner = done.narrow(time_dim, 0, done.shape[time_dim] - 1)
        ends = torch.cat([inner, torch.ones_like(last_row(done, time_dim))], time_dim)
        goes_on = ~terminated
        valid = optional(data, self.tensor_keys.valid)
        if valid is not None:
            valid = match_rank(as_bool(valid), done)
            goes_on = goes_on & valid
            ends = valid & (ends | ~shift(valid, last_row(valid, time_dim), time_dim))
        # Where one agent's episode ends the next row may hold another observation for all of them.
        ends, goes_on = (
            mask.flatten(data.ndim).any(-1) if mask.dim() > data.ndim else mask for mask in (ends, goes_on)
        )
        return ends & goes_on

    def _call_value_net_once(
        self,
        data: TensorDictBase,
        following: TensorDictBase,
        params: TensorDictBase | None,
        time_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        key = self.tensor_keys.value
        needed = self._needs_bootstrap(data, following, time_dim)
        with self._network(params) as net:
            root, successors = (td.select(*net.in_keys, key, strict=False) for td in (data, following))
            call = self._value_sequences if "is_init" in net.in_keys else self._value_rows
            value, next_value, valid = call(net, root, successors, needed, time_dim)
        data.set(key, value)
        following.set(key, next_value)
        if self.bootstrap_budget is None:
            # Every row has its value: what an earlier call with a budget left out is no longer.
            data.pop("shifted_valid", None)
            valid = None
        return value, next_value.detach(), valid

    def _value_rows(
        self,
        net: Any,
        root: TensorDictBase,
        successors: TensorDictBase,
        needed: Tensor,
        time_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value the root, and a list of as many next observations as are needed or allowed."""
        key = self.tensor_keys.value
        order = needed.flatten().cumsum(0)
        # Asked for before the network is called, so that the host waits for the flags alone.
        budget = int(order[-1]) if self.bootstrap_budget is None else self.bootstrap_budget
        value = self._run(net, root, key)
        held = shift(value, last_row(value, time_dim), time_dim)
        if budget == 0:
            return value, held, torch.ones_like(needed)
        # The k-th needed row is the first with k of them up to it; unused budget repeats the last row.
        rows = torch.searchsorted(order, torch.arange(1, budget + 1, device=order.device))
        rows = unravel(rows.clamp_max(order.numel() - 1), needed.shape)
        inputs: Any = root[rows], successors[rows]
        bootstrap = net(finite_next(inputs[0], inputs[1], net.in_keys)).get(key)
        order = order.view_as(needed)
        granted = needed & (order <= budget)
        bootstrap = bootstrap[(order - 1).clamp(0, budget - 1)]
        return value, torch.where(match_rank(granted, value), bootstrap, held), granted | ~needed

    def _value_sequences(
        self,
        net: Any,
        root: TensorDictBase,
        successors: TensorDictBase,
        needed: Tensor,
        time_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value sequences in which each needed next observation stands between its row and the next one."""
        key = self.tensor_keys.value
        steps = needed.shape[time_dim]
        before = (needed.cumsum(time_dim) - needed.long()).movedim(time_dim, -1)
        extra = self.bootstrap_budget
        if extra is None:
            extra = int(before[..., -1].max()) + 1
        if key not in root or key not in successors:
            root, successors = (td.exclude(key) for td in (root, successors))
        # A next observation belongs to its row's episode; only the root's marks open another.
        successors = finite_next(root, successors, net.in_keys)
        successors.set("is_init", torch.zeros_like(root.get("is_init")))

        slots = (before + torch.arange(steps, device=needed.device)).contiguous()
        positions = torch.arange(steps + extra, device=needed.device).expand(*slots.shape[:-1], -1)
        row = torch.searchsorted(slots, positions.contiguous(), right=True) - 1
        inserted = slots.gather(-1, row) != positions
        source = (row + steps * inserted).movedim(-1, time_dim)
        streams: Any = [root, successors]
        inputs: Any = torch.cat(streams, time_dim).gather(time_dim, source)
        values = self._run(net, inputs, key)

        slots = slots.movedim(-1, time_dim)
        index = match_rank(slots.clamp_max(steps + extra - 2), values)
        index = index.expand(*needed.shape, *values.shape[needed.dim() :])
        valid = slots + 1 < steps + extra
        return values.gather(time_dim, index), values.gather(time_dim, index + 1), valid
