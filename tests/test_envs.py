"""The torch environments against Gymnasium's own in every autoreset mode, and what trainers need of them."""

import io
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymWrapper

import rl_triton.integrations.envs  # noqa: F401

N = 6
NAMES = ("CartPole-v1", "Pendulum-v1")
every_env = pytest.mark.parametrize("name", NAMES)
every_mode = pytest.mark.parametrize("mode", AutoresetMode)


def make(name: str, num_envs: int = N, seed: int | None = 0, **kwargs: Any) -> Any:
    env: Any = gym.make_vec(f"rl_triton/{name}", num_envs=num_envs, **kwargs)
    env.reset(seed=seed)
    return env


def actions_of(env: Any, steps: int) -> list[np.ndarray]:
    env.action_space.seed(0)
    return [env.action_space.sample() for _ in range(steps)]


def rollout(env: Any, actions: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    steps = [env.step(action) for action in actions]
    columns = [torch.stack(column) for column in list(zip(*steps, strict=True))[:4]]
    infos = [torch.stack([step[4][key] for step in steps]) for key in steps[0][4]]
    return (*columns, *infos)


def assert_equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def set_states(theirs: SyncVectorEnv, ours: Any) -> None:
    """Give Gymnasium's environments the states of ours."""
    for env, physics in zip(theirs.envs, ours.state_dict()["physics"], strict=True):
        env.unwrapped.state = physics.double().cpu().numpy()  # pyright: ignore[reportAttributeAccessIssue]


@every_env
@every_mode
def test_steps_like_gymnasium(name, mode, device):
    """Same states, same actions: same observations, rewards, flags and final observations."""
    limit = 15
    ours = make(name, device=device, autoreset_mode=mode, max_episode_steps=limit)
    theirs = SyncVectorEnv([lambda: gym.make(name, max_episode_steps=limit)] * N, autoreset_mode=mode)
    theirs.reset(seed=0)
    # Wider than initial states, so that some poles fall before the limit.
    state = ours.state_dict()
    state["physics"] *= torch.linspace(0, 4, N, device=device)[:, None]
    ours.load_state_dict(state)

    resetting = np.zeros(N, dtype=bool)
    ends = {"terminated": 0, "truncated": 0}
    for actions in actions_of(ours, 70):
        set_states(theirs, ours)
        got_obs, *got, got_infos = ours.step(actions)
        want_obs, *want, want_infos = theirs.step(actions)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x.cpu(), y, rtol=1e-5, atol=1e-5)
        terminated, truncated = (flag.astype(bool) for flag in want[1:])
        done = terminated | truncated
        ends["terminated"] += terminated.sum()
        ends["truncated"] += truncated.sum()

        # Where a new episode opens, its first observation is ours alone.
        opening = {
            AutoresetMode.NEXT_STEP: resetting,
            AutoresetMode.SAME_STEP: done,
            AutoresetMode.DISABLED: np.zeros(N, dtype=bool),
        }[mode]
        np.testing.assert_allclose(got_obs.cpu()[~opening], want_obs[~opening], rtol=1e-5, atol=1e-5)
        resetting = done
        if mode == AutoresetMode.SAME_STEP:
            assert np.array_equal(got_infos["_final_obs"].cpu(), done)
            for i in np.flatnonzero(done):
                final_obs = want_infos["final_obs"][i]
                np.testing.assert_allclose(got_infos["final_obs"][i].cpu(), final_obs, rtol=1e-5, atol=1e-5)
        elif mode == AutoresetMode.DISABLED and done.any():
            ours.reset(options={"reset_mask": done})
            theirs.reset(options={"reset_mask": done})
    theirs.close()
    assert ends["truncated"] > 0
    assert (ends["terminated"] > 0) == (name == "CartPole-v1")


@every_env
def test_time_limit_and_spaces_are_gymnasiums(name):
    ours, theirs = make(name), gym.make(name)
    assert ours.spec.max_episode_steps == theirs.spec.max_episode_steps  # pyright: ignore[reportOptionalMemberAccess]
    assert ours.single_observation_space == theirs.observation_space
    assert ours.single_action_space == theirs.action_space
    assert ours.observation_space == gym.vector.utils.batch_space(theirs.observation_space, N)
    assert ours.action_space == gym.vector.utils.batch_space(theirs.action_space, N)


@every_env
def test_episodes_last_to_the_time_limit(name):
    """Zero torque, and a pole that is put upright again before each step."""
    env = make(name, num_envs=1)
    limit = {"CartPole-v1": 500, "Pendulum-v1": 200}[name]
    action = np.zeros_like(env.action_space.sample())
    for step in range(1, 2 * limit + 1):
        state = env.state_dict()
        state["physics"].zero_()
        env.load_state_dict(state)
        _, _, terminated, truncated, _ = env.step(action)
        assert not terminated
        assert truncated == (step % limit == 0)


@every_env
@every_mode
def test_outputs_have_gymnasiums_types(name, mode, device):
    env = make(name, device=device, autoreset_mode=mode)
    assert env.metadata["autoreset_mode"] is env.autoreset_mode is mode
    obs, infos = env.reset(seed=1)
    assert infos == {}
    assert obs.cpu().numpy() in env.observation_space
    obs, rewards, terminated, truncated, _ = env.step(env.action_space.sample())
    assert obs.cpu().numpy() in env.observation_space
    assert {x.device for x in (obs, rewards, terminated, truncated)} == {obs.device}
    assert obs.device.type == device.type
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (torch.float32, torch.bool, torch.bool)
    assert rewards.shape == terminated.shape == truncated.shape == (N,)


@every_env
def test_initial_states_fill_gymnasiums_range(name):
    bound = torch.tensor({"CartPole-v1": [0.05] * 4, "Pendulum-v1": [torch.pi, 1.0]}[name])
    scaled = make(name, num_envs=4000).state_dict()["physics"] / bound
    assert (scaled.abs() <= 1).all()
    # Mean, variance and extremes of a uniform distribution on [-1, 1].
    torch.testing.assert_close(scaled.mean(0), torch.zeros_like(bound), rtol=0, atol=0.05)
    torch.testing.assert_close(scaled.var(0), torch.full_like(bound, 1 / 3), rtol=0, atol=0.03)
    assert (scaled.amin(0) < -0.99).all()
    assert (scaled.amax(0) > 0.99).all()


@every_env
@every_mode
def test_outputs_are_copies(name, mode):
    """A caller may overwrite what it gets; the episodes go on untouched."""
    kept, overwritten = (make(name, autoreset_mode=mode, max_episode_steps=5) for _ in range(2))
    overwritten.reset(seed=0)[0].fill_(torch.nan)
    for actions in actions_of(kept, 12):
        want, got = kept.step(actions), overwritten.step(actions)
        assert_equal((*got[:4], *got[4].values()), (*want[:4], *want[4].values()))
        for output in (*got[:4], *got[4].values()):
            output.zero_() if output.dtype == torch.bool else output.fill_(torch.nan)


@every_env
def test_seeds(name):
    runs = [rollout(env := make(name, seed=seed), actions_of(env, 40)) for seed in (1, 1, 2, None, None)]
    assert_equal(runs[0], runs[1])
    for i, j in ((0, 2), (0, 3), (3, 4)):
        assert not torch.equal(runs[i][0], runs[j][0])
    # Within a batch, too, no two episodes are the same.
    assert len(runs[0][0][0].unique(dim=0)) == N


@every_env
def test_reset_mask_leaves_the_others_alone(name, device):
    env = make(name, device=device, autoreset_mode="Disabled", max_episode_steps=5)
    rollout(env, actions_of(env, 3))
    before = env.state_dict()
    mask = torch.arange(N, device=device) % 2 == 0
    obs, _ = env.reset(options={"reset_mask": mask})
    after = env.state_dict()
    assert torch.equal(obs, env.observe(after["physics"]))
    for key in ("physics", "elapsed"):
        assert torch.equal(after[key][~mask], before[key][~mask])
        assert (after[key][mask] != before[key][mask]).all()
    *_, truncated, _ = env.step(env.action_space.sample())
    assert not truncated.any()
    *_, truncated, _ = env.step(env.action_space.sample())
    assert torch.equal(truncated, ~mask)


@every_env
def test_a_finished_env_waits_for_its_reset(name):
    env = make(name, autoreset_mode="Disabled", max_episode_steps=5)
    actions = actions_of(env, 8)
    rollout(env, actions[:4])
    obs, _, terminated, truncated, _ = env.step(actions[4])
    assert truncated.all()
    for action in actions[5:]:
        waiting = env.step(action)
        assert_equal(waiting[:4], (obs, torch.zeros(N), terminated, truncated))


@every_env
@every_mode
def test_resume_is_bitwise(name, mode):
    env = make(name, autoreset_mode=mode, max_episode_steps=12)
    actions = actions_of(env, 60)
    rollout(env, actions[:30])
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    want = rollout(env, actions[30:])

    resumed = make(name, seed=None, autoreset_mode=mode, max_episode_steps=12)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(rollout(resumed, actions[30:]), want)


@every_env
def test_state_dict_is_a_snapshot(name):
    env = make(name)
    actions = actions_of(env, 20)
    state = env.state_dict()
    want = rollout(env, actions)
    env.load_state_dict(state)
    assert_equal(rollout(env, actions), want)


@every_env
@every_mode
def test_transition_compiles_to_one_graph(name, mode):
    env, compiled = (make(name, autoreset_mode=mode, max_episode_steps=5) for _ in range(2))
    compiled.transition = torch.compile(compiled.transition, fullgraph=True, backend="aot_eager")
    actions = actions_of(env, 12)
    for got, want in zip(rollout(compiled, actions), rollout(env, actions), strict=True):
        torch.testing.assert_close(got, want)


@every_env
@pytest.mark.parametrize("mode", (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED))
def test_torchrl_wraps_it(name, mode):
    """`next` holds the observation that a step reached; the row after a done one opens a new episode."""
    env = GymWrapper(make(name, autoreset_mode=mode, max_episode_steps=8))
    data = env.rollout(20, break_when_any_done=False)
    done = data["next", "done"][:, :-1, 0]
    continues = (data["next", "observation"][:, :-1] == data["observation"][:, 1:]).all(-1)
    assert done.any()
    assert torch.equal(continues, ~done)
    assert (data["next", "reward"] != 0).all()


@pytest.mark.gpu
@every_env
@every_mode
def test_no_step_synchronises(name, mode):
    env = make(name, device="cuda", autoreset_mode=mode, max_episode_steps=5)
    actions = [torch.as_tensor(action, device="cuda") for action in actions_of(env, 8)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if mode == AutoresetMode.DISABLED:
                env.reset(options={"reset_mask": terminated | truncated})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@every_env
@every_mode
def test_a_captured_rollout_equals_an_eager_one(name, mode):
    env = make(name, device="cuda", autoreset_mode=mode, max_episode_steps=5)
    actions = torch.as_tensor(np.stack(actions_of(env, 7)), device="cuda")
    rollout(env, actions)
    start = env.state_dict()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        captured = rollout(env, actions)
    env.load_state_dict(start)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([x.clone() for x in captured])

    env.load_state_dict(start)
    for replay in replays:
        assert_equal(tuple(replay), rollout(env, actions))


@pytest.mark.parametrize(
    ("name", "actions", "message"),
    [
        ("CartPole-v1", np.zeros(N, dtype=np.float32), r"integers of shape \[6\], got torch.float32"),
        (
            "CartPole-v1",
            np.zeros((N, 1), dtype=np.int64),
            r"of shape \[6\], got torch.int64 of shape \[6, 1\]",
        ),
        ("CartPole-v1", np.int64(1), r"of shape \[6\], got torch.int64 of shape \[\]"),
        ("Pendulum-v1", np.zeros((N, 1), dtype=np.int64), r"floats of shape \[6, 1\], got torch.int64"),
        (
            "Pendulum-v1",
            np.zeros(N, dtype=np.float32),
            r"floats of shape \[6, 1\], got torch.float32 of shape \[6\]",
        ),
    ],
)
def test_bad_actions(name, actions, message):
    with pytest.raises(ValueError, match=f"actions must be .*{message}"):
        make(name).step(actions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": -0.1}, "options may hold 'reset_mask' alone, got .*low"),
        (
            {"reset_mask": np.ones(N - 1, dtype=bool)},
            r"reset_mask.* must be bool of shape \[6\], got .*\[5\]",
        ),
        ({"reset_mask": np.ones(N)}, r"reset_mask.* must be bool of shape \[6\], got torch.float64"),
    ],
)
def test_bad_reset_options(options, message):
    with pytest.raises(ValueError, match=message):
        make("CartPole-v1").reset(options=options)


def test_bad_autoreset_mode():
    with pytest.raises(ValueError, match="'next_step' is not a valid AutoresetMode"):
        make("CartPole-v1", autoreset_mode="next_step")


def test_bad_state_dict():
    env = make("CartPole-v1")
    with pytest.raises(ValueError, match=r"state_dict\['physics'\] must have shape \[6, 4\], got \[3, 4\]"):
        env.load_state_dict(make("CartPole-v1", num_envs=3).state_dict())
    with pytest.raises(ValueError, match=r"state_dict\['physics'\] must have shape \[6, 4\], got \[6, 2\]"):
        env.load_state_dict(make("Pendulum-v1").state_dict())
    with pytest.raises(ValueError, match=r"state_dict must have the keys .* got .*'elapsed'"):
        env.load_state_dict({"elapsed": torch.zeros(N)})
