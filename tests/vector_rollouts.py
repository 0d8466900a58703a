"""Gymnasium's vector environments stepped for real, and a log of the steps that knows no autoreset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

T, N, TIME_LIMIT = 24, 8, 18


class Transition(NamedTuple):
    obs: np.ndarray
    reward: float
    next_obs: np.ndarray
    terminated: bool
    truncated: bool


class Recorder(gym.Wrapper):
    """Logs the transitions of one environment."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.log: list[Transition] = []

    def reset(self, **kwargs: Any):
        self.obs, info = self.env.reset(**kwargs)
        return self.obs, info

    def step(self, action: Any):
        next_obs, reward, terminated, truncated, info = self.env.step(action)
        # Not CartPole's constant reward: a wrong row must show.
        reward = float(reward) + float(next_obs[0])
        self.log.append(Transition(self.obs, reward, next_obs, terminated, truncated))
        self.obs = next_obs
        return next_obs, reward, terminated, truncated, info


class Window(NamedTuple):
    """The buffers of one rollout, and per env the transitions that it saw."""

    rewards: Tensor
    values: Tensor
    terminateds: Tensor
    truncateds: Tensor
    final_values: Tensor
    dones: Tensor
    next_value: Tensor
    next_done: Tensor
    transitions: list[list[Transition]]


def value(obs: np.ndarray | Tensor) -> Tensor:
    """A value function that tells all observations apart."""
    obs = torch.as_tensor(obs, dtype=torch.float32)
    return 5 + 3 * torch.sin(obs @ torch.tensor([7.0, 3.0, 11.0, 2.0]))


def windows(mode: AutoresetMode, count: int = 5) -> Iterator[Window]:
    """Consecutive rollouts of random actions on CartPole."""
    rng = np.random.default_rng(9)
    recorders = [Recorder(gym.make("CartPole-v1", max_episode_steps=TIME_LIMIT)) for _ in range(N)]
    envs = SyncVectorEnv([lambda env=env: env for env in recorders], autoreset_mode=mode)
    obs, _ = envs.reset(seed=5)
    done = torch.zeros(N, dtype=torch.bool)
    for _ in range(count):
        starts = [len(env.log) for env in recorders]
        rows = []
        for _ in range(T):
            values, opens = value(obs), done
            obs, rewards, terminated, truncated, infos = envs.step(rng.integers(0, 2, N))
            ended = terminated | truncated
            # NaN where a final value must not be read.
            final_values = torch.full((N,), float("nan"))
            for i in np.flatnonzero(truncated & ~terminated):
                final_values[i] = value(infos["final_obs"][i] if mode == AutoresetMode.SAME_STEP else obs[i])
            if mode == AutoresetMode.DISABLED and ended.any():
                obs, _ = envs.reset(options={"reset_mask": ended})
            done = torch.as_tensor(ended)
            flags = (torch.as_tensor(terminated), torch.as_tensor(truncated))
            rows.append((torch.as_tensor(rewards).float(), values, *flags, final_values, opens))
        transitions = [env.log[start:] for env, start in zip(recorders, starts, strict=True)]
        buffers = [torch.stack(column) for column in zip(*rows, strict=True)]
        yield Window._make([*buffers, value(obs), done, transitions])
    envs.close()


def advantages_by_episode(transitions: list[Transition], gamma: float, lambda_: float) -> Tensor:
    """`A[k] = Σ_j (γλ)^j δ[k+j]` in float64, the sum running to the end of the episode or of the log."""
    advantages = []
    while transitions:
        ends = [k for k, x in enumerate(transitions) if x.terminated or x.truncated]
        length = ends[0] + 1 if ends else len(transitions)
        episode, transitions = transitions[:length], transitions[length:]
        deltas = []
        for x in episode:
            bootstrap = 0.0 if x.terminated else gamma * value(x.next_obs).item()
            deltas.append(x.reward + bootstrap - value(x.obs).item())
        weights = (gamma * lambda_) ** np.arange(length)
        advantages += [np.dot(weights[: length - k], deltas[k:]) for k in range(length)]
    return torch.tensor(np.array(advantages))
