"""CartPole and Pendulum as batched torch environments, for rollouts that never leave the device.

Importing this module registers them with Gymnasium.

Examples:
    >>> import gymnasium as gym
    >>> import rl_triton.integrations.envs
    >>> envs = gym.make_vec("rl_triton/CartPole-v1", num_envs=4096, device="cuda", autoreset_mode="SameStep")
    >>> observations, infos = envs.reset(seed=1)

The dynamics, rewards, limits and spaces are those of Gymnasium's `CartPole-v1` and `Pendulum-v1`, in float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import packages_of

with packages_of("examples", __name__):
    import gymnasium as gym
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space


class State(NamedTuple):
    """What an environment remembers between two steps, one row per env."""

    # Positions and velocities, float32 `[num_envs, dimensions]`.
    physics: Tensor
    # Steps taken in the running episode, int64 `[num_envs]`.
    elapsed: Tensor
    # Whether the last step terminated the episode, bool `[num_envs]`.
    terminated: Tensor


Step = tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]


class TorchVectorEnv(VectorEnv[Tensor, Tensor, Tensor], ABC):
    """A batch of environments whose state, observations, rewards and flags are tensors on one device.

    `step` takes a tensor (or array) of actions and returns `(observations, rewards, terminateds, truncateds,
    infos)`: float32 `[num_envs, ...]`, float32 and bool `[num_envs]`. It neither synchronises with the host
    nor returns a view of the state.

    - Same-step autoreset: an env that ends returns the first observation of its next episode.
      `infos["final_obs"]` holds the observations really reached, of every env; `infos["_final_obs"]` marks
      those that ended.
    - Next-step: an env that ended resets in the following step, whatever its action, with reward 0.
    - Disabled: an env that ended waits for `reset(options={"reset_mask": mask})`, `mask` bool `[num_envs]`;
      until then its steps change nothing, with reward 0 and the flags it ended with.

    A new environment stands at the start of unseeded episodes. `reset(seed=...)` seeds `generator`, the only
    source of randomness.

    `transition` is `step` as a pure function of state, actions and initial physics, which `torch.compile`
    takes as one graph: `env.transition = torch.compile(env.transition)` speeds up `step`. For CUDA graphs,
    the state lives in buffers that are updated in place; after
    `graph.register_generator_state(env.generator)` a capture may hold any number of steps.

    Args:
        num_envs: rows of the batch.
        max_episode_steps: steps after which an episode is truncated.
        device: where the tensors live.
        autoreset_mode: `gymnasium.vector.AutoresetMode` or its value.
    """

    single_observation_space: gym.spaces.Box
    # Initial physics are uniform in [-bound, bound), per dimension.
    start_bounds: tuple[float, ...]

    def __init__(
        self,
        num_envs: int,
        max_episode_steps: int,
        device: torch.device | str = "cpu",
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    ) -> None:
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"autoreset_mode": self.autoreset_mode, "render_modes": []}
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

        self._bounds = torch.tensor(self.start_bounds, dtype=torch.float32, device=device)
        self.device = self._bounds.device
        self.generator = torch.Generator(self.device)
        self.generator.seed()
        self._state = self._opening(self.sample_physics())

    @abstractmethod
    def dynamics(self, physics: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of every env: the physics reached, the rewards, and which envs terminated."""

    @abstractmethod
    def observe(self, physics: Tensor) -> Tensor:
        """The observations of a batch of physics."""

    def sample_physics(self) -> Tensor:
        """Initial physics for every env, drawn from `generator`."""
        shape = (self.num_envs, len(self.start_bounds))
        uniform = torch.empty(shape, dtype=torch.float32, device=self.device)
        return uniform.uniform_(-1, 1, generator=self.generator) * self._bounds

    def transition(self, state: State, actions: Tensor, fresh: Tensor) -> tuple[State, Step]:
        """The next state, and what `step` returns for it; envs that reset go to their row of `fresh`."""
        physics, rewards, terminated = self.dynamics(state.physics, actions)
        reached = State(physics, state.elapsed + 1, terminated)
        infos = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            done = self._done(reached)
            infos = {"final_obs": self.observe(physics), "_final_obs": done}
            state = _select(done, self._opening(fresh), reached)
        else:
            # An env that ended in the last step does not move: it resets, or waits for a reset.
            done = self._done(state)
            resting = self._opening(fresh) if self.autoreset_mode is AutoresetMode.NEXT_STEP else state
            state = reached = _select(done, resting, reached)
            rewards = rewards.masked_fill(done, 0.0)
        truncated = reached.elapsed >= self.max_episode_steps
        return state, (self.observe(state.physics), rewards, reached.terminated, truncated, infos)

    def step(self, actions: Tensor | np.ndarray) -> Step:
        state, step = self.transition(self._state, self._as_actions(actions), self.sample_physics())
        self._set_state(state)
        return step

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start new episodes in all envs, or where `options["reset_mask"]` is set."""
        options = options or {}
        if unknown := options.keys() - {"reset_mask"}:
            raise ValueError(f"options may hold 'reset_mask' alone, got {sorted(unknown)}")
        if seed is not None:
            self.generator.manual_seed(seed)
        state = self._opening(self.sample_physics())
        if "reset_mask" in options:
            mask = torch.as_tensor(options["reset_mask"], device=self.device)
            if mask.dtype != torch.bool or mask.shape != (self.num_envs,):
                raise ValueError(
                    f"options['reset_mask'] must be bool of shape [{self.num_envs}], "
                    f"got {mask.dtype} of shape {list(mask.shape)}"
                )
            state = _select(mask, state, self._state)
        self._set_state(state)
        return self.observe(state.physics), {}

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state of all envs and of the generator, from which a run continues bit by bit."""
        state = {name: value.clone() for name, value in self._state._asdict().items()}
        return state | {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Continue from a `state_dict` of the same environment, number of envs and type of device."""
        expected = self._state._asdict() | {"generator": self.generator.get_state()}
        if state_dict.keys() != expected.keys():
            raise ValueError(f"state_dict must have the keys {sorted(expected)}, got {sorted(state_dict)}")
        for name, value in expected.items():
            want, got = list(value.shape), list(state_dict[name].shape)
            if got != want:
                raise ValueError(f"state_dict[{name!r}] must have shape {want}, got {got}")
        self._set_state(State(*(state_dict[name] for name in State._fields)))
        self.generator.set_state(state_dict["generator"].cpu())

    def _as_actions(self, actions: Tensor | np.ndarray) -> Tensor:
        tensor = torch.as_tensor(actions, device=self.device)
        discrete = isinstance(self.single_action_space, gym.spaces.Discrete)
        shape = (self.num_envs, *(self.single_action_space.shape or ()))
        if tensor.is_floating_point() == discrete or tensor.shape != shape:
            raise ValueError(
                f"actions must be {'integers' if discrete else 'floats'} of shape {list(shape)}, "
                f"got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        return tensor

    def _opening(self, physics: Tensor) -> State:
        elapsed = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return State(physics, elapsed, torch.zeros_like(elapsed, dtype=torch.bool))

    def _done(self, state: State) -> Tensor:
        return state.terminated | (state.elapsed >= self.max_episode_steps)

    def _set_state(self, state: State) -> None:
        # In place, so that a captured graph finds the state where it left it.
        for buffer, value in zip(self._state, state, strict=True):
            buffer.copy_(value)


class CartPole(TorchVectorEnv):
    """Balance a pole on a cart by pushing it left (0) or right (1).

    Observations are cart position, cart velocity, pole angle and its velocity. The reward is 1 per step; an
    episode terminates when the cart leaves ±2.4 or the pole ±12 degrees.

    Barto, Sutton, Anderson, Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems,
    1983.
    """

    gravity = 9.8
    pole_mass = 0.1
    total_mass = 1.1
    # Half of the pole's length.
    length = 0.5
    force = 10.0
    time_step = 0.02
    position_limit = 2.4
    angle_limit = math.radians(12)
    start_bounds = (0.05,) * 4

    single_action_space = gym.spaces.Discrete(2)
    # The limits end an episode, so the observation that ends it needs room beyond them.
    _high = np.array([2 * position_limit, np.inf, 2 * angle_limit, np.inf], dtype=np.float32)
    single_observation_space = gym.spaces.Box(-_high, _high, dtype=np.float32)

    def dynamics(self, physics: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        position, velocity, angle, spin = physics.unbind(-1)
        push = torch.where(actions == 1, self.force, -self.force).to(physics.dtype)
        sin, cos = torch.sin(angle), torch.cos(angle)
        pole_moment = self.pole_mass * self.length

        thrust = (push + pole_moment * spin.square() * sin) / self.total_mass
        leverage = self.length * (4 / 3 - self.pole_mass * cos.square() / self.total_mass)
        spin_change = (self.gravity * sin - cos * thrust) / leverage
        velocity_change = thrust - pole_moment * spin_change * cos / self.total_mass
        # Explicit Euler: every quantity moves with the old rates.
        rates = torch.stack([velocity, velocity_change, spin, spin_change], dim=-1)
        physics = physics + self.time_step * rates

        terminated = (physics[:, 0].abs() > self.position_limit) | (physics[:, 2].abs() > self.angle_limit)
        return physics, torch.ones_like(position), terminated

    def observe(self, physics: Tensor) -> Tensor:
        return physics


class Pendulum(TorchVectorEnv):
    """Swing up a pendulum with a torque in ±2 and hold it upright.

    Observations are cosine and sine of the angle (0 is upright) and the angular velocity. The reward is
    `-(angle² + 0.1 spin² + 0.001 torque²)` of the state before the step, the angle in [-π, π). Episodes never
    terminate.
    """

    gravity = 10.0
    mass = 1.0
    length = 1.0
    time_step = 0.05
    max_spin = 8.0
    max_torque = 2.0
    start_bounds = (math.pi, 1.0)

    single_action_space = gym.spaces.Box(-max_torque, max_torque, shape=(1,), dtype=np.float32)
    _high = np.array([1, 1, max_spin], dtype=np.float32)
    single_observation_space = gym.spaces.Box(-_high, _high, dtype=np.float32)

    def dynamics(self, physics: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, spin = physics.unbind(-1)
        torque = actions[:, 0].float().clamp(-self.max_torque, self.max_torque)
        wrapped = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        costs = wrapped.square() + 0.1 * spin.square() + 0.001 * torque.square()

        acceleration = 1.5 * self.gravity / self.length * torch.sin(angle)
        acceleration = acceleration + 3 / (self.mass * self.length**2) * torque
        spin = (spin + acceleration * self.time_step).clamp(-self.max_spin, self.max_spin)
        # Semi-implicit Euler: the angle moves with the new velocity.
        angle = angle + spin * self.time_step
        return torch.stack([angle, spin], dim=-1), -costs, torch.zeros_like(angle, dtype=torch.bool)

    def observe(self, physics: Tensor) -> Tensor:
        angle, spin = physics.unbind(-1)
        return torch.stack([torch.cos(angle), torch.sin(angle), spin], dim=-1)


def _select(mask: Tensor, chosen: State, other: State) -> State:
    physics = torch.where(mask[:, None], chosen.physics, other.physics)
    return State(physics, *(torch.where(mask, x, y) for x, y in zip(chosen[1:], other[1:], strict=True)))


gym.register(
    "rl_triton/CartPole-v1",
    vector_entry_point="rl_triton.integrations.envs:CartPole",
    max_episode_steps=500,
    reward_threshold=475.0,
)
gym.register(
    "rl_triton/Pendulum-v1",
    vector_entry_point="rl_triton.integrations.envs:Pendulum",
    max_episode_steps=200,
)
