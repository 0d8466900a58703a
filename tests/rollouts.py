"""Rollouts as TorchRL's collectors write them, and value networks for them."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

OBS = 3


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
    values: bool = True,
) -> TensorDict:
    """A batch of windows; `("next", "obs")[t]` is `obs[t+1]` except where the episode ends."""
    time_dim %= len(batch)
    done, terminated, truncated = flags(*batch, *features, rate=rate)
    obs = torch.randn(*batch, OBS, dtype=dtype)
    held = obs.roll(-1, time_dim)
    ends = done.flatten(len(batch)).any(-1, keepdim=True)
    ends.select(time_dim, -1).fill_(True)
    next_obs = torch.where(ends, torch.randn(*batch, OBS, dtype=dtype), held)
    data = TensorDict(
        {
            "obs": obs,
            "next": {
                "obs": next_obs,
                "reward": torch.randn(*batch, *features, dtype=dtype),
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch,
        names=["time" if dim == time_dim else None for dim in range(len(batch))] if named else None,
    )
    if values:
        data["state_value"] = torch.randn(*batch, *features, dtype=dtype)
        data["next", "state_value"] = torch.randn(*batch, *features, dtype=dtype)
    return data


class CountingLinear(nn.Linear):
    """A linear layer that keeps the shapes of its inputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return super().forward(x)


def value_net(out_features: int = 1, dtype: torch.dtype = torch.float32) -> TensorDictModule:
    return TensorDictModule(
        CountingLinear(OBS, out_features, dtype=dtype), in_keys=["obs"], out_keys=["state_value"]
    )
