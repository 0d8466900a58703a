"""GAE from the buffers of a CleanRL-style loop."""

from typing import Any

import pytest
import torch
from cases import load_cases
from gymnasium.vector import AutoresetMode
from vector_rollouts import N, T, advantages_by_episode, windows

from rl_triton.integrations import cleanrl

NAN = float("nan")


@pytest.mark.parametrize("case", load_cases("integrations.cleanrl."), ids=lambda case: case.name)
def test_worked_case(case, path, device):
    case.check(cleanrl.gae(**case.kwargs(device)))


@pytest.mark.parametrize("mode", (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED))
def test_rollouts_equal_per_episode_computation(mode, device):
    """With both flags a time limit bootstraps; with the shifted done alone it counts as a termination."""
    for window in windows(mode):
        exact = cleanrl.gae(
            window.rewards.to(device),
            window.values.to(device),
            None,
            window.next_value.to(device),
            None,
            0.97,
            0.9,
            terminateds=window.terminateds.to(device),
            truncateds=window.truncateds.to(device),
            final_values=window.final_values.to(device),
        )
        merged = cleanrl.gae(
            window.rewards.to(device),
            window.values.to(device),
            # CleanRL keeps its flags as floats.
            window.dones.to(device).float(),
            window.next_value.to(device).reshape(1, -1),
            window.next_done.to(device).float(),
            0.97,
            0.9,
        )
        for env, transitions in enumerate(window.transitions):
            deaths = [x._replace(terminated=x.terminated or x.truncated) for x in transitions]
            for (advantages, returns), log in ((exact, transitions), (merged, deaths)):
                expected = advantages_by_episode(log, 0.97, 0.9)
                got = advantages[:, env].cpu()
                torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(returns[:, env].cpu(), got + window.values[:, env])


def arguments(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    kwargs: dict[str, Any] = {name: torch.randn(T, N, generator=generator) for name in ("rewards", "values")}
    kwargs["dones"] = (torch.rand(T, N, generator=generator) < 0.1).float()
    kwargs["next_value"] = torch.randn(N, generator=generator)
    kwargs["next_done"] = (torch.arange(N) % 3 == 0).float()
    return kwargs | changes


def exact_arguments(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    flags = {name: torch.rand(T, N, generator=generator) < 0.1 for name in ("terminateds", "truncateds")}
    final_values = torch.randn(T, N, generator=generator)
    return arguments(**flags, final_values=final_values, dones=None, next_done=None) | changes


@pytest.mark.parametrize("kwargs", [arguments(), exact_arguments()], ids=["dones", "both flags"])
def test_flag_dtypes_and_row_shapes_do_not_matter(kwargs):
    want = cleanrl.gae(**kwargs)
    flags = [key for key in ("dones", "terminateds", "truncateds") if kwargs.get(key) is not None]
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16):
        changes = {key: kwargs[key].to(dtype) for key in flags}
        changes["next_value"] = kwargs["next_value"][None]
        if kwargs["next_done"] is not None:
            changes["next_done"] = kwargs["next_done"][None].bool()
        for x, y in zip(cleanrl.gae(**kwargs | changes), want, strict=True):
            assert torch.equal(x, y)


def test_both_flags_take_the_place_of_dones():
    want = cleanrl.gae(**exact_arguments())
    unread = {"dones": torch.full((T, N), NAN), "next_done": torch.full((N,), NAN)}
    for x, y in zip(cleanrl.gae(**exact_arguments(**unread)), want, strict=True):
        assert torch.equal(x, y)


def test_terminateds_alone_are_the_unshifted_dones():
    kwargs = arguments()
    terminateds = torch.cat([kwargs["dones"][1:], kwargs["next_done"][None]])
    without = {"dones": None, "next_done": None, "terminateds": terminateds}
    for x, y in zip(cleanrl.gae(**kwargs | without), cleanrl.gae(**kwargs), strict=True):
        assert torch.equal(x, y)


def test_value_behind_a_finished_episode_is_not_read():
    kwargs = arguments()
    done = kwargs["next_done"].bool()
    # Row 0 opens the window; what came before it cuts nothing here.
    unread = {"next_value": kwargs["next_value"].masked_fill(done, NAN), "dones": kwargs["dones"].clone()}
    unread["dones"][0] = 1 - unread["dones"][0]
    for x, y in zip(cleanrl.gae(**kwargs | unread), cleanrl.gae(**kwargs), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kwargs", [arguments(), exact_arguments()], ids=["dones", "both flags"])
def test_empty_window(kwargs):
    empty = {key: x[:0] for key, x in kwargs.items() if torch.is_tensor(x) and x.ndim == 2}
    for output in cleanrl.gae(**kwargs | empty):
        assert output.shape == (0, N)


@pytest.mark.parametrize("kwargs", [arguments(), exact_arguments()], ids=["dones", "both flags"])
def test_compiles_to_one_graph(kwargs):
    compiled = torch.compile(cleanrl.gae, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**kwargs), cleanrl.gae(**kwargs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [arguments(), exact_arguments()], ids=["dones", "both flags"])
def test_graph_capture_without_synchronisation(kwargs):
    kwargs = {key: x.cuda() if torch.is_tensor(x) else x for key, x in kwargs.items()}
    want = cleanrl.gae(**kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cleanrl.gae(**kwargs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cleanrl.gae(**kwargs)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dones": None}, TypeError, "dones must be a torch.Tensor unless terminateds is given"),
        ({"next_done": None}, TypeError, "next_done must be a torch.Tensor unless terminateds is given"),
        ({"dones": torch.zeros(T + 1, N)}, ValueError, r"dones must have shape \[24, 8\] .* got \[25, 8\]"),
        (
            {"next_done": torch.zeros(())},
            ValueError,
            r"next_done must have shape \[8\] or \[1, 8\], got \[\]",
        ),
        ({"next_value": torch.zeros(N, 1)}, ValueError, r"next_value must have shape \[8\] or \[1, 8\]"),
        ({"rewards": torch.tensor(1.0)}, ValueError, r"rewards must have shape \[T, N\]"),
        (
            {"values": torch.zeros(T, N).long()},
            TypeError,
            "values must have a floating dtype, got torch.int64",
        ),
        ({"gae_lambda": None}, TypeError, "gae_lambda must be a number or a torch.Tensor, got NoneType"),
        ({"truncateds": torch.zeros(T, N)}, ValueError, "truncateds is read beside terminateds"),
        ({"final_values": torch.zeros(T, N)}, ValueError, "final_values is read beside terminateds"),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=message):
        cleanrl.gae(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"final_values": None}, ValueError, "given together, got truncateds alone"),
        ({"truncateds": None}, ValueError, "given together, got final_values alone"),
        ({"final_values": torch.zeros(N)}, ValueError, r"final_values must have shape \[24, 8\]"),
        ({"final_values": torch.zeros(T, N).int()}, TypeError, "final_values must have a floating dtype"),
        ({"truncateds": torch.zeros(T, N, device="meta")}, ValueError, "truncateds must be on cpu"),
    ],
)
def test_bad_input_beside_terminateds(changes, error, message):
    with pytest.raises(error, match=message):
        cleanrl.gae(**exact_arguments(**changes))
