"""What PPO and IMPALA are made of: environments as tensors, networks, value pass, gradient step."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import gymnasium as gym
import numpy as np
import torch
from common import Ranks, RunConfig, Stages, fail
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, RecordVideo
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

# Importing it registers rl_triton/CartPole-v1 and rl_triton/Pendulum-v1.
from rl_triton.integrations.envs import TorchVectorEnv

# Checking the parameters of a distribution reads them on the host: a synchronisation per step on a GPU.
torch.distributions.Distribution.set_default_validate_args(False)

# Adds `advantage` and `value_target` to a batch of rollouts `[N, T]` that holds values.
Estimator = Callable[[TensorDictBase], Any]


# Environments


def make_vector_env(
    env_id: str, num_envs: int, mode: AutoresetMode, device: torch.device | str = "cpu"
) -> gym.vector.VectorEnv:
    """Gymnasium's environments one after the other, or as the batch that rl_triton/* and ALE/* come in."""
    try:
        if env_id.startswith("rl_triton/"):
            return gym.make_vec(env_id, num_envs, device=device, autoreset_mode=mode)
        if env_id.startswith("ALE/"):
            gym.register_envs(importlib.import_module("ale_py"))
            # The trainer clips, and reports the whole score. One thread: actors are what runs in parallel.
            kwargs = {"reward_clipping": False, "num_threads": 1}
            return gym.make_vec(env_id, num_envs, autoreset_mode=mode, **kwargs)
        kwargs = {"autoreset_mode": mode}
        return gym.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs=kwargs)
    except (gym.error.Error, ImportError) as error:
        hint = ": pip install ale-py" if isinstance(error, ImportError) and error.name == "ale_py" else ""
        fail(f"--env-id {env_id}: {error}{hint}")


class Envs:
    """A Gymnasium vector environment seen through tensors of one device.

    The autoreset mode is same-step: an env that ends hands out the observation it reached and, beside it, the
    one that its next episode starts from.
    """

    def __init__(self, env_id: str, num_envs: int, device: torch.device) -> None:
        self.envs = make_vector_env(env_id, num_envs, AutoresetMode.SAME_STEP, device)
        # The environment itself where it computes on `device`, with a state that can be saved.
        inner = self.envs.unwrapped
        self.native = inner if isinstance(inner, TorchVectorEnv) else None
        observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space
        if not isinstance(observation_space, gym.spaces.Box):
            fail(f"--env-id {env_id}: observations must be a Box, got {observation_space}")
        if not isinstance(self.action_space, (gym.spaces.Discrete, gym.spaces.Box)):
            fail(f"--env-id {env_id}: actions must be Discrete or a Box, got {self.action_space}")
        self.observation_shape = observation_space.shape
        self.device = device
        # At most one truncation in so many steps of an env; 1 where that is not known.
        self.min_truncation_gap = (self.envs.spec and self.envs.spec.max_episode_steps) or 1
        if env_id.startswith("ALE/"):
            # The limit is 108,000 frames.
            self.min_truncation_gap = 10_000
        if isinstance(self.action_space, gym.spaces.Box):
            self.low, self.high = (
                torch.as_tensor(bound, device=device)
                for bound in (self.action_space.low, self.action_space.high)
            )

    def _tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array, device=self.device)

    def reset(self, seed: int) -> Tensor:
        return self._tensor(self.envs.reset(seed=seed)[0]).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`(reached, reward, terminated, truncated, observation)`; the last is where the next step starts."""
        if action.is_floating_point():
            action = action.clamp(self.low, self.high)
        if self.native is not None:
            observation, reward, terminated, truncated, infos = self.envs.step(action)
            return infos["final_obs"], reward, terminated, truncated, observation
        observation, reward, terminated, truncated, infos = self.envs.step(action.cpu().numpy())
        reached, ended = observation, terminated | truncated
        if ended.any():
            reached = observation.copy()
            reached[ended] = np.stack(infos["final_obs"][ended])
        reached, reward, observation = (self._tensor(x).float() for x in (reached, reward, observation))
        return reached, reward, self._tensor(terminated), self._tensor(truncated), observation

    def close(self) -> None:
        self.envs.close()


@torch.no_grad()
def evaluate(actor: nn.Module, config: RunConfig, device: torch.device) -> float:
    """Mean return of the actor's most likely actions, over the first episode of each of some new envs.

    An `rl_triton/` environment is judged in Gymnasium's own of the same name.
    """
    episodes = config.eval_episodes
    envs = Envs(config.env_id.removeprefix("rl_triton/"), episodes, device)
    observation = envs.reset(config.seed + 1)
    returns = torch.zeros(episodes, device=device)
    running = torch.ones(episodes, dtype=torch.bool, device=device)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        while running.any():
            action = actor(TensorDict({"observation": observation}, [episodes]))["action"]
            _, reward, terminated, truncated, observation = envs.step(action)
            returns += reward * running
            running &= ~(terminated | truncated)
    envs.close()
    return returns.mean().item()


@torch.no_grad()
def film(actor: nn.Module, config: RunConfig, device: torch.device, folder: Path) -> None:
    """Film one episode of the actor's most likely actions, in Gymnasium's own environment."""
    try:
        if config.env_id.startswith("ALE/"):
            env = gym.make(config.env_id, render_mode="rgb_array", frameskip=1)
            env = FrameStackObservation(AtariPreprocessing(env), 4)
        else:
            env = gym.make(config.env_id.removeprefix("rl_triton/"), render_mode="rgb_array")
        env = RecordVideo(env, str(folder), disable_logger=True)
        observation, _ = env.reset(seed=config.seed)
        ended = False
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            while not ended:
                inputs = TensorDict({"observation": torch.as_tensor(observation, device=device).float()}, [])
                action = actor(inputs)["action"].cpu().numpy()
                if isinstance(env.action_space, gym.spaces.Box):
                    action = action.clip(env.action_space.low, env.action_space.high)
                observation, _, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated
        env.close()
    except Exception as error:
        # Back ends of rendering raise what they like; the run itself is over and saved.
        fail(f"--video: {error}")


# Networks


class Categorical(torch.distributions.Categorical):
    """Draws by the Gumbel trick: `torch.multinomial` reads its input on the host, which no graph may."""

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        noise = torch.empty((*sample_shape, *self.logits.shape), device=self.logits.device).exponential_()
        return (self.logits - noise.log()).argmax(-1)

    @property
    def deterministic_sample(self) -> Tensor:
        return self.mode


class Normal(IndependentNormal):
    """Draws without `torch.normal`, which reads the deviations on the host."""

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.rsample(torch.Size(sample_shape))


class RunningNorm(nn.Module):
    """Observations less their running mean, over their running deviation, within ±10.

    The statistics move when `update` is called: between a rollout and its last update they stand still.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, observation: Tensor) -> Tensor:
        return ((observation - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-10, 10)

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Take a batch `[..., size]` into the statistics."""
        batch = observations.flatten(0, -2)
        share = len(batch) / (self.count + len(batch))
        delta = batch.mean(0) - self.mean
        spread = batch.var(0, correction=0) - self.variance + (1 - share) * delta.square()
        self.mean += share * delta
        self.variance += share * spread
        self.count += len(batch)


class GaussianHead(nn.Module):
    """A linear mean, and a deviation that is the same in every state."""

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.mean = _orthogonal(nn.Linear(features, actions), 0.01)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        loc = self.mean(features)
        return loc, self.log_std.exp().expand_as(loc)


Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def _orthogonal(layer: Layer, gain: float) -> Layer:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Orthogonal linear layers with a tanh behind each."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [_orthogonal(nn.Linear(inputs, size), math.sqrt(2)), nn.Tanh()]
        inputs = size
    return nn.Sequential(*layers)


class ImpalaCNN(nn.Module):
    """IMPALA's networks for images: two convolutions, or residual units; 256 features."""

    features = 256

    def __init__(self, shape: tuple[int, ...], depth: Literal["shallow", "deep"]) -> None:
        super().__init__()
        channels = shape[0]
        layers: list[nn.Module] = []
        if depth == "shallow":
            convolutions = nn.Conv2d(channels, 16, 8, 4), nn.Conv2d(16, 32, 4, 2)
            first, second = (_orthogonal(layer, math.sqrt(2)) for layer in convolutions)
            layers += [first, nn.ReLU(), second]
        else:
            for width in (16, 32, 32):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
                layers += [ResidualUnit(width), ResidualUnit(width)]
                channels = width
        layers += [nn.ReLU(), nn.Flatten()]
        size = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
        self.layers = nn.Sequential(
            *layers, _orthogonal(nn.Linear(size, self.features), math.sqrt(2)), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        *lead, channels, height, width = images.shape
        features = self.layers(images.reshape(-1, channels, height, width).float() / 255)
        return features.reshape(*lead, self.features)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

    def forward(self, images: Tensor) -> Tensor:
        return images + self.layers(images)


def actor_critic(
    body: Callable[[], nn.Module], features: int, action_space: gym.Space, device: torch.device
) -> tuple[ProbabilisticActor, ValueOperator]:
    """An actor and a critic, each on a body of its own that turns observations into `features` numbers."""
    keys: list[Any]
    if isinstance(action_space, gym.spaces.Discrete):
        head = _orthogonal(nn.Linear(features, int(action_space.n)), 0.01)
        keys, distribution = ["logits"], Categorical
    else:
        head = GaussianHead(features, math.prod(action_space.shape or ()))
        keys, distribution = ["loc", "scale"], Normal
    actor = ProbabilisticActor(
        TensorDictModule(nn.Sequential(body(), head), ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )
    critic = ValueOperator(
        nn.Sequential(body(), _orthogonal(nn.Linear(features, 1), 1.0)), in_keys=["observation"]
    )
    for module in (actor, critic):
        module.to(device)
    return actor, critic


# Learning


def value_pass(
    critic: Callable[[Tensor], Tensor], batch: TensorDictBase, truncation_gap: int, every: bool
) -> None:
    """Values for a batch `[N, T]`, from one pass over its observations and the few final ones that matter.

    Writes `state_value`, and `("next", "bootstrap_value")` where an episode is truncated or the window ends;
    with `every` also `("next", "state_value")` in every row.
    """
    T = batch.shape[1]
    truncated = batch["next", "truncated"].squeeze(-1)
    # All truncated rows without asking how many: an env's time limit bounds them. Spare slots do no harm.
    slots = min(T, 1 + (T - 1) // truncation_gap)
    rows = truncated.int().topk(slots, dim=1).indices
    rows = torch.cat([rows, torch.full_like(rows[:, :1], T - 1)], dim=1)
    envs = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    observations = torch.cat([batch["observation"], batch["next", "observation"][envs, rows]], dim=1)
    values = critic(observations)
    batch["state_value"].copy_(values[:, :T])
    bootstrap = batch["next", "bootstrap_value"].scatter_(1, rows.unsqueeze(-1), values[:, T:])
    if every:
        following = values[:, :T].roll(-1, dims=1)
        following[:, -1] = bootstrap[:, -1]
        batch["next", "state_value"].copy_(torch.where(batch["next", "truncated"], bootstrap, following))


def estimate(estimator: Estimator, batch: TensorDictBase) -> None:
    """Write the estimator's `advantage` and `value_target` into the buffers of `batch`."""
    # The estimator replaces entries; the buffers stay.
    scratch = batch.copy()
    estimator(scratch)
    for key in ("advantage", "value_target"):
        batch[key].copy_(scratch[key])


class GradientStep:
    """Steps down the sum of a TorchRL loss module's losses, gradients averaged over processes and clipped."""

    names = ("loss_objective", "loss_critic", "loss_entropy", "entropy")

    def __init__(
        self,
        loss_module: nn.Module,
        optimizer: Literal["adam", "rmsprop"],
        learning_rate: float,
        max_grad_norm: float,
        ranks: Ranks,
        stages: Stages,
        compiled: bool,
        graphed: bool,
    ) -> None:
        self.loss_module, self.learning_rate, self.max_grad_norm = loss_module, learning_rate, max_grad_norm
        self.parameters = list(loss_module.parameters())
        device = self.parameters[0].device
        # A graph reads the step size from memory.
        self.rate = torch.tensor(learning_rate, device=device) if graphed else learning_rate
        if optimizer == "adam":
            settings: dict[str, Any] = {"lr": self.rate, "eps": 1e-5, "capturable": graphed, "fused": True}
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.parameters, **settings)
        else:
            settings = {"lr": self.rate, "alpha": 0.99, "eps": 1e-5, "capturable": graphed, "foreach": True}
            self.optimizer = torch.optim.RMSprop(self.parameters, **settings)
        self.loss: Callable[[TensorDictBase], TensorDictBase] = ranks.share(loss_module)
        if compiled:
            self.loss = torch.compile(self.loss)
        self.stages = stages
        # Sums over the steps since `restart`, and their number.
        self.sums = torch.zeros(len(self.names) + 1, device=device)

    def restart(self, share: float) -> None:
        """Anneal the step size to a share of the first one, and begin new averages."""
        rate = self.learning_rate * share
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate.fill_(rate) if isinstance(self.rate, Tensor) else rate
        self.sums.zero_()

    def __call__(self, batch: TensorDictBase) -> None:
        with self.stages("forward"):
            losses = self.loss(batch)
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        with self.stages("backward"):
            self.optimizer.zero_grad()
            loss.backward()
        with self.stages("optimiser"):
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
            self.optimizer.step()
            self.sums += torch.stack([*(losses[name].detach() for name in self.names), torch.ones_like(loss)])

    def averages(self) -> dict[str, float]:
        """The losses and the policy's entropy, averaged since `restart`."""
        *sums, count = self.sums.tolist()
        return {name: value / count for name, value in zip(self.names, sums, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.loss_module.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loss_module.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
