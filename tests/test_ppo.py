"""The PPO trainer: its numbers, its command line, and what survives an interruption."""

import copy
import csv
import errno
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

for name in ("torchrl", "tyro", "gymnasium"):
    pytest.importorskip(name)

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
common = importlib.import_module("common")
parts = importlib.import_module("parts")
ppo = importlib.import_module("ppo")

TINY = {"num_envs": 4, "num_steps": 16, "epochs": 2, "minibatches": 2, "hidden": (16,)}
SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
ESTIMATORS = ("triton", "torchrl", "torchrl-vec", "loop")


def make(**settings):
    return ppo.PPO(ppo.Config(**{"env_id": "rl_triton/CartPole-v1", "total_steps": 640, **TINY, **settings}))


def command(logdir, *flags):
    """A tiny run as its user starts it: on the CPU the library takes its PyTorch path."""
    settings = [f"--{key.replace('_', '-')}={value}" for key, value in TINY.items() if key != "hidden"]
    return [sys.executable, str(EXAMPLES / "ppo.py"), *settings, f"--logdir={logdir}", *flags]


def environment():
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "OMP_NUM_THREADS": "1"
    }


def progress(logdir):
    with (logdir / "progress.csv").open() as file:
        return list(csv.DictReader(file))


def wait_for(path, process):
    deadline = time.monotonic() + 90
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "rl_triton/Pendulum-v1"])
def test_estimators_agree_on_the_first_rollout(env_id):
    advantages = {}
    for estimator in ESTIMATORS:
        # 208 steps of Pendulum hold one truncation.
        trainer = make(env_id=env_id, estimator=estimator, num_steps=208, reward_scale=0.1)
        trainer.rollout()
        trainer.value_pass()
        trainer.estimate()
        advantages[estimator] = trainer.batch["advantage"]
    for estimator in ESTIMATORS[1:]:
        torch.testing.assert_close(advantages["triton"], advantages[estimator], rtol=1e-5, atol=1e-5)


def test_value_pass_finds_every_row_that_is_bootstrapped():
    trainer = make(env_id="rl_triton/Pendulum-v1", num_steps=416)
    trainer.rollout()
    trainer.value_pass()
    after = trainer.batch["next"]
    bootstrapped = after["truncated"].clone()
    assert bootstrapped.sum() == 2 * trainer.num_envs
    bootstrapped[:, -1] = True
    expected = trainer.critic.module(after["observation"])
    torch.testing.assert_close(after["bootstrap_value"][bootstrapped], expected[bootstrapped])


@pytest.mark.parametrize("env_id", ["CartPole-v1", "rl_triton/CartPole-v1"])
def test_rollout_keeps_the_observation_reached_apart_from_the_next_one(env_id):
    trainer = make(env_id=env_id, num_steps=64)
    trainer.rollout()
    after = trainer.batch["next"]
    done = after["done"][:, :-1, 0]
    same = (after["observation"][:, :-1] == trainer.batch["observation"][:, 1:]).all(-1)
    assert done.any() and torch.equal(same, ~done)
    # CartPole ends where the pole or the cart is out of bounds.
    final = after["observation"][:, :-1][done]
    assert ((final[:, 0].abs() > 2.4) | (final[:, 2].abs() > 0.2094)).all()


class NoReads(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: data that the host waits for, shapes that depend on data."""

    refused = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "multinomial", "normal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        assert name not in self.refused and not masked, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("env_id", ["rl_triton/CartPole-v1", "rl_triton/Pendulum-v1"])
def test_what_graphs_hold_reads_nothing_on_the_host(env_id):
    trainer = make(env_id=env_id)
    trainer.iterate()
    with NoReads():
        trainer.rollout()
        trainer.value_pass()
        trainer.update()


@pytest.mark.parametrize(("recompute", "passes"), [("rollout", 1), ("epoch", 2), ("minibatch", 4)])
def test_recompute_sets_how_often_advantages_are_estimated(recompute, passes):
    calls = []
    estimate = ppo.make_estimator("triton", 0.99, 0.95)
    trainer = ppo.PPO(
        ppo.Config(env_id="rl_triton/CartPole-v1", recompute=recompute, **TINY),
        estimator=lambda batch: calls.append(batch.shape) or estimate(batch),
    )
    trainer.iterate()
    assert calls == [torch.Size([4, 16])] * passes


@pytest.mark.parametrize(
    "settings", [{}, {"env_id": "rl_triton/Pendulum-v1", "normalize_observations": True}]
)
def test_resumed_run_equals_an_uninterrupted_one_bit_by_bit(tmp_path, settings):
    straight = make(**settings)
    for _ in range(6):
        straight.iterate()

    first = make(**settings)
    for _ in range(3):
        first.iterate()
    state = {"config": {}, "steps": first.steps}
    common.save_checkpoint(tmp_path / "checkpoint.pt", first.state_dict() | state)
    torch.manual_seed(99)
    second = make(**settings)
    second.load_state_dict(common.load_checkpoint(tmp_path))
    for _ in range(3):
        second.iterate()

    assert second.steps == straight.steps
    for name, value in straight.loss_module.state_dict().items():
        assert torch.equal(value, second.loss_module.state_dict()[name]), name
    assert torch.equal(straight.batch["observation"], second.batch["observation"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_checkpoint_of_a_run_on_a_gpu_is_resumed_without_one(tmp_path):
    first = make()
    first.iterate()
    state = {"config": {}, "steps": first.steps}
    common.save_checkpoint(tmp_path / "checkpoint.pt", first.state_dict() | state)
    found = common.load_checkpoint(tmp_path)
    found["rng"]["torch_cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    second = make()
    second.load_state_dict(found)
    second.iterate()
    assert second.steps == 2 * first.steps


def test_checkpoint_survives_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    common.save_checkpoint(path, {"config": {}, "steps": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit, match=r"cannot write .*checkpoint\.pt: No space left on device"):
        common.save_checkpoint(path, {"config": {}, "steps": 2})
    assert common.load_checkpoint(path)["steps"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id Nope-v1", "--env-id Nope-v1: .*doesn't exist"),
        ("--env-id FrozenLake-v1", "observations must be a Box"),
        ("--logdir /dev/null/run", "cannot write /dev/null/run: Not a directory"),
        ("--device cuda:x", "--device"),
        ("--minibatches 7", "--minibatches 7 must divide"),
        ("--num-envs 0", "--num-envs must be at least 1, got 0"),
        ("--gamma 2", "--gamma must be from 0 to 1, got 2"),
        ("--checkpoint-every -1", "--checkpoint-every must be at least 0, got -1"),
        ("--cudagraphs", "--cudagraphs needs"),
        ("--resume /nowhere", "--resume /nowhere: No such file"),
        (f"--resume {__file__}", "is not a checkpoint"),
    ],
)
def test_bad_input_is_one_line(flags, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags.split()])
    with pytest.raises(SystemExit, match=message) as error:
        runpy.run_path(str(EXAMPLES / "ppo.py"), run_name="__main__")
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "package"), [("--wandb", "wandb"), ("--video", "moviepy")], ids=["wandb", "video"]
)
def test_missing_package_is_named_before_anything_is_written(flag, package, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=f"{flag} needs the package {package}"):
        common.parse(ppo.Config, {}, "ppo", [flag, f"--logdir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_directory_of_another_run_is_left_alone(tmp_path):
    common.save_checkpoint(tmp_path / "checkpoint.pt", {"config": {}, "steps": 1})
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit, match=f"--logdir {tmp_path} holds a run: go on with --resume {tmp_path}"):
        common.parse(ppo.Config, {}, "ppo", [f"--logdir={tmp_path}"])
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("flags", ["--nonsense 3", "--estimator guess", "--num-envs many"])
def test_unknown_flags_and_values_are_refused(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags.split()])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(EXAMPLES / "ppo.py"), run_name="__main__")
    assert error.value.code == 2
    assert flags.split()[-1] in capsys.readouterr().err


def test_presets_yield_to_flags():
    config = common.parse(ppo.Config, ppo.PRESETS, "ppo", ["--env-id", "Pendulum-v1", "--gamma", "0.8"])
    assert (config.env_id, config.gamma, config.reward_scale) == ("Pendulum-v1", 0.8, 0.1)


def test_run_leaves_log_pictures_and_summary_and_resumes_after_a_kill(tmp_path):
    endless = ["--total-steps=100000000", "--checkpoint-every=2", "--eval-every=2", "--eval-episodes=2"]
    process = subprocess.Popen(command(tmp_path, *endless), env=environment(), **SILENT)
    wait_for(tmp_path / "checkpoint.pt", process)
    process.kill()
    process.wait()
    steps = common.load_checkpoint(tmp_path)["steps"]

    total = steps + 5 * 64
    resumed = [sys.executable, str(EXAMPLES / "ppo.py"), f"--resume={tmp_path}", f"--total-steps={total}"]
    output = subprocess.run(resumed, env=environment(), check=True, capture_output=True, text=True).stdout
    assert "their episodes start anew" in output and "num-envs=4" in output
    assert "of the wall clock" in output

    taken = [float(row["steps"]) for row in progress(tmp_path)]
    assert taken == [64.0 * i for i in range(1, total // 64 + 1)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = "env_id estimator seed device steps seconds sps best_mean_return eval_return reached_stop_at"
    assert {*expected.split(), "stages", "versions"} <= summary.keys()
    assert summary["steps"] == total and summary["env_id"] == "CartPole-v1" and not summary["reached_stop_at"]
    stages = summary["stages"]
    parts = sum(row["ms"] for name, row in stages.items() if name not in ("sum", "total"))
    assert parts == pytest.approx(stages["sum"]["ms"]) and 0 < parts <= stages["total"]["ms"]
    assert {"collect", "value net", "advantage", "forward", "backward", "optimiser"} <= stages.keys()
    for pattern in ("return_vs_steps.png", "return_vs_seconds.png", "events.out.tfevents*"):
        assert list(tmp_path.glob(pattern))


def test_end_says_what_was_reached_and_a_complete_run_is_left_as_it_is(tmp_path, capsys):
    flags = {"logdir": str(tmp_path), "estimator": "loop", "eval_episodes": 2, "total_steps": 100_000}

    def run(**changes):
        trainer = make(**flags | changes)
        common.train(lambda _: trainer, trainer.config)
        return capsys.readouterr().out.splitlines()

    *_, outcome, log = run(stop_at=5.0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    steps, mean = summary["steps"], f"{summary['mean_return']:.1f}"
    assert outcome.startswith(f"{steps} steps in ") and log.startswith("log: ")
    assert (
        f"last mean return {mean}, evaluated at {summary['eval_return']:.1f}, --stop-at 5 reached" in outcome
    )

    flags["resume"] = str(tmp_path)
    left = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(stop_at=5.0) == [
        f"{tmp_path} is complete: its mean return is {mean}.",
        "To go on, give more than --stop-at 5.",
    ]
    assert run(stop_at=1000.0, total_steps=steps) == [
        f"{tmp_path} is complete: it took {steps} steps.",
        f"To go on, give more than --total-steps {steps}.",
    ]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == left

    more = {"stop_at": 1000.0, "total_steps": steps + 1}
    *_, outcome, _ = run(**more)
    assert outcome.startswith(f"{steps + 64} steps in ") and outcome.endswith("--stop-at 1000 not reached")
    # A run that was ended before its last file was written catches up on that.
    (tmp_path / "summary.json").unlink()
    assert run(**more)[-1] == log
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == steps + 64


def finished_run(folder, seed, returns, **changes):
    """A run as the trainers leave it, a row per 100 steps."""
    folder.mkdir()
    rows = [f"{100 * i},{value},{value},{i % 3}" for i, value in enumerate(returns, 1)]
    (folder / "progress.csv").write_text("\n".join(["steps,mean_return,return_100,lag", *rows, ""]))
    summary = {"env_id": "CartPole-v1", "seed": seed, "sps": 1234.5, "eval_return": 500.0}
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    return str(folder)


def test_curves_of_several_seeds(tmp_path, monkeypatch, capsys):
    runs = [
        finished_run(tmp_path / "a", 1, ["nan", 100, 480, 90, 490]),
        finished_run(tmp_path / "b", 2, ["nan", 100, 200]),
    ]
    flags = ["--target=475", f"--out={tmp_path / 'curve'}"]
    monkeypatch.setattr(sys, "argv", ["curves.py", *runs, *flags])
    runpy.run_path(str(EXAMPLES / "curves.py"), run_name="__main__")
    printed = capsys.readouterr().out
    # The mean lag leaves out the first row, where no episode had ended.
    assert "| 1 | 300 | 90 | 490 | 500 | 1,234 | 1.25 |" in printed
    assert "| 2 | - | - | 200 | 500 | 1,234 | 1.00 |" in printed
    for theme in ("light", "dark"):
        assert (tmp_path / f"curve-{theme}.png").read_bytes().startswith(b"\x89PNG")


def test_curves_need_finished_runs_of_one_environment(tmp_path, monkeypatch):
    runs = [finished_run(tmp_path / name, 1, [20], env_id=name) for name in ("A-v1", "B-v1")]
    nowhere = str(tmp_path / "nowhere")
    for args, message in ((runs, "runs of one environment"), ([nowhere], "nowhere is no finished run")):
        monkeypatch.setattr(sys, "argv", ["curves.py", *args])
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            runpy.run_path(str(EXAMPLES / "curves.py"), run_name="__main__")


def test_ctrl_c_saves_and_exits_cleanly(tmp_path):
    flags = ["--total-steps=100000000", "--eval-episodes=1", "--checkpoint-every=1"]
    process = subprocess.Popen(command(tmp_path, *flags), env=environment(), **SILENT)
    wait_for(tmp_path / "checkpoint.pt", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"] and summary["steps"] == common.load_checkpoint(tmp_path)["steps"]


RANK = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import ppo

trainer = ppo.PPO(ppo.Config(env_id="rl_triton/CartPole-v1", device="cpu", num_envs=4, num_steps=8))
for _ in range(2):
    trainer.iterate()
weights = torch.cat([parameter.detach().flatten() for parameter in trainer.loss_module.parameters()])
for mine, equal in ((weights, True), (trainer.batch["observation"], False)):
    first = mine.clone()
    dist.broadcast(first, 0)
    assert dist.get_rank() == 0 or torch.equal(first, mine) == equal
assert trainer.steps == 2 * 2 * 4 * 8
trainer.close()
"""


def test_torchrun_processes_share_weights_but_not_rollouts(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launcher, str(script), str(EXAMPLES)], env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_running_norm_matches_the_whole_sample():
    norm = parts.RunningNorm(3)
    batches = [3 * torch.randn(size, 3, dtype=torch.float64) + 1 for size in (5, 50, 7)]
    norm.double()
    for batch in batches:
        norm.update(batch)
    whole = torch.cat(batches)
    torch.testing.assert_close(norm.mean, whole.mean(0))
    torch.testing.assert_close(norm.variance, whole.var(0, correction=0))


def test_returns_window_holds_an_episode_per_env():
    returns = common.Returns(num_envs=30)
    returns.add([500.0] * 20)
    assert not returns.reached(475)
    returns.add([0.0] * 10)
    assert returns.mean() == pytest.approx(500 * 20 / 30)
    returns.add([500.0] * 30)
    assert returns.reached(475) and not returns.reached(None) and returns.best == 500


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["rollout", "minibatch"])
def test_graphs_replay_what_eager_code_computes(recompute):
    trainer = make(device="cuda", cudagraphs=True, num_envs=64, recompute=recompute)
    for _ in range(5):
        trainer.iterate()
    assert trainer.rollout.graph is not None and trainer.update.graph is not None
    # A rollout that a graph wrote is one that the environments could have produced.
    after = trainer.batch["next"]
    done = after["done"][:, :-1, 0]
    same = (after["observation"][:, :-1] == trainer.batch["observation"][:, 1:]).all(-1)
    assert torch.equal(same, ~done)

    trainer.value_pass()
    trainer.estimate()
    replayed = trainer.batch.select("state_value", "advantage", "value_target").clone()
    trainer._value_pass()
    trainer._estimate()
    for key, value in replayed.items():
        torch.testing.assert_close(trainer.batch[key], value, rtol=1e-5, atol=1e-5)

    before = [parameter.clone() for parameter in trainer.loss_module.parameters()]
    state = copy.deepcopy(trainer.state_dict())
    trainer.update()
    replayed = [parameter.clone() for parameter in trainer.loss_module.parameters()]
    trainer.load_state_dict(state | {"rng": common.GlobalRNGState().state_dict()})
    for parameter, value in zip(trainer.loss_module.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    trainer._update()
    for parameter, value in zip(trainer.loss_module.parameters(), replayed, strict=True):
        torch.testing.assert_close(parameter, value, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_cartpole_is_learned_in_graphs(tmp_path):
    config = ppo.Config(
        **{
            "logdir": str(tmp_path),
            "stop_at": 475,
            "cudagraphs": True,
            **ppo.PRESETS["rl_triton/CartPole-v1"],
        }
    )
    config.env_id = "rl_triton/CartPole-v1"
    common.train(ppo.PPO, config)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reached_stop_at"] and summary["eval_return"] >= 475
