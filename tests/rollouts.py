"""Rollouts as TorchRL's collectors write them, value networks for them, and what the estimators do not do."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.modules import GRUModule, LSTMModule

from rl_triton import scan

assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)

OBS = 3
HIDDEN = 4

# Operators whose result, or whose result's shape, the host waits for.
SYNCHRONISING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")


class ForbidSync(TorchDispatchMode):
    """Fails on the CPU too where a CUDA tensor would make the host wait, or needs a list from the host."""

    def __enter__(self):
        # On the CPU alone the scan looks at its result and at coefficients, which costs nothing there.
        self.looks = (
            mock.patch("rl_triton._ops.doubling_scan", scan.selecting_scan),
            mock.patch("rl_triton._ops._number", lambda coefficient, _: coefficient),
        )
        for look in self.looks:
            look.start()
        return super().__enter__()

    def __exit__(self, *exc_info):
        for look in self.looks:
            look.stop()
        return super().__exit__(*exc_info)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in SYNCHRONISING, f"{name} waits for the device"
        assert name != "lift_fresh" or args[0].numel() == 1, "a list is copied to the device"
        return func(*args, **(kwargs or {}))


def flags(*shape: int, rate: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """`(done, terminated, truncated)`, the last two about equally often."""
    done = torch.rand(shape) < rate
    terminated = done & (torch.rand(shape) < 0.5)
    return done, terminated, done & ~terminated


def rollout(
    *batch: int,
    time_dim: int = -1,
    features: tuple[int, ...] = (1,),
    dtype: torch.dtype = torch.float32,
    rate: float = 0.2,
    named: bool = False,
    values: bool = False,
) -> Any:
    """A tensordict of windows; `("next", "obs")[t]` is `obs[t+1]` except where an episode or window ends."""
    time_dim %= len(batch)
    done, terminated, truncated = flags(*batch, *features, rate=rate)
    ends = done.flatten(len(batch)).any(-1, keepdim=True) if features else done.unsqueeze(-1)
    opens = ends.roll(1, time_dim)
    opens.select(time_dim, 0).fill_(True)
    obs = torch.randn(*batch, OBS, dtype=dtype)
    held = obs.roll(-1, time_dim)
    held.select(time_dim, -1).normal_()
    data = TensorDict(
        {
            "obs": obs,
            "is_init": opens,
            "next": {
                "obs": torch.where(ends, torch.randn_like(obs), held),
                "is_init": torch.zeros_like(opens),
                "reward": torch.randn(*batch, *features, dtype=dtype),
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch,
    )
    if named:
        data.names = ["time" if dim == time_dim else None for dim in range(len(batch))]
    if values:
        data["state_value"] = torch.randn(*batch, *features, dtype=dtype)
        data["next", "state_value"] = torch.randn(*batch, *features, dtype=dtype)
    return data


class CountingLinear(nn.Linear):
    """A linear layer that keeps the shapes of its inputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append(tuple(input.shape))
        return super().forward(input)


def value_net(out_features: int = 1, key: str = "state_value", dtype=torch.float32) -> Any:
    return TensorDictModule(CountingLinear(OBS, out_features, dtype=dtype), in_keys=["obs"], out_keys=[key])


def recurrent_value_net(kind: str) -> Any:
    module = {"lstm": LSTMModule, "gru": GRUModule}[kind]
    memory: Any = module(input_size=OBS, hidden_size=HIDDEN, in_key="obs", out_key="features", device="cpu")
    head: Any = TensorDictModule(nn.Linear(HIDDEN, 1), in_keys=["features"], out_keys=["state_value"])
    return TensorDictSequential(memory, head)


def with_hidden_state(data: Any) -> Any:
    """The recurrent state of a memory that starts empty, as its primer writes it."""
    for name in ("recurrent_state", "recurrent_state_h", "recurrent_state_c"):
        data[name] = torch.zeros(*data.shape, 1, HIDDEN)
        data["next", name] = torch.zeros(*data.shape, 1, HIDDEN)
    return data
