"""PPO with the advantage estimator of your choice, on Gymnasium or on environments that live on the GPU.

    python examples/ppo.py --env-id CartPole-v1 --stop-at 475
    python examples/ppo.py --env-id rl_triton/CartPole-v1 --device cuda --cudagraphs
    torchrun --nproc-per-node 2 examples/ppo.py --env-id rl_triton/CartPole-v1

Schulman et al., 2017, https://arxiv.org/abs/1707.06347
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import common
import parts
import torch
from common import Graphed, Ranks, Stages, fail
from parts import Envs, Estimator, GradientStep, RunningNorm
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss


@dataclasses.dataclass
class Config(common.RunConfig):
    num_envs: int = 8
    """Environments per process."""
    num_steps: int = 128
    """Steps of each environment per rollout."""
    estimator: Literal["triton", "torchrl", "torchrl-vec", "loop"] = "triton"
    """Who computes the advantages: rl_triton, TorchRL (default or vectorized=True), a CleanRL-style loop."""
    recompute: Literal["rollout", "epoch", "minibatch"] = "rollout"
    """How often values and advantages are computed anew."""

    learning_rate: float = 3e-4
    """Adam's step size, annealed to 0 over the run."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    epochs: int = 4
    """Passes over a rollout."""
    minibatches: int = 4
    """Minibatches per pass."""
    clip: float = 0.2
    """Clipping range of the probability ratio."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the squared value error."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of actor and critic."""
    normalize_observations: bool = False
    """Whether observations are normalised by their running statistics."""
    reward_scale: float = 1.0
    """Factor on the rewards that are learned from; returns are reported unscaled."""

    compile: bool = False
    """Compile the policy step, the torch-native environment, the value pass and the loss."""
    cudagraphs: bool = False
    """Replay rollout, value pass, advantages and updates as CUDA graphs (needs rl_triton/* on a GPU)."""


GPU = {"device": "auto", "num_envs": 4096, "num_steps": 32, "epochs": 4}
CARTPOLE = {"learning_rate": 1e-3, "epochs": 10}
PENDULUM = {"learning_rate": 1e-3, "epochs": 10, "gamma": 0.9, "entropy_coef": 0.0, "reward_scale": 0.1}
MUJOCO = {
    "num_envs": 1,
    "num_steps": 2048,
    "total_steps": 1_000_000,
    "epochs": 10,
    "minibatches": 32,
    "entropy_coef": 0.0,
    "normalize_observations": True,
}
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": CARTPOLE | {"num_steps": 32, "total_steps": 60_000},
    "Pendulum-v1": PENDULUM | {"total_steps": 300_000},
    "HalfCheetah-v5": MUJOCO,
    "Hopper-v5": MUJOCO,
    "rl_triton/CartPole-v1": CARTPOLE | GPU | {"total_steps": 10_000_000, "reward_scale": 0.1},
    "rl_triton/Pendulum-v1": PENDULUM | GPU | {"total_steps": 20_000_000},
}


def make_estimator(name: str, gamma: float, lmbda: float) -> Estimator:
    """The estimator `name`, for batches that hold values."""
    if name == "triton":
        from rl_triton.integrations.torchrl import GAE

        return GAE(gamma=gamma, lmbda=lmbda, value_network=None)
    if name == "loop":
        return lambda batch: loop_gae(batch, gamma, lmbda)
    from torchrl.objectives.value import GAE

    return GAE(gamma=gamma, lmbda=lmbda, value_network=None, vectorized=name == "torchrl-vec")


def loop_gae(batch: TensorDict, gamma: float, lmbda: float) -> None:
    """Advantages as CleanRL's scripts compute them, one step after the other."""
    reward, value, next_value = batch["next", "reward"], batch["state_value"], batch["next", "state_value"]
    going_on, uncut = ~batch["next", "terminated"], ~batch["next", "done"]
    advantage = torch.empty_like(value)
    carry = torch.zeros_like(value[:, 0])
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value[:, t] * going_on[:, t] - value[:, t]
        advantage[:, t] = carry = delta + gamma * lmbda * uncut[:, t] * carry
    batch["advantage"], batch["value_target"] = advantage, advantage + value


class PPOLoss(ClipPPOLoss):
    """TorchRL's loss, without asking the host whether the entropy is finite: a CUDA graph forbids that."""

    def _get_entropy(self, dist: torch.distributions.Distribution, adv_shape: torch.Size) -> Tensor:
        return dist.entropy().unsqueeze(-1)


class PPO:
    """The algorithm: `iterate` collects one rollout and learns from it."""

    def __init__(self, config: Config, estimator: Estimator | None = None) -> None:
        self.config = config
        self.device = common.torch_device(config.device, config.threads)
        self.ranks = Ranks(self.device)
        self.num_envs = config.num_envs
        self.batch_size = config.num_envs * config.num_steps
        self.iteration_steps = self.batch_size * self.ranks.world
        self.iterations = math.ceil(config.total_steps / self.iteration_steps)
        self.iteration = 0
        if self.batch_size % config.minibatches:
            fail(f"--minibatches {config.minibatches} must divide num_envs x num_steps = {self.batch_size}")
        self.envs = Envs(config.env_id, config.num_envs, self.device)
        self.saves_envs = self.envs.native is not None
        if config.cudagraphs and self.device.type != "cuda":
            fail(f"--cudagraphs needs a GPU, and --device {config.device} is {self.device}")
        if config.cudagraphs and self.envs.native is None:
            fail(f"--cudagraphs needs an rl_triton/ environment, got {config.env_id}")
        self.stages = Stages(self.device)
        self.estimator = estimator or make_estimator(config.estimator, config.gamma, config.gae_lambda)
        # rl_triton's bootstraps from the few final observations that matter; the others want all next values.
        self.every_next_value = config.estimator != "triton"
        # Several processes exchange gradients during an update, so theirs stays eager.
        self.graphs_update = config.cudagraphs and self.ranks.world == 1
        torch.manual_seed(config.seed)
        self._build_networks()
        seed = config.seed + 1000 * self.ranks.rank
        torch.manual_seed(seed)
        self._allocate(self.envs.reset(seed))

        graphed = config.cudagraphs
        env_generators = [self.envs.native.generator] if self.envs.native is not None else []
        # TorchRL's estimators synchronise with the host; they and the loop run as their users run them.
        capturable = graphed and config.estimator == "triton"
        self.rollout = Graphed(self._rollout, "collect", self.stages, graphed, env_generators)
        self.value_pass = Graphed(self._value_pass, "value net", self.stages, graphed)
        self.estimate = Graphed(self._estimate, "advantage", self.stages, capturable)
        self.update = self._update
        if self.graphs_update:
            self.update = Graphed(self._update, "update", self.stages, True)

    def _build_networks(self) -> None:
        config, shape = self.config, self.envs.observation_shape
        if len(shape) != 1:
            fail(
                f"--env-id {config.env_id}: observations must be vectors, got {shape}; impala.py takes images"
            )
        size = shape[0]
        self.norm = RunningNorm(size) if config.normalize_observations else None

        def body() -> nn.Module:
            layers = parts.mlp(size, config.hidden)
            return nn.Sequential(self.norm, layers) if self.norm else layers

        features = (size, *config.hidden)[-1]
        self.actor, self.critic = parts.actor_critic(body, features, self.envs.action_space, self.device)
        self.loss_module = PPOLoss(
            self.actor,
            self.critic,
            clip_epsilon=config.clip,
            entropy_coeff=config.entropy_coef,
            critic_coeff=config.value_coef,
            loss_critic_type="l2",
            normalize_advantage=True,
            functional=False,
        )
        self.step = GradientStep(
            self.loss_module,
            "adam",
            config.learning_rate,
            config.max_grad_norm,
            self.ranks,
            self.stages,
            compiled=config.compile,
            graphed=self.graphs_update,
        )
        self.act, self.critic_net = self._act, self.critic.module
        if config.compile:
            self.act, self.critic_net = torch.compile(self.act), torch.compile(self.critic_net)
            if self.envs.native is not None:
                self.envs.native.transition = torch.compile(self.envs.native.transition)

    def _allocate(self, observation: Tensor) -> None:
        """The buffers that every iteration, and every replay of a graph, finds at the same place."""
        action, log_prob = self._act(observation)
        number = observation.new_zeros(self.num_envs, 1)
        flag = torch.zeros_like(number, dtype=torch.bool)
        row = TensorDict(
            {
                "observation": observation,
                "action": action,
                "action_log_prob": log_prob,
                "state_value": number,
                "advantage": number,
                "value_target": number,
                "next": {
                    "observation": observation,
                    "reward": number,
                    "terminated": flag,
                    "truncated": flag,
                    "done": flag,
                    "episode_reward": number,
                    "bootstrap_value": number,
                },
            },
            [self.num_envs],
        )
        if self.every_next_value:
            row["next", "state_value"] = number
        self.batch = row.unsqueeze(1).expand(self.num_envs, self.config.num_steps).clone()
        # [N * T] views for the minibatches.
        learned_from = ("observation", "action", "action_log_prob", "advantage", "value_target")
        self.samples = self.batch.select(*learned_from).view(-1)
        minibatch_size = self.batch_size // self.config.minibatches
        self.index = torch.zeros(minibatch_size, dtype=torch.long, device=self.device)
        self.observation = observation.clone()
        self.episode_reward = torch.zeros(self.num_envs, device=self.device)

    @torch.no_grad()
    def _act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        policy = self.actor.get_dist(TensorDict({"observation": observation}, observation.shape[:1]))
        action = policy.sample()
        return action, policy.log_prob(action)

    @torch.no_grad()
    def _rollout(self) -> None:
        batch, after = self.batch, self.batch["next"]
        observation, episode_reward = self.observation, self.episode_reward
        for t in range(self.config.num_steps):
            action, log_prob = self.act(observation)
            reached, reward, terminated, truncated, following = self.envs.step(action)
            done = terminated | truncated
            episode_reward = episode_reward + reward
            batch["observation"][:, t] = observation
            batch["action"][:, t] = action
            batch["action_log_prob"][:, t] = log_prob
            after["observation"][:, t] = reached
            after["reward"][:, t, 0] = reward * self.config.reward_scale
            after["terminated"][:, t, 0] = terminated
            after["truncated"][:, t, 0] = truncated
            after["done"][:, t, 0] = done
            after["episode_reward"][:, t, 0] = episode_reward
            episode_reward = episode_reward * ~done
            observation = following
        self.observation.copy_(observation)
        self.episode_reward.copy_(episode_reward)

    @torch.no_grad()
    def _value_pass(self) -> None:
        gap = self.envs.min_truncation_gap
        parts.value_pass(self.critic_net, self.batch, gap, self.every_next_value)

    @torch.no_grad()
    def _estimate(self) -> None:
        parts.estimate(self.estimator, self.batch)

    def _update(self) -> None:
        with self.stages("index"):
            minibatch = self.samples[self.index]
        self.step(minibatch)

    def iterate(self) -> None:
        """One rollout and the updates on it."""
        config = self.config
        self.step.restart(share=1 - self.iteration / self.iterations)
        self.rollout()
        for epoch in range(config.epochs):
            order = torch.randperm(self.batch_size, device=self.device).view(config.minibatches, -1)
            for number, index in enumerate(order):
                stale = {"rollout": epoch == number == 0, "epoch": number == 0, "minibatch": True}
                if stale[config.recompute]:
                    self.value_pass()
                    self.estimate()
                self.index.copy_(index)
                self.update()
        if self.norm is not None:
            self.norm.update(self.batch["observation"])
        self.iteration += 1

    @property
    def steps(self) -> int:
        return self.iteration * self.iteration_steps

    def finished_returns(self) -> list[float]:
        return common.finished_returns(self.batch)

    def numbers(self) -> dict[str, float]:
        return self.step.averages()

    def evaluate(self) -> float:
        return parts.evaluate(self.actor, self.config, self.device)

    def film(self, folder: Path) -> None:
        parts.film(self.actor, self.config, self.device, folder)

    def state_dict(self) -> dict[str, Any]:
        """What a run continues from: bit by bit, if the environments can be saved too."""
        state = {"iteration": self.iteration, **self.step.state_dict()}
        if self.envs.native is not None:
            state["envs"] = self.envs.native.state_dict()
            state |= {"observation": self.observation, "episode_reward": self.episode_reward}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        self.step.load_state_dict(state)
        if self.envs.native is not None:
            self.envs.native.load_state_dict(state["envs"])
            self.observation.copy_(state["observation"])
            self.episode_reward.copy_(state["episode_reward"])
        else:
            self.observation.copy_(self.envs.reset(self.config.seed + state["steps"]))
        common.restore_rng(state, self.ranks, self.config.seed)

    def close(self) -> None:
        self.envs.close()
        self.ranks.close()


if __name__ == "__main__":
    config = common.parse(Config, PRESETS, name="ppo")
    common.train(PPO, config)
