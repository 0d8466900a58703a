"""What the trainers share: command line, stage times, checkpoints, logs, pictures, and the run itself."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import io
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import nn
from torchrl.checkpoint import GlobalRNGState

import rl_triton


def fail(message: object) -> NoReturn:
    """End the program with one line on stderr and exit code 1."""
    sys.exit(f"error: {message}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make one line of what goes wrong while `path` is written."""
    try:
        yield
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


# Command line


@dataclasses.dataclass
class RunConfig:
    """The flags of every trainer."""

    env_id: str = "CartPole-v1"
    """A Gymnasium id, or rl_triton/CartPole-v1 or rl_triton/Pendulum-v1; it sets the other defaults."""
    total_steps: int = 1_000_000
    """Environment steps of the whole run, over all environments and processes, in whole iterations."""
    seed: int = 1
    """Seed of environments, weights, actions and minibatches."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:N."""
    threads: int = 1
    """PyTorch's threads on the CPU, where small networks are fastest with one; 0 leaves them to PyTorch."""
    estimator: str = "triton"
    logdir: str | None = None
    """Directory of the run; by default runs/<environment>-<trainer>-<estimator>-<seed>-<time>."""
    stop_at: float | None = None
    """End when the mean return of the last 20 episodes (at least one per environment) reaches this."""
    eval_episodes: int = 10
    """Episodes of each evaluation."""
    eval_every: int = 0
    """Iterations between evaluations; 0 evaluates at the end alone."""
    checkpoint_every: int = 50
    """Iterations between checkpoints; 0 saves at the end alone."""
    resume: str | None = None
    """Checkpoint, or directory of the run, to go on from; its settings become the defaults."""
    video: bool = False
    """Film an episode at the end."""
    wandb: bool = False
    """Log to Weights & Biases too."""


C = TypeVar("C", bound=RunConfig)
MAY_BE_ZERO = ("seed", "threads", "eval_every", "checkpoint_every")


def parse(
    config: type[C], presets: Mapping[str, Mapping[str, Any]], name: str, args: Sequence[str] | None = None
) -> C:
    """The flags, over the settings of the resumed run or else the environment's preset, over the defaults."""
    import tyro

    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--env-id", "--env_id")
    peek.add_argument("--resume")
    chosen, _ = peek.parse_known_args(args)
    if chosen.resume:
        settings = load_checkpoint(chosen.resume)["config"]
        if chosen.env_id not in (None, settings["env_id"]):
            fail(f"--resume {chosen.resume} is a checkpoint of {settings['env_id']}, not of {chosen.env_id}")
        settings = settings | {"logdir": str(checkpoint_path(chosen.resume).parent)}
    else:
        env_id = chosen.env_id or "CartPole-v1"
        settings = {"env_id": env_id, **presets.get(env_id, {})}
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(settings.keys() - known):
        fail(f"--resume {chosen.resume} is for the trainer that wrote it: it has the settings {unknown}")
    description = sys.modules["__main__"].__doc__
    parsed = tyro.cli(config, default=config(**settings), args=args, description=description)
    # All before anything is started that would have to be ended again.
    for key, value in dataclasses.asdict(parsed).items():
        least = 0 if key in MAY_BE_ZERO else 1
        if type(value) is int and value < least:
            fail(f"--{key.replace('_', '-')} must be at least {least}, got {value}")
        if key in ("gamma", "gae_lambda") and not 0 <= value <= 1:
            fail(f"--{key.replace('_', '-')} must be from 0 to 1, got {value}")
    for flag, package in (("wandb", "wandb"), ("video", "moviepy")):
        if getattr(parsed, flag) and find_spec(package) is None:
            fail(f"--{flag} needs the package {package}: pip install {package}")
    if parsed.logdir is not None:
        path = Path(parsed.logdir)
        if not parsed.resume and (path / "checkpoint.pt").exists():
            fail(f"--logdir {path} holds a run: go on with --resume {path}, or choose another directory")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
    else:
        start = time.strftime("%Y%m%d-%H%M%S")
        parts = (parsed.env_id.replace("/", "-"), name, parsed.estimator, parsed.seed, start)
        parsed.logdir = str(Path("runs", "-".join(map(str, parts))))
    return parsed


def torch_device(name: str, threads: int) -> torch.device:
    """The device to train on: `auto` prefers a GPU; under `torchrun` each process takes its own GPU."""
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        fail(f"--device {name} asks for a GPU, but PyTorch {torch.__version__} finds none; use --device cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        fail(f"--device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if device.index >= torch.cuda.device_count():
            fail(
                f"--device {device} asks for another GPU than the {torch.cuda.device_count()} that there are"
            )
        torch.cuda.set_device(device)
    return device


class Ranks:
    """The processes that `torchrun` started, or this one alone."""

    def __init__(self, device: torch.device) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.device = device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, module: nn.Module) -> nn.Module:
        """`module`, averaging its gradients over the processes."""
        return nn.parallel.DistributedDataParallel(module) if self.world > 1 else module

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in some process: all processes stop at the same iteration."""
        if self.world == 1:
            return flag
        votes = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes)

    def close(self) -> None:
        if self.world > 1:
            # A process that leaves early aborts those that still wait for it.
            dist.barrier()
            dist.destroy_process_group()


class Interrupt:
    """Makes the first Ctrl-C a flag, so that a run ends with its iteration; the second one is immediate."""

    def __init__(self) -> None:
        self.set = False
        self.before = signal.signal(signal.SIGINT, self._handle)

    def restore(self) -> None:
        """Leave Ctrl-C to whom it was."""
        signal.signal(signal.SIGINT, self.before)

    def _handle(self, *_: object) -> None:
        if self.set:
            kill_children()
            os._exit(130)
        self.set = True
        # Unbuffered, since the handler may interrupt a print.
        os.write(2, b"\nCtrl-C: the run ends with this iteration; a second one ends it at once.\n")


def kill_children() -> None:
    """End the processes that the interpreter would wait for."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


# Stage times


class Stages:
    """Where the time of an iteration goes.

    On a GPU a stage is the span between two CUDA events, read after one synchronisation per iteration;
    elsewhere it is wall-clock time. `total` is the wall clock, whatever the stages add up to.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forget what was measured."""
        self.spans: list[tuple[str, Any, Any]] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.iterations, self.total = 0, 0.0
        self._synchronize()
        self.mark = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.cuda and torch.cuda.is_current_stream_capturing():
            yield
            return
        start = self._now()
        yield
        self.spans.append((name, start, self._now()))

    def end_iteration(self) -> dict[str, float]:
        """The seconds of each stage since the last call, and under `total` the wall clock's."""
        self._synchronize()
        now = time.perf_counter()
        latest: dict[str, float] = defaultdict(float)
        for name, start, end in self.spans:
            latest[name] += start.elapsed_time(end) / 1000 if self.cuda else end - start
        self.spans.clear()
        for name, seconds in latest.items():
            self.seconds[name] += seconds
        latest["total"] = now - self.mark
        self.total += latest["total"]
        self.iterations += 1
        self.mark = now
        return dict(latest)

    def summary(self) -> dict[str, dict[str, float]]:
        """Milliseconds per iteration and percentage of the wall clock, per stage; last `sum` and `total`."""
        rows = dict(self.seconds) | {"sum": sum(self.seconds.values()), "total": self.total}
        scale = 1000 / max(self.iterations, 1)
        return {
            name: {"ms": seconds * scale, "percent": 100 * seconds / max(self.total, 1e-12)}
            for name, seconds in rows.items()
        }

    def shares(self) -> str:
        """The stages in one line, as percentages."""
        rows = self.summary()
        return " ".join(
            f"{name} {row['percent']:.0f}%" for name, row in rows.items() if name not in ("sum", "total")
        )

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def stage_table(columns: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Stage summaries side by side, one column per run."""
    names = list(dict.fromkeys(name for stages in columns.values() for name in stages))
    names = [name for name in names if name not in ("sum", "total")] + ["sum", "total"]
    lines = [f"{'ms per iteration':<18}" + "".join(f"{title:>22}" for title in columns)]
    for name in names:
        cells = (
            f"{stages[name]['ms']:13.3f} {stages[name]['percent']:6.1f} %" if name in stages else "-"
            for stages in columns.values()
        )
        lines.append(f"{name:<18}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


class Graphed:
    """`fn` as a stage and, if `enabled`, as one CUDA graph from its third call on.

    `fn` takes no arguments and works in place on fixed buffers. Each call runs it exactly once: the first two
    eagerly on a side stream, which is the warm-up that a capture needs.
    """

    def __init__(
        self,
        fn: Callable[[], None],
        name: str,
        stages: Stages,
        enabled: bool,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.fn, self.name, self.stages, self.enabled = fn, name, stages, enabled
        self.generators = generators
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warmups = 2

    def __call__(self) -> None:
        with self.stages(self.name):
            if not self.enabled:
                self.fn()
            elif self.warmups:
                self.warmups -= 1
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), warnings.catch_warnings():
                    # An optimiser made for graphs warns when it runs outside of one.
                    warnings.filterwarnings("ignore", message=".*capturable=True")
                    self.fn()
                torch.cuda.current_stream().wait_stream(stream)
            else:
                if self.graph is None:
                    self.graph = self._capture()
                self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            self.fn()
        return graph


# Checkpoints


def checkpoint_path(path: str | Path) -> Path:
    """The checkpoint itself, given it or the directory of its run."""
    path = Path(path)
    return path / "checkpoint.pt" if path.is_dir() else path


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the checkpoint at `path` by `state`, or leave it as it was."""
    buffer = io.BytesIO()
    torch.save({**state, "rng": GlobalRNGState().state_dict()}, buffer)
    replace_file(path, buffer.getbuffer())


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole, or leave it as it was."""
    fresh = path.with_suffix(".tmp")
    try:
        with writing(path):
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """What `save_checkpoint` stored; nothing in the file can run code."""
    path = checkpoint_path(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        fail(f"--resume {path}: {error.strerror}")
    except Exception:
        state = None
    if not isinstance(state, dict) or not {"config", "rng", "steps"} <= state.keys():
        fail(f"--resume {path} is not a checkpoint of these trainers")
    return state


def restore_rng(state: Mapping[str, Any], ranks: Ranks, seed: int) -> None:
    """Draw on from where the first process was; the others start from fresh seeds."""
    if ranks.main:
        rng = dict(state["rng"])
        # A run may go on with fewer GPUs than it began with, or with none.
        devices = rng.pop("torch_cuda", [])[: torch.cuda.device_count()]
        GlobalRNGState().load_state_dict({**rng, "torch_cuda": devices} if devices else rng)
    else:
        torch.manual_seed(seed + 1000 * ranks.rank + state["steps"])


# Logs and pictures


class Log:
    """CSV and TensorBoard rows, a progress bar and, on request, Weights & Biases; silent unless `active`."""

    def __init__(self, config: Any, active: bool = True) -> None:
        self.active, self.dir, self.settings = active, Path(config.logdir), dataclasses.asdict(config)
        if not active:
            return
        with writing(self.dir):
            self.dir.mkdir(parents=True, exist_ok=True)
            (self.dir / "config.json").write_text(json.dumps(self.settings, indent=2))
        if config.wandb:
            wandb: Any = importlib.import_module("wandb")
            wandb.init(
                project="rl_triton",
                name=self.dir.name,
                dir=str(self.dir),
                config=self.settings,
                sync_tensorboard=True,
            )

    def start(self, steps: int) -> None:
        """Open the files, without the rows that a resumed run is about to write again."""
        if not self.active:
            return
        from torch.utils.tensorboard.writer import SummaryWriter
        from tqdm import tqdm

        settings = (f"{name.replace('_', '-')}={value}" for name, value in self.settings.items())
        print(textwrap.fill(" ".join(settings), 110))
        path = self.dir / "progress.csv"
        self.rows = [row for row in read_progress(path) if row["steps"] <= steps] if steps else []
        self.file = path.open("w", newline="")
        self.writer: csv.DictWriter[str] | None = None
        for row in self.rows:
            self._write(row)
        self.board = SummaryWriter(str(self.dir), purge_step=steps)
        self.bar = tqdm(
            total=self.settings["total_steps"],
            initial=steps,
            unit="step",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10,
            bar_format="{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} {desc}",
        )

    def row(self, row: dict[str, float], status: str) -> None:
        """Add a row and move the bar to its `steps`."""
        if not self.active:
            return
        self.rows.append(row)
        with writing(self.dir):
            self._write(row)
            self.file.flush()
            for name, value in row.items():
                if math.isfinite(value):
                    self.board.add_scalar(name, value, int(row["steps"]))
        self.bar.set_description_str(status, refresh=False)
        self.bar.update(min(row["steps"], self.bar.total) - self.bar.n)

    def _write(self, row: dict[str, float]) -> None:
        if self.writer is None:
            self.writer = csv.DictWriter(self.file, row, restval=0.0, extrasaction="ignore")
            self.writer.writeheader()
        self.writer.writerow(row)

    def close(self, summary: dict[str, Any]) -> None:
        """Write the pictures and the summary, and print the stage table and what was reached."""
        if not self.active:
            return
        self.bar.close()
        with writing(self.dir):
            self.board.close()
            self.file.close()
            pictures = [
                plot_returns([self.rows], axis, self.dir / f"return_vs_{axis}.png", summary["env_id"])
                for axis in ("steps", "seconds")
            ]
        # Last: `is_summarised` takes it for a sign that the rest is there.
        replace_file(self.dir / "summary.json", json.dumps(summary, indent=2).encode())
        stages = summary["stages"]
        if stages["total"]["ms"]:
            print(stage_table({summary["estimator"]: stages}))
            print(f"The stages add up to {stages['sum']['percent']:.1f} % of the wall clock.")
        mean, stop_at = summary["mean_return"], self.settings["stop_at"]
        outcome = [
            f"{summary['steps']} steps in {summary['seconds']:.0f} s",
            "no episode ended" if mean is None else f"last mean return {mean:.1f}",
            f"evaluated at {summary['eval_return']:.1f}",
        ]
        if stop_at is not None:
            outcome.append(f"--stop-at {stop_at:g} {'' if summary['reached_stop_at'] else 'not '}reached")
        print(", ".join(outcome))
        print(f"log: {self.dir}   pictures: {' '.join(map(str, pictures))}")


def is_summarised(folder: Path, steps: int) -> bool:
    """Whether the run in `folder` has left all its files after `steps` steps."""
    path = folder / "summary.json"
    return path.exists() and json.loads(path.read_text())["steps"] == steps


def read_progress(path: Path) -> list[dict[str, float]]:
    """The rows of a `progress.csv`."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        # A killed run may have left half a row.
        return [
            {name: float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
            if all(row.values())
        ]


def plot_returns(
    runs: Sequence[Sequence[Mapping[str, float]]],
    axis: str,
    path: Path,
    title: str,
    target: float | None = None,
    style: Any = (),
) -> Path:
    """A picture of the mean return against `axis`; several runs are thin lines, with their median in bold."""
    import matplotlib.style
    from matplotlib.figure import Figure

    lines = [([row[axis] for row in rows], [row["mean_return"] for row in rows]) for rows in runs]
    width, alpha = (0.8, 0.5) if len(runs) > 1 else (1.5, 1.0)
    with matplotlib.style.context(style):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for x, y in lines:
            axes.plot(x, y, "C0", linewidth=width, alpha=alpha)
        if len(runs) > 1:
            # As far as all of them go.
            shared = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), 500)
            axes.plot(shared, np.median([np.interp(shared, x, y) for x, y in lines], 0), "C0", linewidth=2.5)
        if target is not None:
            axes.axhline(target, color="C1", linewidth=1, linestyle="--")
        axes.set(title=title, xlabel=axis, ylabel="mean return")
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
    return path


def finished_returns(batch: TensorDictBase) -> list[float]:
    """Returns of the episodes that ended in a batch `[N, T]`, in the order of their ends."""
    returns, done = (batch["next", key].transpose(0, 1) for key in ("episode_reward", "done"))
    return returns[done].tolist()


class Returns:
    """Mean returns of the episodes that ended last.

    A window holds at least one episode per env: of envs that started together, the best would end last.
    """

    def __init__(self, num_envs: int) -> None:
        self.recent: deque[float] = deque(maxlen=max(100, num_envs))
        self.short = max(20, num_envs)
        self.best = -math.inf

    def add(self, returns: Sequence[float]) -> None:
        self.recent.extend(returns)
        if len(self.recent) >= self.short:
            self.best = max(self.best, self.mean())

    def mean(self, short: bool = True) -> float:
        """Over the last 20 episodes, or the last 100; NaN before the first one ended."""
        window = list(self.recent)[-self.short :] if short else self.recent
        return float(np.mean(window)) if window else math.nan

    def reached(self, threshold: float | None) -> bool:
        return threshold is not None and len(self.recent) >= self.short and self.mean() >= threshold

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent.extend(state["recent"])
        self.best = state["best"]


def versions() -> dict[str, str]:
    """Versions of what a result depends on, the GPU, and the commit of the working tree."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "torchrl", "tensordict", "gymnasium"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["rl_triton"] = rl_triton.__version__
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    try:
        command = ["git", "rev-parse", "HEAD"]
        found["commit"] = subprocess.check_output(
            command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return found


# The run


class Trainer(Protocol):
    """What `train` drives."""

    ranks: Ranks
    stages: Stages
    device: torch.device
    num_envs: int
    saves_envs: bool

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        ...

    def iterate(self) -> None:
        """Collect and learn once."""
        ...

    def finished_returns(self) -> list[float]:
        """Returns of the episodes that ended in the last iteration, in the order of their ends."""
        ...

    def numbers(self) -> dict[str, float]:
        """What else to log of the last iteration; always the same names."""
        ...

    def evaluate(self) -> float:
        """Mean return of the policy without its exploration."""
        ...

    def film(self, folder: Path) -> None:
        """Film an episode of it."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


# Iterations that warm up, compile and capture; neither speed nor stage times count them.
BURN_IN = 3


def train(make: Callable[[C], Trainer], config: C) -> None:
    """Make the trainer and run it from beginning to end."""
    interrupt = Interrupt()
    try:
        run(make(config), config, interrupt)
    except BaseException:
        kill_children()
        raise
    finally:
        interrupt.restore()


def run(trainer: Trainer, config: RunConfig, interrupt: Interrupt) -> None:
    """A whole run: iterations, log, evaluations, checkpoints, and at the end the pictures and the summary."""
    ranks, stages = trainer.ranks, trainer.stages
    returns, seconds_before = Returns(trainer.num_envs), 0.0
    if config.resume:
        state = load_checkpoint(config.resume)
        try:
            trainer.load_state_dict(state)
        except (KeyError, RuntimeError, ValueError) as error:
            problem = " ".join(str(error).split())
            fail(f"--resume {config.resume} does not fit the settings: {problem:.200}")
        returns.load_state_dict(state["returns"])
        met = {}
        if returns.reached(config.stop_at):
            met[f"--stop-at {config.stop_at:g}"] = f"its mean return is {returns.mean():.1f}"
        if trainer.steps >= config.total_steps:
            met[f"--total-steps {config.total_steps}"] = f"it took {trainer.steps} steps"
        folder = checkpoint_path(config.resume).parent
        if ranks.any(bool(met) and is_summarised(folder, state["steps"])):
            if ranks.main:
                print(f"{folder} is complete: {' and '.join(met.values())}.")
                print(f"To go on, give more than {' and '.join(met)}.")
                if config.video:
                    trainer.film(folder / "video")
            trainer.close()
            return
        if ranks.main and not trainer.saves_envs:
            print("These environments cannot be saved: their episodes start anew.")
        seconds_before = state["seconds"]
    log = Log(config, ranks.main)
    log.start(trainer.steps)

    def save() -> None:
        if ranks.main:
            run = {
                "config": dataclasses.asdict(config),
                "steps": trainer.steps,
                "seconds": seconds(),
                "returns": returns.state_dict(),
            }
            save_checkpoint(log.dir / "checkpoint.pt", trainer.state_dict() | run)

    def seconds() -> float:
        return seconds_before + time.perf_counter() - started

    started = measured_from = time.perf_counter()
    measured_steps, iteration, sps = trainer.steps, 0, math.nan
    stages.restart()

    def ended() -> bool:
        return trainer.steps >= config.total_steps or interrupt.set or returns.reached(config.stop_at)

    while not ranks.any(ended()):
        if iteration == BURN_IN:
            stages.restart()
            measured_from, measured_steps = time.perf_counter(), trainer.steps
        trainer.iterate()
        latest = stages.end_iteration()
        returns.add(trainer.finished_returns())
        iteration += 1
        if not ranks.main:
            continue
        sps = (trainer.steps - measured_steps) / (time.perf_counter() - measured_from)
        evaluated = math.nan
        if config.eval_every and iteration % config.eval_every == 0:
            with stages("evaluate"):
                evaluated = trainer.evaluate()
        with stages("log"):
            numbers = trainer.numbers()
            row = {
                "steps": trainer.steps,
                "seconds": seconds(),
                "sps": sps,
                "mean_return": returns.mean(),
                "return_100": returns.mean(short=False),
                "eval_return": evaluated,
                **numbers,
                **{f"ms/{name}": 1000 * value for name, value in latest.items()},
            }
            lag = f"lag {numbers['lag']:.1f}, " if "lag" in numbers else ""
            log.row(row, f"mean return {row['mean_return']:.1f}, {sps:.0f} steps/s, {lag}{stages.shares()}")
            if config.checkpoint_every and iteration % config.checkpoint_every == 0:
                save()

    save()
    if ranks.main:
        finite = {"best_mean_return": returns.best, "mean_return": returns.mean(), "sps": sps}
        log.close(
            {
                "env_id": config.env_id,
                "estimator": config.estimator,
                "seed": config.seed,
                "device": str(trainer.device),
                "steps": trainer.steps,
                "seconds": seconds(),
                **{name: value if math.isfinite(value) else None for name, value in finite.items()},
                "eval_return": trainer.evaluate(),
                "reached_stop_at": returns.reached(config.stop_at),
                "interrupted": interrupt.set,
                "stages": stages.summary(),
                "versions": versions(),
                "config": dataclasses.asdict(config),
            }
        )
        if config.video:
            trainer.film(log.dir / "video")
    trainer.close()
