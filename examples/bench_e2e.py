"""What the advantage step costs in a whole training loop, and what replacing it brings.

    python examples/bench_e2e.py --device cuda --minutes 4

Every row is one setting; its arms are the same trainer on the same seed with another estimator. They take
turns within one process, an iteration each, in alternating order, and the first iterations do not count.

- `torchrl`, `torchrl-vec`: TorchRL's GAE module as its users run it, value network included.
- `loop`: a CleanRL-style loop behind one value pass.
- `triton`: rl_triton behind the same pass; `skip`: the same trainer with the recursion left out.
- Of V-trace, `torchrl` is TorchRL's function with the stored action's log-probability. `torchrl-module` is
  its module, which weighs the actor's mode instead of the stored action: timed, but not the same algorithm.

The share of an arm is that of its value pass and recursion; its ceiling, 1 / (1 - share), is the speed-up if
both were free. A row is void where the other stages of two arms disagree by more than 2 %. With `--shadow`
every arm learns from the same reference numbers and stays bitwise equal to the others; its own are timed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import impala
import numpy as np
import parts
import ppo
import torch
from common import Ranks, Stages
from tensordict import TensorDict
from torch import nn
from torchrl.checkpoint import GlobalRNGState
from torchrl.objectives.value import GAE, VTrace

# Turns that warm up, compile and capture.
BURN_IN = 4
ADVANTAGE = ("value net", "advantage")


@dataclasses.dataclass
class Options:
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    minutes: float = 4.0
    """Time for all rows, set-up apart."""
    rows: str = ""
    """Only the rows whose title contains this."""
    shadow: bool = False
    """Let all arms learn from the reference's numbers."""
    compile: bool = False
    """Compile policy step, environment, value pass and loss in all arms."""
    tiny: bool = False
    """Sizes and rounds that only show that everything runs."""
    seed: int = 1
    """Seed of all arms."""
    out: str | None = None
    """JSON file for the results."""


class Arm:
    """One trainer of a row: `turn` runs an iteration and keeps the seconds of its stages."""

    def __init__(self, iterate: Callable[[], None], stages: Stages, model: nn.Module) -> None:
        self.iterate, self.stages, self.model = iterate, stages, model
        self.turns: list[dict[str, float]] = []
        self.rng = GlobalRNGState().state_dict()

    def turn(self) -> None:
        # Every arm draws on from its own last turn.
        GlobalRNGState().load_state_dict(self.rng)
        self.stages.restart()
        self.iterate()
        seconds = self.stages.end_iteration()
        self.rng = GlobalRNGState().state_dict()
        seconds["total"] -= seconds.pop("shadow", 0.0)
        self.turns.append(seconds)

    def milliseconds(self, counts: Callable[[str], bool]) -> np.ndarray:
        """Per turn, in the stages whose name `counts`."""
        turns = self.turns[BURN_IN:]
        return 1000 * np.array([sum(s for name, s in turn.items() if counts(name)) for turn in turns])

    @property
    def total(self) -> np.ndarray:
        return self.milliseconds(lambda name: name == "total")

    @property
    def advantage(self) -> np.ndarray:
        return self.milliseconds(lambda name: name in ADVANTAGE)

    @property
    def recursion(self) -> np.ndarray:
        return self.milliseconds(lambda name: name == "advantage")

    @property
    def rest(self) -> np.ndarray:
        return self.milliseconds(lambda name: name not in (*ADVANTAGE, "total"))


def compare(trainer: Any, arm: str, module: Any, reference: parts.Estimator | None) -> None:
    """Put the estimator of `arm` in its place, and behind it the reference, which is then learned from.

    `trainer` is a PPO trainer or an IMPALA learner, `module` TorchRL's where the arm is that.
    """
    if module is not None:
        # As its users run it: the module calls its networks itself.
        trainer.estimator, trainer.value_pass = module, lambda: None
    if arm == "skip":
        trainer.estimate = lambda: None
    if reference is None:
        return
    timed = trainer.estimate

    @torch.no_grad()
    def shadowed() -> None:
        timed()
        with trainer.stages("shadow"):
            batch = trainer.batch.copy()
            batch["next", "state_value"] = torch.empty_like(batch["next", "reward"])
            parts.value_pass(trainer.critic.module, batch, truncation_gap=1, every=True)
            parts.estimate(reference, batch)

    trainer.estimate = shadowed


def ppo_arm(arm: str, options: Options, **settings: Any) -> Arm:
    """PPO with the estimator `arm`."""
    estimator: Any = "triton" if arm == "skip" else arm
    config = ppo.Config(estimator=estimator, total_steps=10**12, seed=options.seed, compile=options.compile)
    trainer = ppo.PPO(dataclasses.replace(config, **settings))
    module = None
    if arm in ("torchrl", "torchrl-vec"):
        vectorized = arm == "torchrl-vec"
        module = GAE(
            gamma=config.gamma, lmbda=config.gae_lambda, value_network=trainer.critic, vectorized=vectorized
        )
    reference = ppo.make_estimator("torchrl", config.gamma, config.gae_lambda) if options.shadow else None
    compare(trainer, arm, module, reference)
    return Arm(trainer.iterate, trainer.stages, trainer.loss_module)


def vtrace_arm(arm: str, options: Options, rows: int, T: int, **settings: Any) -> Arm:
    """IMPALA's learner with the estimator `arm`, on one batch of made-up rollouts."""
    estimator = "torchrl" if arm.startswith("torchrl") else "triton"
    config = impala.Config(estimator=estimator, seed=options.seed, compile=options.compile, **settings)
    device = common.torch_device(config.device, config.threads)
    torch.manual_seed(config.seed)
    envs, stages = parts.Envs("rl_triton/CartPole-v1", 1, device), Stages(device)
    learner = impala.Learner(config, envs, Ranks(device), stages)

    module, reference = None, None
    if arm == "torchrl-module":
        module = VTrace(gamma=config.gamma, actor_network=learner.actor, value_network=learner.critic)
    if options.shadow:
        vtrace = impala.make_estimator("torchrl", config.gamma, config.rho_bar, config.c_bar)

        def scored(batch: Any) -> None:
            batch["log_pi"] = learner.score(batch["observation"], batch["action"])
            vtrace(batch)

        reference = scored
    compare(learner, arm, module, reference)

    generator = torch.Generator(device).manual_seed(config.seed)
    uniform = torch.rand(rows, T, 8, generator=generator, device=device)
    terminated, truncated = uniform[..., 4:5] < 0.01, uniform[..., 5:6] < 0.002
    rollouts = TensorDict(
        {
            "observation": uniform[..., :4],
            "action": (uniform[..., 6] < 0.5).long(),
            "action_log_prob": uniform[..., 7].log(),
            "next": {
                "observation": uniform[..., :4].roll(-1, dims=1),
                "reward": torch.ones_like(uniform[..., :1]),
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            },
        },
        [rows, T],
    )
    return Arm(lambda: learner.learn(rollouts, share=1.0), stages, learner.loss_module)


GAE_ARMS = ("torchrl", "torchrl-vec", "loop", "triton", "skip")
VTRACE_ARMS = ("torchrl", "torchrl-module", "triton", "skip")


@dataclasses.dataclass
class Row:
    """One setting: `make` builds the arm of a name."""

    title: str
    arms: tuple[str, ...]
    make: Callable[..., Arm]


def rows(device: torch.device, tiny: bool) -> list[Row]:
    """The settings that `device` can run."""

    def gae(title: str, **settings: Any) -> Row:
        settings = {"epochs": 4, "minibatches": 4, **settings}
        if tiny:
            settings |= {"num_envs": 4, "num_steps": 8, "epochs": 2, "minibatches": 2, "hidden": (8,)}
        return Row(title, GAE_ARMS, functools.partial(ppo_arm, **settings))

    def vtrace(T: int) -> Row:
        # Several updates in a turn: one takes half a millisecond.
        settings = {"device": str(device), "cudagraphs": gpu, "updates": 1 if tiny else 8}
        sizes = {"rows": 4, "T": min(T, 16)} if tiny else {"rows": 64, "T": T}
        title = f"V-trace learner, 64 x {T}{', graphed' if gpu else ''}"
        return Row(title, VTRACE_ARMS, functools.partial(vtrace_arm, **settings, **sizes))

    gpu = device.type == "cuda"
    batched = {"env_id": "rl_triton/CartPole-v1", "device": str(device)}
    textbook = gae("CartPole-v1 on the CPU, 8 x 128", env_id="CartPole-v1", num_envs=8, num_steps=128)
    if not gpu:
        sizes = {**batched, "num_envs": 1024, "num_steps": 32}
        once = gae("batched CartPole on the CPU, 1024 x 32", **sizes)
        epochs = gae("batched CartPole on the CPU, 1024 x 32, a pass per epoch", **sizes, recompute="epoch")
        return [textbook, once, epochs, vtrace(32), vtrace(128)]
    graphed = {**batched, "num_envs": 4096, "cudagraphs": True}
    found = []
    for T, recompute in itertools.product((32, 128), ("rollout", "epoch")):
        title = f"CartPole on the GPU, graphed, 4096 x {T}, a pass per {recompute}"
        found.append(gae(title, **graphed, num_steps=T, recompute=recompute))
    found += [vtrace(T) for T in (32, 128, 512)]
    eager = {**graphed, "cudagraphs": False, "num_steps": 32}
    found.append(gae("CartPole on the GPU, eager, 4096 x 32", **eager))
    wide = {**graphed, "num_steps": 32, "hidden": (1024, 1024)}
    found.append(gae("CartPole on the GPU, graphed, 4096 x 32, nets 1024-1024", **wide))
    return [*found, textbook]


def measure(row: Row, options: Options, seconds: float) -> dict[str, Any]:
    """Let the arms of a row take turns for so many seconds."""
    arms = {name: row.make(name, options) for name in row.arms}
    least, most = (2, 2) if options.tiny else (8, 1000)
    deadline = math.inf
    for number in itertools.count():
        if number == BURN_IN:
            deadline = time.perf_counter() + seconds
        counted = number - BURN_IN
        if counted >= most or (counted >= least and time.perf_counter() > deadline):
            break
        for arm in arms.values() if number % 2 else reversed(arms.values()):
            arm.turn()

    # Turn by turn, here and below, so that a drift of the machine cancels.
    rest = [float(np.median(arm.rest / arms["skip"].rest)) for arm in arms.values()]
    disagreement = max(rest) / min(rest) - 1
    result: dict[str, Any] = {
        "title": row.title,
        "turns": counted,
        "disagreement": disagreement,
        "void": disagreement > 0.02,
        "arms": {},
    }
    for name, arm in arms.items():
        share = float(np.median(arm.advantage / arm.total))
        result["arms"][name] = {
            "ms": quartiles(arm.total),
            "rest_ms": float(np.median(arm.rest)),
            "share": share,
            "recursion_share": float(np.median(arm.recursion / arm.total)),
            "ceiling": 1 / (1 - share),
            "to_win": quartiles(arm.total / arms["skip"].total),
            "won": quartiles(arm.total / arms["triton"].total),
        }
    if options.shadow:
        first, *others = ([*arm.model.parameters()] for arm in arms.values())
        same = all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
        result["bitwise_equal"] = same
    return result


def quartiles(values: np.ndarray) -> list[float]:
    return np.percentile(values, [25, 50, 75]).tolist()


def report(result: dict[str, Any]) -> str:
    """A row of results as a table."""

    def spread(values: list[float], digits: int) -> str:
        low, middle, high = (f"{value:.{digits}f}" for value in values)
        return f"{middle} [{low}, {high}]"

    notes = [
        f"other stages of two arms differ by up to {100 * result['disagreement']:.1f} %",
        f"{result['turns']} turns",
    ]
    if "bitwise_equal" in result:
        notes.append(f"bitwise equal: {'yes' if result['bitwise_equal'] else 'no'}")
    columns = (
        "arm",
        "ms per iteration",
        "other stages, ms",
        "advantage step, %",
        "recursion, %",
        "ceiling",
        "gain of skip",
        "gain of triton",
    )
    lines = [
        f"\n### {result['title']}",
        f"{'Void: ' if result['void'] else ''}{'; '.join(notes)}.\n",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for name, arm in result["arms"].items():
        cells = (
            name,
            spread(arm["ms"], 2),
            f"{arm['rest_ms']:.2f}",
            f"{100 * arm['share']:.1f}",
            f"{100 * arm['recursion_share']:.1f}",
            f"{arm['ceiling']:.2f}",
            spread(arm["to_win"], 3),
            spread(arm["won"], 3),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    import tyro

    options = tyro.cli(Options, description=__doc__)
    device = common.torch_device(options.device, threads=1)
    chosen = [row for row in rows(device, options.tiny) if options.rows in row.title]
    if not chosen:
        titles = "; ".join(row.title for row in rows(device, options.tiny))
        common.fail(f"--rows {options.rows} is in no title: {titles}")
    print(" ".join(f"{name} {version}" for name, version in common.versions().items()))
    results = []
    for row in chosen:
        results.append(measure(row, options, 60 * options.minutes / len(chosen)))
        print(report(results[-1]), flush=True)
    if options.out:
        document = {"versions": common.versions(), "options": dataclasses.asdict(options), "rows": results}
        Path(options.out).write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
