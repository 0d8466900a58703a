"""IMPALA: actors collect with old weights, a learner corrects for it with V-trace.

    python examples/impala.py --env-id CartPole-v1 --stop-at 475
    python examples/impala.py --env-id ALE/Pong-v5 --device cuda --num-actors 8
    RAY_ADDRESS=head:6379 python examples/impala.py --engine ray --num-actors 64
    torchrun --nproc-per-node 2 examples/impala.py --num-actors 1

Espeholt et al., 2018, https://arxiv.org/abs/1802.01561
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import logging
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal

import common
import parts
import torch
from common import Graphed, Ranks, Stages, fail
from gymnasium.vector import AutoresetMode
from parts import Envs, Estimator, GradientStep
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, RewardSum, TransformedEnv
from torchrl.objectives import A2CLoss


@dataclasses.dataclass
class Config(common.RunConfig):
    estimator: Literal["triton", "torchrl"] = "triton"
    """Who computes V-trace: rl_triton's module or TorchRL's functional."""
    engine: Literal["inline", "process", "ray"] = "process"
    """Where actors live: in the learner's process, in processes of this machine, on a Ray cluster."""
    num_actors: int = 2
    """Actors per learner; `inline` has one, with the environments of all."""
    num_envs: int = 16
    """Environments per actor."""
    num_steps: int = 32
    """Steps of each environment per rollout."""
    rollouts: int = 1
    """Rollouts per update, of whichever actors finish first."""
    updates: int = 1
    """Gradient steps per batch of rollouts, each with V-trace anew."""
    max_lag: float = 8.0
    """Rollouts that are older than so many updates, on average, are dropped."""

    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Optimiser of the learner."""
    learning_rate: float = 1e-3
    """Step size, annealed to 0 over the run."""
    gamma: float = 0.99
    """Discount."""
    rho_bar: float = 1.0
    """Cap of the importance weights of the temporal differences."""
    c_bar: float = 1.0
    """Cap of the importance weights of the traces."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus, annealed to 0 over the run."""
    value_coef: float = 0.5
    """Weight of the squared value error."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of actor and critic; images go through IMPALA's network instead."""
    cnn: Literal["shallow", "deep"] = "shallow"
    """Network for images: the paper's shallow one, or the residual one, 27 times as slow on a core."""
    clip_rewards: bool = False
    """Whether rewards are clipped to ±1 for learning."""
    reward_scale: float = 1.0
    """Factor on the rewards that are learned from; returns are reported unscaled."""

    compile: bool = False
    """Compile the passes before V-trace, and the loss."""
    cudagraphs: bool = False
    """Replay the learner's work as CUDA graphs."""


PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "total_steps": 400_000,
        "updates": 2,
        "learning_rate": 2e-3,
        "max_grad_norm": 1.0,
        "reward_scale": 0.1,
    },
    "ALE/Pong-v5": {
        "total_steps": 20_000_000,
        "device": "auto",
        "num_actors": 4,
        "num_steps": 5,
        "optimizer": "rmsprop",
        "learning_rate": 7e-4,
        "clip_rewards": True,
    },
}


def make_env(env_id: str, num_envs: int, seed: int) -> TransformedEnv:
    """An actor's environments, seen by TorchRL."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    # TorchRL is faster with the first; Atari's batch knows the second only.
    mode = AutoresetMode.SAME_STEP if env_id.startswith("ALE/") else AutoresetMode.DISABLED
    env = GymWrapper(parts.make_vector_env(env_id, num_envs, mode), categorical_action_encoding=True)
    env = TransformedEnv(env, RewardSum())
    env.set_seed(seed)
    return env


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Put Ctrl-C off; processes that are started meanwhile never hear it.

    It reaches the whole process group, but the learner alone is to answer it, and then ends its actors: one
    that Ctrl-C ended on its way up would be waited for.
    """
    # Multiprocessing's tracker lifts the block when it starts, so it is there before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Actors:
    """A stream of rollouts `[num_envs, num_steps]` from actors that run on while the learner works."""

    def __init__(self, config: Config, actor: nn.Module, seed: int) -> None:
        self.engine = config.engine
        inline = config.engine == "inline"
        num_envs = config.num_envs * (config.num_actors if inline else 1)
        frames = num_envs * config.num_steps
        constructors: list[Any] = [
            functools.partial(make_env, config.env_id, num_envs, seed + 100 * index)
            for index in range(1 if inline else config.num_actors)
        ]
        settings: dict[str, Any] = {"track_policy_version": True, "auto_register_policy_transforms": False}
        if config.engine == "ray":
            start_ray()
            remote = {"num_cpus": 1, "num_gpus": 0}
            settings = {"backend_options": {"remote_configs": remote, "collector_kwargs": settings}}
        if not inline:
            settings |= {"backend": config.engine, "num_collectors": config.num_actors, "sync": False}
        with ctrl_c_waits() if config.engine == "process" else nullcontext():
            # The collector shares its policy with the actors: a copy, which changes when `publish` says so.
            self.collector = Collector(
                create_env_fn=constructors[0] if inline else constructors,
                policy=copy.deepcopy(actor).to("cpu"),
                frames_per_batch=frames,
                # For ever; Ray's collector takes no -1.
                total_frames=frames * 10**9,
                **settings,
            )
        if config.engine == "process":
            self._watch(len(multiprocessing.active_children()))
        self.stream: Iterator[TensorDictBase] | None = None
        self.version = 0

    def _watch(self, processes: int) -> None:
        """End the run when a process ends: the collector would wait for its receipt of the next weights."""

        def on_exit(*_: object) -> None:
            if len(multiprocessing.active_children()) < processes:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                fail("an actor died (process engine)")

        signal.signal(signal.SIGCHLD, on_exit)

    def publish(self, actor: nn.Module) -> None:
        """Send the learner's weights to the actors, which take them up between two steps."""
        weights: Any = TensorDict.from_module(actor)
        self.collector.update_policy_weights_(weights.data.to("cpu"))
        self.version += 1

    def __next__(self) -> tuple[TensorDictBase, float]:
        """The next rollout, and how many updates old the weights behind its actions are, on average."""
        try:
            if self.stream is None:
                self.stream = iter(self.collector)
            rollout = next(self.stream)
        except Exception as error:
            fail(f"an actor died ({self.engine} engine): {str(error).splitlines()[0]}")
        return rollout, self.version - rollout["next", "policy_version"].float().mean().item()

    def close(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.collector.shutdown()


def start_ray() -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        fail("--engine ray needs the package ray: pip install ray")
    # The actors of other machines import these files too.
    ray.init(log_to_driver=False, runtime_env={"working_dir": str(Path(__file__).parent)})


def make_estimator(name: str, gamma: float, rho_bar: float, c_bar: float) -> Estimator:
    """The estimator `name`, for batches that hold values, `log_pi` and `action_log_prob`."""
    if name == "triton":
        from rl_triton.integrations.torchrl import VTrace

        return VTrace(gamma=gamma, rho_thresh=rho_bar, c_thresh=c_bar, actor_network=None, value_network=None)
    from torchrl.objectives.value.functional import vtrace_advantage_estimate

    # TorchRL's module takes the log-probability of another action than the stored one; its function does not.
    def estimate(batch: TensorDictBase) -> None:
        batch["advantage"], batch["value_target"] = vtrace_advantage_estimate(
            gamma,
            batch["log_pi"].unsqueeze(-1),
            batch["action_log_prob"].unsqueeze(-1),
            batch["state_value"],
            batch["next", "state_value"],
            batch["next", "reward"],
            batch["next", "done"],
            batch["next", "terminated"],
            rho_bar,
            c_bar,
        )

    return estimate


class Learner:
    """Actor and critic, and how a batch of rollouts `[N, T]` improves them."""

    inputs = (
        "observation",
        "action",
        "action_log_prob",
        *(("next", key) for key in ("observation", "reward", "done", "terminated", "truncated")),
    )

    def __init__(
        self, config: Config, envs: Envs, ranks: Ranks, stages: Stages, estimator: Estimator | None = None
    ) -> None:
        self.config, self.stages, self.device = config, stages, envs.device
        self.gap, self.every_next_value = envs.min_truncation_gap, config.estimator != "triton"
        self.estimator = estimator or make_estimator(
            config.estimator, config.gamma, config.rho_bar, config.c_bar
        )
        shape = envs.observation_shape
        if len(shape) == 3:
            shared = parts.ImpalaCNN(shape, config.cnn)
            body, features = lambda: shared, shared.features
        elif len(shape) == 1:
            size = shape[0]
            body, features = lambda: parts.mlp(size, config.hidden), (size, *config.hidden)[-1]
        else:
            fail(f"--env-id {config.env_id}: observations must be vectors or images, got shape {shape}")
        self.actor, self.critic = parts.actor_critic(body, features, envs.action_space, self.device)
        self.loss_module = A2CLoss(
            self.actor,
            self.critic,
            entropy_coeff=config.entropy_coef,
            critic_coeff=config.value_coef,
            loss_critic_type="l2",
            functional=False,
        )
        self.entropy_coeff = self.loss_module.get_buffer("entropy_coeff")
        # Several processes exchange gradients during an update, so theirs stays eager.
        graphs_update = config.cudagraphs and ranks.world == 1
        self.step = GradientStep(
            self.loss_module,
            config.optimizer,
            config.learning_rate,
            config.max_grad_norm,
            ranks,
            stages,
            compiled=config.compile,
            graphed=graphs_update,
        )
        self.score, self.critic_net = self._score, self.critic.module
        if config.compile:
            self.score, self.critic_net = torch.compile(self.score), torch.compile(self.critic_net)
        graphed = config.cudagraphs
        self.value_pass = Graphed(self._value_pass, "value net", stages, graphed)
        # TorchRL's function takes its thresholds from the host, which a capture forbids.
        self.estimate = Graphed(self._estimate, "advantage", stages, graphed and config.estimator == "triton")
        self.update = self._update
        if graphs_update:
            self.update = Graphed(self._update, "update", stages, True)

    def learn(self, rollouts: TensorDictBase, share: float) -> None:
        """One update on rollouts `[N, T]`, the step size and the entropy bonus annealed to `share`."""
        self.step.restart(share)
        self.entropy_coeff.fill_(self.config.entropy_coef * share)
        with self.stages("copy"):
            self._load(rollouts.select(*self.inputs))
        for _ in range(self.config.updates):
            self.value_pass()
            self.estimate()
            self.update()

    def _load(self, rollouts: TensorDictBase) -> None:
        """Copy into the buffers that every replay of a graph finds at the same place."""
        if not hasattr(self, "batch"):
            batch = rollouts.to(self.device)
            batch["log_pi"], number = batch["action_log_prob"], batch["next", "reward"]
            batch.update({"state_value": number, "advantage": number, "value_target": number})
            batch["next", "bootstrap_value"] = number
            if self.every_next_value:
                batch["next", "state_value"] = number
            self.batch = batch.clone()
        self.batch.update_(rollouts)
        reward = self.batch["next", "reward"].mul_(self.config.reward_scale)
        if self.config.clip_rewards:
            reward.clamp_(-1, 1)

    @torch.no_grad()
    def _value_pass(self) -> None:
        parts.value_pass(self.critic_net, self.batch, self.gap, self.every_next_value)
        self.batch["log_pi"].copy_(self.score(self.batch["observation"], self.batch["action"]))

    def _score(self, observation: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities of stored actions under the weights of now."""
        inputs = TensorDict({"observation": observation}, self.batch.shape)
        return self.actor.get_dist(inputs).log_prob(action)

    @torch.no_grad()
    def _estimate(self) -> None:
        parts.estimate(self.estimator, self.batch)

    def _update(self) -> None:
        self.step(self.batch)


class IMPALA:
    """Actors and a learner: `iterate` takes the rollouts that are ready and learns from them."""

    saves_envs = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = common.torch_device(config.device, config.threads)
        if config.cudagraphs and self.device.type != "cuda":
            fail("--cudagraphs needs --device cuda")
        self.ranks, self.stages = Ranks(self.device), Stages(self.device)
        torch.manual_seed(config.seed)
        envs = Envs(config.env_id, 1, self.device)
        self.learner = Learner(config, envs, self.ranks, self.stages)
        envs.close()
        seed = config.seed + 1000 * self.ranks.rank
        torch.manual_seed(seed)
        self.actors = Actors(config, self.actor, seed)
        self.actors.publish(self.actor)
        self.num_envs = config.num_actors * config.num_envs
        self.steps, self.dropped, self.lag = 0, 0, 0.0

    @property
    def actor(self) -> nn.Module:
        return self.learner.actor

    def iterate(self) -> None:
        """One update."""
        rollouts, lags, self.returns = [], [], []
        with self.stages("wait"):
            while len(rollouts) < self.config.rollouts:
                rollout, lag = next(self.actors)
                self.returns += common.finished_returns(rollout)
                if lag > self.config.max_lag:
                    self.dropped += 1
                    continue
                rollouts.append(rollout)
                lags.append(lag)
        self.lag = sum(lags) / len(lags)
        batch: Any = torch.cat(rollouts) if len(rollouts) > 1 else rollouts[0]
        self.learner.learn(batch, share=1 - self.steps / self.config.total_steps)
        with self.stages("publish"):
            self.actors.publish(self.actor)
        self.steps += batch.numel() * self.ranks.world

    def finished_returns(self) -> list[float]:
        return self.returns

    def numbers(self) -> dict[str, float]:
        """The lag of the last update, the rollouts dropped so far for theirs, and the losses."""
        return {"lag": self.lag, "dropped": self.dropped, **self.learner.step.averages()}

    def evaluate(self) -> float:
        return parts.evaluate(self.actor, self.config, self.device)

    def film(self, folder: Path) -> None:
        parts.film(self.actor, self.config, self.device, folder)

    def state_dict(self) -> dict[str, Any]:
        return self.learner.step.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.learner.step.load_state_dict(state)
        common.restore_rng(state, self.ranks, self.config.seed)
        self.actors.publish(self.actor)

    def close(self) -> None:
        self.actors.close()
        self.ranks.close()


if __name__ == "__main__":
    config = common.parse(Config, PRESETS, name="impala")
    common.train(IMPALA, config)
