"""The IMPALA trainer and the end-to-end benchmark."""

import contextlib
import csv
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

for name in ("torchrl", "tyro", "gymnasium"):
    pytest.importorskip(name)

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
common = importlib.import_module("common")
parts = importlib.import_module("parts")
with warnings.catch_warnings():
    # TorchRL's collectors derive from a class of their own that is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    impala = importlib.import_module("impala")
TensorDict = impala.TensorDict

TINY = {"num_envs": 2, "num_steps": 8, "hidden": (16,), "total_steps": 640}


def settings(**changes):
    return impala.Config(**{"engine": "inline", **TINY, **changes})


def make_learner(**changes):
    torch.manual_seed(1)
    device = torch.device(changes.get("device", "cpu"))
    envs = parts.Envs("CartPole-v1", 1, device)
    return impala.Learner(settings(**changes), envs, common.Ranks(device), common.Stages(device))


def make_rollouts(n, t, device="cpu"):
    torch.manual_seed(2)
    flags = torch.rand(2, n, t, 1) < 0.1
    rollouts = {
        "observation": torch.randn(n, t, 4),
        "action": torch.randint(2, (n, t)),
        "action_log_prob": torch.rand(n, t).log(),
        "next": {
            "observation": torch.randn(n, t, 4),
            "reward": torch.randn(n, t, 1),
            "terminated": flags[0],
            "truncated": flags[1],
            "done": flags[0] | flags[1],
            "episode_reward": torch.ones(n, t, 1),
        },
    }
    return TensorDict(rollouts, [n, t], device=device)


def command(logdir, *flags):
    sizes = [f"--{key.replace('_', '-')}={value}" for key, value in TINY.items() if key != "hidden"]
    return [sys.executable, str(EXAMPLES / "impala.py"), *sizes, f"--logdir={logdir}", *flags]


def environment():
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return {**inherited, "OMP_NUM_THREADS": "1"}


def launch(logdir, *flags):
    """A run in a session of its own."""
    return subprocess.Popen(
        command(logdir, "--eval-episodes=1", *flags),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start(logdir, *flags):
    """An endless one, once its first checkpoint is there."""
    process = launch(logdir, "--total-steps=100000000", "--checkpoint-every=1", *flags)
    deadline = time.monotonic() + 120
    while not (logdir / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return process


def read_progress(logdir):
    with (logdir / "progress.csv").open() as file:
        return [row for row in csv.DictReader(file) if all(row.values())]


def actor_processes(process):
    """The pids of the actors that a run has spawned."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_estimators_agree():
    rollouts = make_rollouts(5, 12)
    results = []
    for estimator in ("triton", "torchrl"):
        learner = make_learner(estimator=estimator, rho_bar=1.5, c_bar=0.9)
        learner._load(rollouts.select(*learner.inputs))
        # Truncated at random, not at a time limit: every row may need its final observation.
        learner.gap = 1
        learner.value_pass()
        learner.estimate()
        results.append(learner.batch)
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(results[0][key], results[1][key], rtol=1e-5, atol=1e-5)


def test_weights_are_those_of_the_stored_actions():
    learner = make_learner()
    rollouts = make_rollouts(3, 4)
    learner._load(rollouts.select(*learner.inputs))
    learner.value_pass()
    logits = learner.actor.module[0](rollouts.select("observation"))["logits"].log_softmax(-1)
    expected = logits.gather(-1, rollouts["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(learner.batch["log_pi"], expected)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_learning_rate_and_entropy_bonus_anneal(optimizer):
    learner = make_learner(optimizer=optimizer, updates=2, reward_scale=0.5, clip_rewards=True)
    before = [parameter.clone() for parameter in learner.loss_module.parameters()]
    rollouts = make_rollouts(3, 4)
    learner.learn(rollouts, share=0.0)
    assert learner.entropy_coeff == 0
    for parameter, value in zip(learner.loss_module.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    assert torch.equal(learner.batch["next", "reward"], (0.5 * rollouts["next", "reward"]).clamp(-1, 1))
    learner.learn(rollouts, share=1.0)
    assert any(not torch.equal(p, b) for p, b in zip(learner.loss_module.parameters(), before, strict=True))


@pytest.mark.parametrize("depth", ["shallow", "deep"])
def test_images_go_through_either_network(depth):
    network = parts.ImpalaCNN((4, 84, 84), depth)
    images = torch.randint(256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    features = network(images)
    assert features.shape == (2, 3, network.features)
    torch.testing.assert_close(features[1, 2], network(images[1, 2]), rtol=1e-4, atol=1e-5)


def test_inline_actors_never_lag_and_get_what_is_published():
    trainer = impala.IMPALA(settings(rollouts=2, learning_rate=0.1))
    for _ in range(3):
        trainer.iterate()
        assert trainer.lag == 0 and trainer.dropped == 0
    assert trainer.steps == 3 * 2 * 2 * trainer.config.num_actors * 8
    published = trainer.actors.collector.policy.parameters()
    for theirs, ours in zip(published, trainer.actor.parameters(), strict=True):
        assert torch.equal(theirs, ours) and theirs.data_ptr() != ours.data_ptr()
    trainer.close()


def test_stale_rollouts_are_dropped_and_counted():
    trainer = impala.IMPALA(settings(max_lag=2.0))
    trainer.actors.close()

    lags = [3.0, 2.0, 9.0, 0.5]

    class Stub:
        def __next__(self):
            return make_rollouts(4, 8), lags.pop(0)

        def publish(self, actor):
            pass

    trainer.actors = Stub()
    trainer.iterate()
    assert (trainer.lag, trainer.dropped, trainer.steps) == (2.0, 1, 32)
    trainer.iterate()
    assert (trainer.lag, trainer.dropped, trainer.steps) == (0.5, 2, 64)
    # Episodes of a dropped rollout count as played.
    assert len(trainer.finished_returns()) == 2 * make_rollouts(4, 8)["next", "done"].sum()


def test_dead_actor_ends_the_run_and_the_checkpoint_goes_on(tmp_path):
    process = start(tmp_path, "--engine=process", "--max-lag=6")
    os.kill(actor_processes(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: an actor died (process engine)" in errors and "Traceback" not in errors
    assert all(0 <= float(row["lag"]) <= 6 for row in read_progress(tmp_path))

    total = common.load_checkpoint(tmp_path)["steps"] + 5 * 32
    flags = [f"--resume={tmp_path}", "--engine=inline", f"--total-steps={total}"]
    output = subprocess.run(
        [sys.executable, str(EXAMPLES / "impala.py"), *flags],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "their episodes start anew" in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == total and {"wait", "advantage", "publish"} <= summary["stages"].keys()
    rows = read_progress(tmp_path)
    assert float(rows[-1]["steps"]) == total and float(rows[-1]["lag"]) == 0


def test_ctrl_c_reaches_actors_too_and_still_exits_cleanly(tmp_path):
    process = start(tmp_path, "--engine=process")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]


def test_second_ctrl_c_is_immediate(tmp_path):
    process = start(tmp_path, "--engine=process", "--eval-episodes=1000000")
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(2)
    # Actors hold the pipe too: that it ends says that they are gone.
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "a second one ends it at once" in errors


def test_ctrl_c_while_actors_start_is_answered_once_they_are_up(tmp_path):
    process = launch(tmp_path, "--engine=process", "--total-steps=100000000")
    try:
        deadline = time.monotonic() + 60
        while not actor_processes(process):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_torchrun_learners_share_a_run(tmp_path):
    script = command(tmp_path, "--engine=inline", "--total-steps=128", "--eval-episodes=2")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, *script[1:]], env=environment(), check=True, capture_output=True)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 128


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id Nope-v1", "--env-id Nope-v1: .*doesn't exist"),
        ("--cudagraphs", "--cudagraphs needs --device cuda"),
        ("--engine ray", "--engine ray needs the package ray"),
    ],
)
def test_bad_input_is_one_line(flags, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["impala.py", *flags.split()])
    with pytest.raises(SystemExit, match=message) as error:
        runpy.run_path(str(EXAMPLES / "impala.py"), run_name="__main__")
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)


def test_checkpoint_of_the_other_trainer_is_refused(tmp_path, monkeypatch):
    ppo = importlib.import_module("ppo")
    config = common.dataclasses.asdict(ppo.Config())
    common.save_checkpoint(tmp_path / "checkpoint.pt", {"config": config, "steps": 0})
    monkeypatch.setattr(sys, "argv", ["impala.py", "--resume", str(tmp_path)])
    with pytest.raises(SystemExit, match="is for the trainer that wrote it"):
        runpy.run_path(str(EXAMPLES / "impala.py"), run_name="__main__")


@pytest.mark.ray
def test_ray_actors_feed_the_learner(tmp_path):
    pytest.importorskip("ray")
    flags = ("--engine=ray", "--eval-episodes=2")
    subprocess.run(command(tmp_path, *flags), env=environment(), check=True, capture_output=True, timeout=300)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 640


def test_benchmark_arms_stay_bitwise_equal_on_reference_numbers(tmp_path, monkeypatch, capsys):
    bench = importlib.import_module("bench_e2e")
    out = tmp_path / "e2e.json"
    monkeypatch.setattr(sys, "argv", f"bench --device cpu --tiny --shadow --minutes 0 --out {out}".split())
    bench.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 5 and all(row["bitwise_equal"] for row in rows)
    printed = capsys.readouterr().out
    for row in rows:
        assert row["title"] in printed
        assert row["arms"]["skip"]["recursion_share"] == 0
        for arm in row["arms"].values():
            assert 0 <= arm["recursion_share"] <= arm["share"] < 1
            assert arm["ceiling"] == pytest.approx(1 / (1 - arm["share"]))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_graphed_learner_computes_what_the_eager_one_does(optimizer):
    changes = {"device": "cuda", "optimizer": optimizer}
    learners = [make_learner(cudagraphs=graphs, **changes) for graphs in (False, True)]
    rollouts = make_rollouts(8, 20, "cuda")
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        for learner in learners:
            learner.learn(rollouts, share)
    assert learners[1].update.graph is not None
    eager, graphed = (learner.loss_module.parameters() for learner in learners)
    for x, y in zip(eager, graphed, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
