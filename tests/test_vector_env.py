"""GAE in Gymnasium's three autoreset modes, on worked cases and on environments stepped for real."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from cases import load_cases
from gymnasium.vector import AutoresetMode
from vector_rollouts import N, T, advantages_by_episode, windows

from rl_triton.integrations import vector_env

NAN = float("nan")


@pytest.mark.parametrize("case", load_cases("integrations.vector_env."), ids=lambda case: case.name)
def test_worked_case(case, path, device):
    case.check(vector_env.gae(**case.kwargs(device)))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_equals_per_episode_computation_of_the_same_steps(mode, device):
    prev_done = None
    rollout = list(windows(mode))
    # Both ends of an episode fall on the edge of a window, where the next one opens on a dummy row.
    assert any(window.terminateds[-1].any() for window in rollout[:-1])
    assert any(window.truncateds[-1].any() for window in rollout[:-1])
    for window in rollout:
        advantages, returns, valid = vector_env.gae(
            window.rewards.to(device),
            window.values.to(device),
            window.terminateds.to(device),
            window.truncateds.to(device),
            window.next_value.to(device),
            0.97,
            0.9,
            autoreset_mode=mode,
            prev_done=prev_done,
            final_values=None if mode == AutoresetMode.NEXT_STEP else window.final_values.to(device),
        )
        for env in range(N):
            rows = valid[:, env]
            expected = advantages_by_episode(window.transitions[env], 0.97, 0.9)
            torch.testing.assert_close(advantages[rows, env].cpu().double(), expected, rtol=1e-5, atol=1e-5)
            assert not advantages[~rows, env].any()
            assert not returns[~rows, env].any()
            values = window.values[:, env].to(device)
            torch.testing.assert_close(returns[rows, env], (advantages[:, env] + values)[rows])
        prev_done = window.next_done.to(device)


def arguments(mode: str = "NextStep", **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    kwargs: dict[str, Any] = {name: torch.randn(T, N, generator=generator) for name in ("rewards", "values")}
    kwargs |= {name: torch.rand(T, N, generator=generator) < 0.1 for name in ("terminateds", "truncateds")}
    kwargs |= {"next_value": torch.randn(N, generator=generator), "autoreset_mode": mode}
    if mode == "NextStep":
        # Gymnasium raises no flag on the dummy row behind a done one.
        for t in range(1, T):
            dummy = (kwargs["terminateds"] | kwargs["truncateds"])[t - 1]
            kwargs["terminateds"][t] &= ~dummy
            kwargs["truncateds"][t] &= ~dummy
        kwargs["prev_done"] = torch.arange(N) % 3 == 0
    else:
        kwargs["final_values"] = torch.randn(T, N, generator=generator)
    return kwargs | changes


def gae(kwargs: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, ...]:
    return vector_env.gae(**kwargs | changes)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_mode_may_be_an_enum_or_its_value(mode):
    kwargs = arguments(mode)
    for by_value, by_enum in zip(
        gae(kwargs),
        gae(kwargs, autoreset_mode=AutoresetMode(mode)),
        strict=True,
    ):
        assert torch.equal(by_value, by_enum)


def test_needs_no_gymnasium():
    code = "import sys; from rl_triton.integrations import vector_env; assert 'gymnasium' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_one_row_arguments_may_keep_the_time_axis(mode):
    kwargs = arguments(mode)
    rows = {name: kwargs[name][None] for name in ("next_value", "prev_done") if name in kwargs}
    for got, want in zip(gae(kwargs, **rows), gae(kwargs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_flags_of_any_dtype(mode, dtype):
    kwargs = arguments(mode)
    names = {"terminateds", "truncateds", "prev_done"} & kwargs.keys()
    flags = {name: kwargs[name].to(dtype) for name in names}
    for got, want in zip(gae(kwargs, **flags), gae(kwargs), strict=True):
        assert torch.equal(got, want)


def test_dummy_rows_are_not_read(path, device):
    kwargs = {key: x.to(device) if torch.is_tensor(x) else x for key, x in arguments().items()}
    advantages, returns, valid = gae(kwargs)
    poisoned = {"rewards": kwargs["rewards"].masked_fill(~valid, NAN)}
    # Behind a truncated row the dummy's value is V of the final observation; elsewhere nothing reads it.
    truncated = kwargs["truncateds"] & ~kwargs["terminateds"]
    read = valid | torch.cat([torch.zeros_like(truncated[:1]), truncated[:-1]])
    poisoned["values"] = kwargs["values"].masked_fill(~read, NAN)
    for got, want in zip(gae(kwargs, **poisoned), (advantages, returns, valid), strict=True):
        assert torch.equal(got, want)


def test_without_prev_done_no_row_0_is_a_dummy():
    _, _, valid = vector_env.gae(**arguments(prev_done=None))
    assert valid[0].all()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_empty_window(mode):
    kwargs = arguments(mode)
    empty = {key: x[:0] for key, x in kwargs.items() if torch.is_tensor(x) and x.ndim == 2}
    for output in gae(kwargs, **empty):
        assert output.shape == (0, N)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_gradients_reach_every_value(mode):
    names = ("rewards", "values", "next_value", "final_values")
    kwargs = arguments(mode)
    kwargs = {key: x[..., :3] if torch.is_tensor(x) else x for key, x in kwargs.items()}
    leaves = {name: kwargs[name].double().requires_grad_() for name in names if name in kwargs}

    def outputs(*inputs):
        return gae(kwargs, **dict(zip(leaves, inputs, strict=True)))[:2]

    assert torch.autograd.gradcheck(outputs, tuple(leaves.values()))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_compiles_to_one_graph(mode):
    kwargs = arguments(mode)
    compiled = torch.compile(vector_env.gae, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**kwargs), gae(kwargs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_graph_capture_without_synchronisation(mode):
    kwargs = {key: x.cuda() if torch.is_tensor(x) else x for key, x in arguments(mode).items()}
    want = gae(kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gae(kwargs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gae(kwargs)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"autoreset_mode": "next_step"}, ValueError, "autoreset_mode must be .* got 'next_step'"),
        ({"autoreset_mode": "SameStep"}, ValueError, "final_values must be given"),
        ({"autoreset_mode": "Disabled"}, ValueError, "final_values must be given"),
        ({"rewards": 1.0}, TypeError, "rewards must be a torch.Tensor, got float"),
        ({"values": torch.zeros(T, N + 1)}, ValueError, r"values must have shape \[24, 8\].* got \[24, 9\]"),
        ({"values": torch.zeros(T, N, dtype=torch.int64)}, TypeError, "values must have a floating dtype"),
        ({"terminateds": None}, TypeError, "terminateds must be a torch.Tensor, got NoneType"),
        ({"truncateds": torch.zeros(N, T)}, ValueError, r"truncateds must have shape \[24, 8\]"),
        ({"next_value": torch.zeros(N, 1)}, ValueError, r"next_value must have shape \[8\] or \[1, 8\], got"),
        ({"prev_done": torch.zeros(T)}, ValueError, r"prev_done must have shape \[8\] or \[1, 8\], got \[24"),
        ({"next_value": torch.zeros(N, device="meta")}, ValueError, "next_value must be on cpu .* got meta"),
        ({"gae_lambda": "0.9"}, TypeError, "gae_lambda must be a number"),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=message):
        vector_env.gae(**arguments(**changes))
