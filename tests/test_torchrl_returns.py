"""TD(lambda) and TD(1) against TorchRL's modules, the float64 oracle, and what they add."""

import copy
import pickle
from typing import Any

import pytest
import torch
from rollouts import ForbidSync, assert_close, rollout, value_net
from tensordict import TensorDict
from torchrl.objectives import value as torchrl_value

from rl_triton import reference
from rl_triton.integrations.torchrl import TD1Estimator, TDLambdaEstimator

OUTPUTS = ("advantage", "value_target")
ESTIMATORS: dict[str, Any] = {
    "TDLambdaEstimator": (TDLambdaEstimator, {"gamma": 0.97, "lmbda": 0.9}),
    "TD1Estimator": (TD1Estimator, {"gamma": 0.97}),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=ESTIMATORS)
def name(request):
    return request.param


def make(name: str, theirs: bool = False, **options: Any) -> Any:
    cls, coefficients = ESTIMATORS[name]
    cls = getattr(torchrl_value, name) if theirs else cls
    return cls(**coefficients | {"value_network": None} | options)


def assert_same(expected, actual, keys=OUTPUTS):
    for key in keys:
        assert_close(actual[key], expected[key])


def oracle(name: str, data: Any, next_values: Any = None, **options: Any) -> Any:
    step = data["next"]
    next_values = step["state_value"] if next_values is None else next_values
    arguments: dict[str, Any] = {"gamma": 0.97, "time_dim": data.ndim - 1} | options
    rows = step["reward"], step["terminated"], step["done"]
    if name == "TD1Estimator":
        return reference.compute_discounted_returns(*rows, bootstrap_values=next_values, **arguments)
    arguments.setdefault("lambda_", 0.9)
    return reference.compute_lambda_returns(rows[0], next_values, *rows[1:], **arguments)


SHAPES = [((1,), -1), ((7,), 0), ((3, 1), -1), ((4, 13), -1), ((11, 3), 0), ((2, 3, 9), 2), ((2, 8, 3), -2)]


@pytest.mark.parametrize("features", [(1,), (3,)])
@pytest.mark.parametrize(("batch", "time_dim"), SHAPES)
def test_stored_values_equal_torchrl(name, batch, time_dim, features):
    data = rollout(*batch, time_dim=time_dim, features=features, values=True)
    expected = make(name, theirs=True, time_dim=time_dim)(data.copy())
    assert_same(expected, make(name, time_dim=time_dim)(data.copy()))
    named = rollout(*batch, time_dim=time_dim, features=features, values=True, named=True)
    assert_same(make(name, theirs=True)(named.copy()), make(name)(named.copy()))
    assert_same(make(name)(named.copy()), make(name)(named, time_dim=time_dim))


def test_torchrl_loop(name):
    if name == "TDLambdaEstimator":
        data = rollout(3, 9, values=True)
        assert_same(make(name, theirs=True, vectorized=False)(data.copy()), make(name)(data))


@pytest.mark.parametrize("options", [{}, {"shifted": True}, {"shifted": True, "shifted_budget": 3}])
@pytest.mark.parametrize("average_rewards", [False, True])
def test_network_equals_torchrl(name, options, average_rewards):
    for length in (2, 6, 17):
        data = rollout(4, length, named=True)
        data["next", "obs"] += 0.1
        options = options | {"value_network": value_net(), "average_rewards": average_rewards}
        expected, actual = make(name, theirs=True, **options)(data.copy()), make(name, **options)(data.copy())
        assert set(actual.keys(True, True)) == set(expected.keys(True, True))
        assert_same(expected, actual, (*OUTPUTS, "state_value", ("next", "state_value")))
        if not options.get("shifted"):
            assert_close(actual["next", "reward"], expected["next", "reward"])


def test_gradients_equal_torchrl(name):
    grads = []
    for theirs in (True, False):
        torch.manual_seed(1)
        data = rollout(3, 7, values=True)
        leaves = [data["state_value"], data["next", "state_value"], data["next", "reward"]]
        for leaf in leaves:
            leaf.requires_grad_()
        data = make(name, theirs=theirs, differentiable=True)(data)
        weight = torch.randn(2, 3, 7, 1)
        (weight[0] * data["advantage"] + weight[1] * data["value_target"]).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert_close(grads[1], grads[0])
    out = make(name)(data)
    assert not any(out[key].requires_grad for key in OUTPUTS)


def test_fp64_equals_the_oracle(name):
    data = rollout(4, 50, dtype=torch.float64, values=True)
    module = make(name)
    # TorchRL's constructor makes the coefficients fp32.
    module.double()
    gamma, lambda_ = module.gamma, getattr(module, "lmbda", None)
    expected = oracle(name, data, gamma=gamma, **{} if lambda_ is None else {"lambda_": lambda_})
    out = module(data)
    assert_close(out["value_target"], expected, rtol=1e-12, atol=1e-12)
    assert_close(out["advantage"], expected - data["state_value"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"shifted": True}, {"single_pass": True}])
def test_flags_of_any_dtype(name, dtype, options):
    data = rollout(4, 12)
    module = make(name, value_network=value_net(), **options)
    expected = module(data.copy())
    for flag in ("done", "terminated"):
        data["next", flag] = data["next", flag].to(dtype)
    assert_same(expected, module(data))


def test_nothing_behind_a_terminated_row_is_read(name):
    data = rollout(4, 20, values=True)
    expected = make(name)(data.copy())
    poison = torch.where(data["next", "terminated"], float("nan"), data["next", "state_value"])
    data["next", "state_value"] = poison
    assert_same(expected, make(name)(data.copy()))
    assert_close(make(name).value_estimate(data), expected["value_target"])


def test_coefficients():
    data = rollout(3, 9, values=True)
    for gamma, lmbda in ((0, 0.9), (0.9, 0), (1, 1), (1e-8, 1e-8)):
        expected = oracle("TDLambdaEstimator", data, gamma=gamma, lambda_=lmbda)
        out = TDLambdaEstimator(gamma=gamma, lmbda=lmbda, value_network=None)(data.copy())
        assert_close(out["value_target"].double(), expected.double())
    rows = {"gamma": 0.8 + 0.2 * torch.rand(3, 9, 1), "lmbda": 0.8 + 0.2 * torch.rand(3, 9, 1)}
    results = []
    for theirs in (True, False):
        module = make("TDLambdaEstimator", theirs=theirs, vectorized=False)
        for key, value in rows.items():
            setattr(module, key, value)
        results.append(module(data.copy()))
    assert_same(*results)


def test_steps_to_next_obs_equal_torchrl(name):
    data = rollout(3, 9, values=True)
    data["steps_to_next_obs"] = torch.randint(1, 4, (3, 9, 1))
    assert_same(make(name, theirs=True)(data.copy()), make(name)(data))


@pytest.mark.parametrize("group_key", [None, "task"])
def test_average_rewards_of_valid_rows(name, group_key):
    data = rollout(4, 12, values=True)
    data["task"] = torch.tensor([[0], [0], [1], [1]]).expand(4, 12)
    options = {"average_rewards": True, "group_key": group_key}
    assert_same(make(name, theirs=True, **options)(data.copy()), make(name, **options)(data.copy()))
    data["valid"] = valid = torch.rand(4, 12) < 0.6
    rewards = data["next", "reward"].clone()
    rewards[~valid] = float("nan")
    data["next", "reward"] = torch.where(valid.unsqueeze(-1), rewards, 0.0)
    out = make(name, **options)(data.copy())
    for task in (0, 1) if group_key else (None,):
        rows = valid if task is None else valid & (data["task"] == task)
        expected = (rewards[rows] - rewards[rows].mean()) / rewards[rows].std()
        assert_close(out["next", "reward"][rows], expected)
    for key in OUTPUTS:
        assert not out[key][~valid].any()
    expected = oracle(name, out, valid=valid.unsqueeze(-1))
    assert_close(out["value_target"].double(), expected.double())


def test_bootstrap_entry_needs_the_root_alone(name):
    net = value_net()
    data = rollout(4, 12)
    two_passes = make(name, value_network=net)(data.copy())
    needed = data["next", "truncated"].clone()
    needed[:, -1] = True
    data["next", "bootstrap_value"] = torch.where(needed, two_passes["next", "state_value"], float("nan"))
    del data["next", "obs"]
    net.module.seen.clear()
    module = make(name, value_network=net)
    assert_same(two_passes, module(data.copy()))
    assert net.module.seen == [(4, 12, 3)]
    assert_close(module.value_estimate(data.copy()), two_passes["value_target"])
    data["state_value"] = two_passes["state_value"]
    assert_same(two_passes, make(name)(data))


def test_single_pass_equals_two(name):
    net = value_net()
    for length in (1, 9, 16):
        data = rollout(5, length)
        data["valid"] = torch.rand(5, length, 1) < 0.8
        two_passes = make(name, value_network=net)(data.copy())
        options: list[dict[str, Any]] = [{"single_pass": True}, {"bootstrap_budget": 64}]
        for option in options:
            assert_same(two_passes, make(name, value_network=net, **option)(data.copy()))


def test_value_estimate_equals_torchrl(name):
    net = value_net()
    params = TensorDict.from_module(value_net())
    data = rollout(4, 9)
    next_value = torch.randn(4, 9, 1)
    theirs, ours = make(name, theirs=True, value_network=net), make(name, value_network=net)
    cases: list[dict[str, Any]] = [{}, {"target_params": params}, {"next_value": next_value}]
    for options in cases:
        expected = theirs.value_estimate(data.copy(), **options)
        assert_close(ours.value_estimate(data.copy(), **options), expected)
    stored = rollout(9, 4, time_dim=0, values=True)
    expected = make(name, theirs=True).value_estimate(stored.copy(), time_dim=0)
    assert_close(make(name).value_estimate(stored, time_dim=-2), expected)


def test_missing_entries_are_named(name):
    data = rollout(2, 4, values=True)
    module = make(name)
    for key, error in (
        ("state_value", ValueError),
        (("next", "state_value"), ValueError),
        (("next", "reward"), KeyError),
    ):
        with pytest.raises(error, match=key if isinstance(key, str) else f"{key[0]}.*{key[1]}"):
            module(data.exclude(key))
    with pytest.raises(ValueError, match=r"next.*state_value"):
        module.value_estimate(data.exclude(("next", "state_value")))
    with pytest.raises(RuntimeError, match=r"reward \[2, 4, 1\], next_value \[2, 4\]"):
        module.value_estimate(data, next_value=torch.zeros(2, 4))


def test_pickle_deepcopy_and_state(name):
    data = rollout(3, 6)
    module = make(name, value_network=value_net())
    expected = module(data.copy())
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert_same(expected, twin(data.copy()))
    theirs = make(name, theirs=True, gamma=0.5)
    assert list(module.state_dict()) == list(theirs.state_dict())
    module.load_state_dict(theirs.state_dict())
    assert module.gamma == 0.5


@pytest.mark.parametrize(
    "options", [{}, {"shifted": True}, {"bootstrap_budget": 9}, {"average_rewards": True}]
)
def test_no_synchronisation(name, options):
    data = rollout(3, 8)
    data["valid"] = torch.rand(3, 8, 1) < 0.8
    module = make(name, value_network=value_net(), **options)
    with ForbidSync():
        module(data)


def test_fullgraph_compilation(name):
    data = rollout(3, 8, values=True)
    module = make(name)
    torch._dynamo.reset()
    step = torch.compile(lambda data: module(data)["advantage"], backend="aot_eager", fullgraph=True)
    assert_close(step(data.copy()), module(data)["advantage"])
