"""GAE and MultiAgentGAE against TorchRL's modules, the float64 oracle, and what they add."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from rollouts import ForbidSync, assert_close, recurrent_value_net, rollout, value_net, with_hidden_state
from tensordict import TensorDict, lazy_stack
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import value as torchrl_value

from rl_triton import reference
from rl_triton.integrations.torchrl import GAE, MultiAgentGAE

COEFFICIENTS: dict[str, Any] = {"gamma": 0.97, "lmbda": 0.9}
OUTPUTS = ("advantage", "value_target")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def gae(cls: Any = GAE, **options: Any) -> Any:
    return cls(**COEFFICIENTS | {"value_network": None} | options)


def both(data, cls="GAE", **options):
    """What TorchRL's class and ours write into copies of the same tensordict."""
    theirs, ours = getattr(torchrl_value, cls), {"GAE": GAE, "MultiAgentGAE": MultiAgentGAE}[cls]
    return gae(theirs, **options)(data.copy()), gae(ours, **options)(data.copy())


def assert_same(expected, actual, keys=OUTPUTS):
    for key in keys:
        assert_close(actual[key], expected[key])


def oracle(data, value="state_value", **options):
    """The float64 loop on a tensordict with values and next values."""
    step = data["next"]
    arguments = {
        "gamma": 0.97,
        "lambda_": 0.9,
        "next_values": step[value],
        "time_dim": data.ndim - 1,
    } | options
    return reference.compute_gae(
        step["reward"], data[value], step["terminated"], step["done"], return_targets=True, **arguments
    )


SHAPES = [((1,), -1), ((7,), 0), ((3, 1), -1), ((4, 13), -1), ((11, 3), 0), ((2, 3, 9), 2), ((2, 8, 3), -2)]


# TorchRL's vectorised path takes one axis of features.
FORMS = [((1,), None), ((3,), None), ((2, 1), None), ((1,), True), ((3,), True)]


@pytest.mark.parametrize(("features", "vectorized"), FORMS)
@pytest.mark.parametrize(("batch", "time_dim"), SHAPES)
def test_stored_values_equal_torchrl(batch, time_dim, features, vectorized):
    data = rollout(*batch, time_dim=time_dim, features=features, values=True)
    assert_same(*both(data, time_dim=time_dim, vectorized=vectorized))


def test_on_every_path(path):
    data = rollout(2, 5, named=True)
    for options in ({}, {"shifted": True}, {"single_pass": True}):
        module = gae(value_network=value_net(), **options)
        expected = gae(torchrl_value.GAE, value_network=module.value_network)(data.copy())
        out = module(data.copy())
        if not options.get("shifted") or out["shifted_valid"].all():
            assert_same(expected, out)
    data["state_value"], data["next", "state_value"] = torch.randn(2, 2, 5, 3, 1)
    expected, out = both(data, "MultiAgentGAE")
    assert_same(expected, out)
    data["steps_to_next_obs"] = torch.ones(2, 5, 1, dtype=torch.long)
    assert_same(expected, gae(MultiAgentGAE)(data))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("how", ["name", "positive", "negative", "call"])
def test_time_dim(how, shifted):
    net = value_net()
    data = rollout(9, 4, time_dim=0, named=how == "name")
    expected = gae(value_network=net)(data.transpose(0, 1).copy())
    options = {"name": {}, "positive": {"time_dim": 0}, "negative": {"time_dim": -2}, "call": {}}[how]
    # The budget reaches every row, so that shifted results are those of two passes.
    module = gae(value_network=net, shifted=shifted, shifted_budget=9, **options)
    actual = module(data.copy(), time_dim=0) if how == "call" else module(data.copy())
    for key in OUTPUTS:
        assert_close(actual[key], expected[key].transpose(0, 1))


@pytest.mark.parametrize("options", [{}, {"shifted": True}, {"shifted": True, "shifted_budget": 3}])
@pytest.mark.parametrize("extra", [{}, {"average_gae": True}, {"auto_reset_env": True}])
def test_network_equals_torchrl(options, extra):
    if "auto_reset_env" in extra:
        # TorchRL drops the bootstrap of the last row that the budget reaches: let it reach all.
        options = options | {"shifted_budget": 20}
    for length in (1, 2, 6, 17):
        data = rollout(4, length, named=True)
        data["next", "obs"] += 0.1
        expected, actual = both(data, value_network=value_net(), **options, **extra)
        assert set(actual.keys(True, True)) == set(expected.keys(True, True))
        assert_same(expected, actual, (*OUTPUTS, "state_value", ("next", "state_value")))
        if options.get("shifted"):
            assert_close(actual["shifted_valid"], expected["shifted_valid"])


def test_nested_keys_equal_torchrl():
    keys = {
        "advantage": ("out", "advantage"),
        "value_target": ("out", "target"),
        "value": ("critic", "value"),
        "reward": ("agents", "reward"),
        "done": ("agents", "done"),
        "terminated": ("agents", "terminated"),
        "steps_to_next_obs": ("agents", "steps"),
    }
    data = rollout(3, 8, values=True)
    moved = TensorDict({}, data.shape)
    moved["critic", "value"] = data["state_value"]
    moved["next", "critic", "value"] = data["next", "state_value"]
    for name in ("reward", "done", "terminated"):
        moved["next", "agents", name] = data["next", name]
    results = []
    for cls in (torchrl_value.GAE, GAE):
        module = gae(cls)
        module.set_keys(**keys)
        results.append(module(moved.copy()))
    assert_same(*results, keys=[("out", "advantage"), ("out", "target")])
    assert_same(gae()(data), results[1]["out"].rename_key_("target", "value_target"))


def test_gradients_equal_torchrl():
    grads = []
    for cls in (torchrl_value.GAE, GAE):
        torch.manual_seed(1)
        data = rollout(3, 7, values=True)
        leaves = [data["state_value"], data["next", "state_value"], data["next", "reward"]]
        for leaf in leaves:
            leaf.requires_grad_()
        module = gae(cls, differentiable=True)
        weight = torch.randn(2, 3, 7, 1)
        data = module(data)
        (weight[0] * data["advantage"] + weight[1] * data["value_target"]).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert_close(grads[1], grads[0])


def test_without_differentiable_there_is_no_graph():
    data = rollout(2, 5, values=True)
    data["next", "reward"].requires_grad_()
    out = gae()(data)
    assert not any(out[key].requires_grad for key in OUTPUTS)


def test_gradients_through_a_network_equal_torchrl():
    net = value_net()
    for options in ({}, {"single_pass": True}):
        grads = []
        for cls, extra in ((torchrl_value.GAE, {}), (GAE, options)):
            torch.manual_seed(1)
            data = rollout(3, 7)
            data["obs"].requires_grad_()
            module = gae(cls, value_network=net, differentiable=True, **extra)
            module(data)["advantage"].square().sum().backward()
            grads.append(data["obs"].grad)
            assert all(parameter.grad is None for parameter in net.parameters())
            assert all(parameter.requires_grad for parameter in net.parameters())
        assert_close(grads[1], grads[0])


def test_fp64_equals_the_oracle():
    data = rollout(4, 50, dtype=torch.float64, values=True)
    coefficients = {key: torch.tensor(value, dtype=torch.float64) for key, value in COEFFICIENTS.items()}
    out = gae(**coefficients)(data.copy())
    for key, expected in zip(OUTPUTS, oracle(data), strict=True):
        assert out[key].dtype == torch.float64
        assert_close(out[key], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"shifted": True}, {"single_pass": True}, {"auto_reset_env": True}])
def test_flags_of_any_dtype(dtype, options):
    data = rollout(4, 12)
    module = gae(value_network=value_net(), **options)
    expected = module(data.copy())
    for name in ("done", "terminated", "truncated"):
        data["next", name] = data["next", name].to(dtype)
    assert_same(expected, module(data))


def test_which_flags_are_read():
    data = rollout(4, 30, values=True, rate=0.4)
    module = gae()
    expected = module(data.copy())

    def without(*names):
        return module(data.exclude(*(("next", name) for name in names)))

    # Two of the three flags say everything.
    for name in ("done", "terminated", "truncated"):
        assert_same(expected, without(name))
    ended = data.copy().set(("next", "terminated"), data["next", "done"])
    assert_same(module(ended), without("terminated", "truncated"))
    cut = data.copy().set(("next", "done"), data["next", "terminated"])
    assert_same(module(cut.copy()), module(cut.exclude(("next", "truncated"))))
    # A truncation flag of another name is no part of the rollout's done.
    cut["next", "time_limit"] = data["next", "truncated"]
    module.set_keys(truncated="time_limit")
    assert_same(expected, module(cut))
    # Terminated without done ends the episode too.
    module.set_keys(truncated="truncated")
    late = data.copy().set(("next", "done"), data["next", "truncated"])
    assert_same(expected, module(late))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_behind_a_terminated_row_is_read(poison):
    data = rollout(4, 20, values=True)
    module = gae()
    expected = module(data.copy())
    data["next", "state_value"] = torch.where(data["next", "terminated"], poison, data["next", "state_value"])
    assert_same(expected, module(data))


@pytest.mark.parametrize(("gamma", "lmbda"), [(0, 0.9), (0.9, 0), (1, 1), (0.0, 0.0), (1e-8, 1e-8)])
def test_extreme_coefficients(gamma, lmbda):
    data = rollout(3, 9, values=True)
    out = gae(gamma=gamma, lmbda=lmbda)(data.copy())
    for key, expected in zip(OUTPUTS, oracle(data, gamma=gamma, lambda_=lmbda), strict=True):
        assert_close(out[key].double(), expected.double())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (3, 1, 1), (1, 9, 1), (3, 9, 1)])
def test_tensor_coefficients(shape):
    data = rollout(3, 9, values=True)
    gamma, lmbda = 0.8 + 0.2 * torch.rand(shape), 0.8 + 0.2 * torch.rand(shape)
    expected, actual = both(data, gamma=gamma.expand(3, 9, 1), lmbda=lmbda.expand(3, 9, 1), vectorized=True)
    assert_same(expected, actual)
    assert_same(expected, gae(gamma=gamma, lmbda=lmbda)(data))


def test_steps_to_next_obs_equal_torchrl():
    data = rollout(3, 9, values=True)
    data["steps_to_next_obs"] = torch.randint(1, 4, (3, 9, 1))
    assert_same(*both(data, vectorized=True))


def test_a_terminated_row_wins_over_auto_reset():
    data = rollout(1, 1, values=True)
    step = data["next"]
    step["reward"], data["state_value"] = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0)
    for name in ("done", "terminated", "truncated"):
        step[name] = torch.ones(1, 1, 1, dtype=torch.bool)
    out = gae(gamma=0.9, lmbda=0.9, auto_reset_env=True)(data)
    assert out["advantage"].item() == -1.0


def test_broadcast_of_team_signals():
    """Reward and flags of one column serve three value columns; another rank is TorchRL's error."""
    data = rollout(3, 6, features=(1,))
    data["state_value"] = torch.randn(3, 6, 3)
    data["next", "state_value"] = torch.randn(3, 6, 3)
    module = gae()
    out = module(data.copy())
    for column in range(3):
        one = data.copy()
        one["state_value"] = data["state_value"][..., column : column + 1]
        one["next", "state_value"] = data["next", "state_value"][..., column : column + 1]
        assert_close(out["advantage"][..., column : column + 1], module(one)["advantage"])
    data["state_value"] = torch.randn(3, 6, 3, 1)
    with pytest.raises(RuntimeError, match=r"value \[3, 6, 3, 1\], reward \[3, 6, 1\]"):
        module(data)


def test_valid_rows():
    data = rollout(4, 12, values=True)
    valid = torch.rand(4, 12) < 0.7
    for name in ("state_value", ("next", "state_value"), ("next", "reward")):
        data[name] = torch.where(valid.unsqueeze(-1), data[name], float("nan"))
    expected = oracle(data, valid=valid.unsqueeze(-1))
    for mask in (valid, valid.unsqueeze(-1), valid.to(torch.uint8)):
        data["valid"] = mask
        out = gae()(data.copy())
        for key, y in zip(OUTPUTS, expected, strict=True):
            assert_close(out[key].double(), y.double())
    averaged = gae(average_gae=True)(data.copy())["advantage"]
    chosen = out["advantage"][valid]
    assert_close(averaged[valid], (chosen - chosen.mean()) / chosen.std())
    assert not averaged[~valid].any()
    data["valid"] = torch.ones(4, 12, dtype=torch.bool)
    data = data.apply(torch.nan_to_num)
    for extra in ({}, {"group_key": "task"}):
        data["task"] = torch.arange(4).view(4, 1).expand(4, 12) // 2
        module = gae(average_gae=True, **extra)
        assert_same(module(data.exclude("valid")), module(data.copy()))


def test_groups_of_valid_rows():
    data = rollout(4, 12, values=True)
    data["task"] = torch.tensor([[0], [0], [5], [5]]).expand(4, 12)
    data["valid"] = torch.rand(4, 12) < 0.6
    assert_same(*both(data.exclude("valid"), average_gae=True, group_key="task"))
    plain = gae()(data.copy())["advantage"]
    out = gae(average_gae=True, group_key="task")(data)["advantage"]
    for task in (0, 5):
        rows = data["valid"] & (data["task"] == task)
        chosen = plain[rows]
        assert_close(out[rows], (chosen - chosen.mean()) / chosen.std())
    assert not out[~data["valid"]].any()


def test_bootstrap_entry_needs_the_root_alone():
    net = value_net()
    data = rollout(4, 12)
    two_passes = gae(value_network=net)(data.copy())
    needed = data["next", "truncated"].clone()
    needed[:, -1] = True
    data["next", "bootstrap_value"] = torch.where(needed, two_passes["next", "state_value"], float("nan"))
    del data["next", "obs"]
    net.module.seen.clear()
    out = gae(value_network=net)(data.copy())
    assert net.module.seen == [(4, 12, 3)]
    assert_same(two_passes, out, (*OUTPUTS, "state_value"))
    # Stored values need no network, and the entry may have any name and one axis less.
    data["state_value"] = two_passes["state_value"]
    data["next", "critic", "final"] = data["next"].pop("bootstrap_value").squeeze(-1)
    module = gae()
    module.set_keys(bootstrap=("critic", "final"))
    assert_same(two_passes, module(data))


@pytest.mark.parametrize("with_valid", [False, True])
def test_single_pass_equals_two(with_valid):
    net = value_net()
    for length in (1, 2, 9, 16):
        data = rollout(5, length)
        if with_valid:
            data["valid"] = torch.rand(5, length, 1) < 0.8
        two_passes = gae(value_network=net)(data.copy())
        needed = data["next", "done"].clone()
        needed[:, -1] = True
        if with_valid:
            needed[:, :-1] |= ~data["valid"][:, 1:]
            needed &= data["valid"]
        needed = int((needed & ~data["next", "terminated"]).sum())
        for options, rows in (({"single_pass": True}, needed), ({"bootstrap_budget": 64}, 64)):
            net.module.seen.clear()
            out = gae(value_network=net, **options)(data.copy())
            assert net.module.seen == [(5, length, 3), *([(rows, 3)] if rows else [])]
            assert_same(two_passes, out, (*OUTPUTS, "state_value"))
        assert out["shifted_valid"].all()


def test_single_pass_with_several_columns_and_chunks():
    net = value_net(out_features=3)
    data = rollout(6, 4, 5, time_dim=1, features=(3,))
    expected = gae(value_network=net, time_dim=1)(data.copy())
    module = GAE(
        **COEFFICIENTS, value_network=net, time_dim=1, single_pass=True, num_chunks=3, value_chunk_dim=2
    )
    assert_same(expected, module(data))


def test_budget_that_runs_out():
    net = value_net()
    data = rollout(4, 12, rate=0.4)
    full = gae(value_network=net)(data.copy())
    needed = data["next", "truncated"].squeeze(-1).clone()
    needed[:, -1] |= ~data["next", "terminated"].squeeze(-1)[:, -1]
    out = gae(value_network=net, bootstrap_budget=5)(data.copy())
    valid = out["shifted_valid"]
    assert not (~valid & ~needed).any() and int((needed & valid).sum()) == 5
    # The rows left out are no transitions any more; all others see the next values of two passes.
    full["valid"] = valid
    assert_same(gae()(full.copy()), out)
    assert not out["advantage"][~valid].any()


def test_single_pass_reads_no_budget_of_an_earlier_call():
    net = value_net()
    data = rollout(4, 12, rate=0.4)
    expected = gae(value_network=net, single_pass=True)(data.copy())
    short = gae(value_network=net, bootstrap_budget=1)(data)
    assert not short["shifted_valid"].all()
    again = gae(value_network=net, single_pass=True)(short.exclude("state_value", ("next", "state_value")))
    assert_same(expected, again)


def test_single_pass_with_functional_parameters():
    net = value_net()
    other: Any = TensorDict.from_module(value_net())
    data = rollout(3, 7)
    expected = gae(value_network=net, deactivate_vmap=True)(data.copy(), params=other)
    module = gae(value_network=net, single_pass=True)
    assert_same(expected, module(data.copy(), params=other))
    with pytest.raises(ValueError, match="target_params"):
        module(data, params=other, target_params=other.clone())


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_single_pass_of_a_recurrent_network(kind):
    """Each next observation is valued at the end of its own episode, as if run there alone."""
    net = recurrent_value_net(kind)
    memory, head = getattr(net[0], kind), net[1].module
    data = with_hidden_state(rollout(3, 10, rate=0.3))
    expected = torch.zeros(3, 10, 1)
    for env in range(3):
        start = 0
        for t in range(10):
            sequence = torch.cat([data["obs"][env, start : t + 1], data["next", "obs"][env, t : t + 1]])
            expected[env, t] = head(memory(sequence.unsqueeze(0))[0][0, -1])
            start = t + 1 if data["next", "done"][env, t] else start
    read = ~data["next", "terminated"]
    with set_recurrent_mode(True):
        for options in ({"single_pass": True}, {"bootstrap_budget": 10}):
            out = gae(value_network=net, **options)(data.copy())
            assert_close(out["next", "state_value"][read], expected[read])
        # One sequence has room for one inserted step: the others' rows are unchanged.
        short = gae(value_network=net, bootstrap_budget=1)(data.copy())
    valid = short["shifted_valid"]
    assert not valid.all()
    out["valid"] = valid
    plain = gae()
    assert_same(plain(out.exclude("shifted_valid")), short)


def test_single_pass_options_are_checked():
    for options in ({"single_pass": True}, {"bootstrap_budget": 4}):
        with pytest.raises(ValueError, match="shifted"):
            gae(value_network=value_net(), shifted=True, **options)
    with pytest.raises(ValueError, match="bootstrap_budget"):
        gae(bootstrap_budget=0)


def test_missing_entries_are_named():
    module = gae()
    data = rollout(2, 4, values=True)
    for key, error in (
        ("state_value", ValueError),
        (("next", "state_value"), ValueError),
        (("next", "reward"), KeyError),
        ("next", KeyError),
    ):
        with pytest.raises(error, match=key if isinstance(key, str) else f"{key[0]}.*{key[1]}"):
            module(data.exclude(key))
    with pytest.raises(KeyError, match=r"next.*done"):
        module(data.exclude(("next", "done"), ("next", "terminated")))
    with pytest.raises(KeyError, match="obs"):
        gae(value_network=value_net())(rollout(2, 4).exclude(("next", "obs")))
    with pytest.raises(RuntimeError, match="at least one dimension"):
        module(data[0, 0])


@pytest.mark.parametrize("done_features", [(1,), (1, 1), (3, 1)])
def test_multi_agent(done_features):
    """Team signals without an agent axis, with one of size 1, or per agent."""
    data = rollout(2, 9, features=done_features)
    data["state_value"], data["next", "state_value"] = torch.randn(2, 2, 9, 3, 1)
    out = gae(MultiAgentGAE)(data.copy())
    spread = data.copy()
    for name in ("reward", "done", "terminated"):
        signal = data["next", name]
        signal = signal.unsqueeze(-2) if signal.ndim == 3 else signal
        spread["next", name] = signal.expand(2, 9, 3, 1)
    for average_gae in (False, True):
        expected, actual = both(spread, "MultiAgentGAE", average_gae=average_gae)
        assert_same(expected, actual)
        if average_gae:
            out = gae(MultiAgentGAE, average_gae=True)(data.copy())
        assert_same(expected, out)
    if done_features == (1,):
        data["task"] = torch.arange(2).view(2, 1).expand(2, 9)
        for options in ({}, {"average_gae": True, "group_key": "task"}, {"auto_reset_env": True}):
            assert_same(*both(data, "MultiAgentGAE", **options))


def test_multi_agent_with_dead_agents():
    data = rollout(2, 9, features=(1,))
    data["state_value"], data["next", "state_value"] = torch.randn(2, 2, 9, 3, 1)
    data["valid"] = torch.rand(2, 9, 3) < 0.6
    module = gae(MultiAgentGAE)
    plain = module(data.copy())["advantage"]
    module.average_gae = True
    out = module(data)["advantage"]
    for agent in range(3):
        rows = data["valid"][..., agent]
        chosen = plain[..., agent, 0][rows]
        assert_close(out[..., agent, 0][rows], (chosen - chosen.mean()) / chosen.std())
        assert not out[..., agent, 0][~rows].any()


def test_multi_agent_steps_and_agent_dim():
    data = rollout(2, 9, features=(1,))
    data["steps_to_next_obs"] = torch.randint(1, 4, (2, 9, 1))
    data["state_value"], data["next", "state_value"] = torch.randn(2, 2, 9, 3, 1)
    out = gae(MultiAgentGAE)(data.copy())
    one = data.copy()
    one["state_value"], one["next", "state_value"] = (
        x[..., 1, :] for x in (data["state_value"], data["next", "state_value"])
    )
    assert_close(out["advantage"][..., 1, :], gae()(one)["advantage"])
    assert_same(out, gae(MultiAgentGAE, agent_dim=2)(data))


def test_pickle_deepcopy_and_torchrl_state():
    data = rollout(3, 6)
    module = gae(value_network=value_net(), single_pass=True)
    module.set_keys(valid="mask", advantage="a")
    expected = module(data.copy())
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert twin.tensor_keys == module.tensor_keys
        assert_close(twin(data.copy())["a"], expected["a"])
    theirs = gae(torchrl_value.GAE, gamma=0.5, lmbda=0.25)
    assert list(module.state_dict()) == list(theirs.state_dict())
    buffer = io.BytesIO()
    torch.save(theirs.state_dict(), buffer)
    buffer.seek(0)
    module.load_state_dict(torch.load(buffer))
    assert module.gamma == 0.5 and module.lmbda == 0.25


def test_lazy_stacks():
    data = rollout(3, 8)
    stacked = lazy_stack([row.clone() for row in data.unbind(0)])
    for options in ({}, {"single_pass": True}, {"shifted": True}):
        module = gae(value_network=value_net(), **options)
        assert_same(module(data.copy()), module(stacked))


def test_inputs_are_left_alone():
    data = rollout(3, 8)
    data["next", "obs"][0, -1] = float("nan")
    before = data.clone()
    for options in ({}, {"single_pass": True}, {"shifted": True}, {"auto_reset_env": True}):
        out = gae(value_network=value_net(), **options)(data.copy())
        assert "state_value" in out and ("next", "state_value") in out
        assert_close(data.to_dict(), before.to_dict(), equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"shifted": True}, {"bootstrap_budget": 9}, {"average_gae": True}, {"auto_reset_env": True}],
)
@pytest.mark.parametrize("network", [False, True])
def test_no_synchronisation(network, options):
    data = rollout(3, 8, values=not network)
    data["next", "obs"][0, -1] = float("nan")
    data["valid"] = torch.rand(3, 8, 1) < 0.8
    module = gae(value_network=value_net() if network else None, **options)
    with ForbidSync():
        module(data)
    with pytest.raises(AssertionError, match="waits for the device"), ForbidSync():
        torch.ones(()).item()


# tensordict reads a setting of torch's that is deprecated.
@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"bootstrap_budget": 9}, {"average_gae": True}])
def test_inside_a_compiled_step(options):
    data = rollout(3, 8)
    module = gae(value_network=value_net(), **options)
    expected = module(data.copy())
    torch._dynamo.reset()
    step = torch.compile(module, backend="aot_eager")
    assert_same(expected, step(data.copy()))


def test_fullgraph_compilation_on_stored_values():
    data = rollout(3, 8, values=True)
    module = gae()
    torch._dynamo.reset()
    step = torch.compile(lambda data: module(data)["advantage"], backend="aot_eager", fullgraph=True)
    assert_close(step(data.copy()), module(data)["advantage"])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"shifted": True}, {"bootstrap_budget": 9}, {"average_gae": True}])
def test_cuda_graph_and_sync_mode(options):
    from tensordict.nn import CudaGraphModule

    module = gae(value_network=value_net().cuda(), **options)
    data = rollout(3, 8).cuda()
    expected = module(data.copy())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(data.copy())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = CudaGraphModule(module)
    for _ in range(5):
        assert_same(expected, graph(data.copy()))


def test_first_iteration_of_every_estimator_agrees():
    """One rollout of CartPole through ours, TorchRL's loop and TorchRL's vectorised path."""

    def make():
        return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=20))

    env = SerialEnv(2, make)
    env.set_seed(0)
    data = env.rollout(64, break_when_any_done=False)
    env.close()
    assert data["next", "terminated"].any() and data["next", "truncated"].any()
    net = value_net()
    net.in_keys[0] = "observation"
    net.module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    arms = [
        GAE(gamma=0.99, lmbda=0.95, value_network=net),
        GAE(gamma=0.99, lmbda=0.95, value_network=net, single_pass=True),
        torchrl_value.GAE(gamma=0.99, lmbda=0.95, value_network=net),
        torchrl_value.GAE(gamma=0.99, lmbda=0.95, value_network=net, vectorized=True),
    ]
    results = [arm(data.copy()) for arm in arms]
    for result in results[1:]:
        assert_same(results[0], result)
