"""What users of TorchRL's estimators rely on around the recursion: calls, keys, networks, chunks, losses."""

from typing import Any

import pytest
import torch
from rollouts import OBS, assert_close, recurrent_value_net, rollout, value_net, with_hidden_state
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import (
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import A2CLoss, ClipPPOLoss, ValueEstimators
from torchrl.objectives import value as torchrl_value

import rl_triton.integrations.torchrl as estimators
from rl_triton.integrations.torchrl import GAE, MultiAgentGAE, TD1Estimator, TDLambdaEstimator

OUTPUTS = ("advantage", "value_target")
COEFFICIENTS: dict[type, dict[str, Any]] = {
    GAE: {"gamma": 0.97, "lmbda": 0.9},
    MultiAgentGAE: {"gamma": 0.97, "lmbda": 0.9},
    TDLambdaEstimator: {"gamma": 0.97, "lmbda": 0.9},
    TD1Estimator: {"gamma": 0.97},
}
SINGLE = [GAE, TDLambdaEstimator, TD1Estimator]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=SINGLE, ids=lambda cls: cls.__name__)
def cls(request):
    return request.param


def make(cls: Any, value_network: Any = None, **options: Any) -> Any:
    return cls(**COEFFICIENTS[cls] | {"value_network": value_network} | options)


def theirs(cls):
    return getattr(torchrl_value, cls.__name__)


def assert_same(expected, actual, keys=OUTPUTS):
    for key in keys:
        assert_close(actual[key], expected[key])


# Chunked value calls.

CHUNKS = [
    {"value_chunk_size": 2},
    {"num_chunks": 3},
    {"num_chunk": 2},
    {"value_chunk_size": 4, "value_chunk_dim": 1},
]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("deactivate_vmap", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_change_no_number(cls, chunks, deactivate_vmap, shifted):
    net, options = value_net(), {"shifted": shifted, "deactivate_vmap": deactivate_vmap}
    data = rollout(6, 9)
    expected = make(cls, net, **options)(data.copy())
    assert_same(expected, make(cls, net, **options, **chunks)(data), (*OUTPUTS, "state_value"))


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("deactivate_vmap", [False, True])
def test_chunks_of_functional_calls(chunks, deactivate_vmap):
    net = value_net()
    params, target_params = (TensorDict.from_module(value_net()) for _ in range(2))
    data = rollout(6, 9)
    plain, chunked = make(GAE, net, deactivate_vmap=deactivate_vmap), make(GAE, net, **chunks)
    for options in ({"params": params}, {"params": params, "target_params": target_params}):
        expected = theirs(GAE)(**COEFFICIENTS[GAE], value_network=net)(data.copy(), **options)
        for module in (plain, chunked):
            assert_same(expected, module(data.copy(), **options))
            assert_close(module.value_estimate(data.copy(), **options), expected["value_target"])
    with pytest.raises(ValueError, match="params"):
        plain(data, target_params=target_params)


def test_the_requested_number_of_chunks_is_made(cls):
    net = value_net()
    make(cls, net, num_chunks=3)(rollout(7, 4))
    assert [shape[0] for shape in net.module.seen] == [3, 2, 2] * 2
    net.module.seen.clear()
    make(cls, net, value_chunk_size=3, value_chunk_dim=-1, shifted=True, shifted_budget=2)(rollout(7, 4))
    assert [shape[1] for shape in net.module.seen] == [3, 3]


def test_chunk_options_are_checked(cls):
    with pytest.raises(ValueError, match="cannot both be set"):
        make(cls, value_net(), num_chunks=2, value_chunk_size=2)
    with pytest.raises(ValueError, match="different values"):
        make(cls, value_net(), num_chunks=2, num_chunk=3)
    with pytest.raises(ValueError, match="out of bounds"):
        make(cls, value_net(), num_chunks=2, value_chunk_dim=2)(rollout(6, 4))
    for options in ({"num_chunks": 0}, {"value_chunk_size": -1}, {"shifted_budget": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(cls, value_net(), **options)


# Next observations that are NaN or missing.


@pytest.mark.parametrize(
    "options", [{}, {"shifted": True}, {"shifted": True, "shifted_budget": 4}, {"single_pass": True}]
)
def test_nan_next_observations_at_trajectory_ends(cls, options):
    net = value_net()
    data = rollout(4, 10)
    ends = data["next", "done"].clone()
    ends[:, -1] = True
    substitute = data.copy().set(("next", "obs"), torch.where(ends, data["obs"], data["next", "obs"]))
    data["next", "obs"] = torch.where(ends, float("nan"), data["next", "obs"])
    out = make(cls, net, **options)(data.copy())
    assert_same(make(cls, net, **options)(substitute), out, (*OUTPUTS, "state_value"))
    assert all(out[key].isfinite().all() for key in OUTPUTS)
    assert make(cls, net).value_estimate(data).isfinite().all()


def test_missing_next_observations_with_shifted(cls):
    data = rollout(4, 10, named=True).exclude(("next", "obs"))
    net = value_net()
    expected = theirs(cls)(**COEFFICIENTS[cls], value_network=net, shifted=True)(data.copy())
    assert_same(expected, make(cls, net, shifted=True)(data), (*OUTPUTS, "shifted_valid"))


# The shifted pass.


def test_shifted_must_be_a_bool(cls):
    for shifted in (1, "budget", None):
        with pytest.raises(ValueError, match="shifted"):
            make(cls, value_net(), shifted=shifted)


RESETS = {
    "none": ([], []),
    "one": ([(0, 3)], []),
    "two in a row": ([(0, 3), (0, 4)], []),
    "at the ends": ([(0, 0), (1, 7)], []),
    "terminal": ([], [(0, 2), (0, 5), (1, 1)]),
    "mixed": ([(0, 2), (1, 4), (1, 6)], [(0, 4), (1, 1), (2, 3)]),
}


@pytest.mark.parametrize("budget", [1, 2, 3])
@pytest.mark.parametrize("resets", RESETS)
def test_shifted_keeps_what_the_budget_holds(cls, resets, budget):
    net = value_net()
    truncated, terminated = RESETS[resets]
    data = rollout(3, 8, rate=0.0)
    for rows, names in ((truncated, ("done", "truncated")), (terminated, ("done", "terminated"))):
        for env, t in rows:
            for name in names:
                data["next", name][env, t] = True
            data["next", "obs"][env, t].normal_()
    out = make(cls, net, shifted=True, shifted_budget=budget)(data.copy())
    valid = out["shifted_valid"]
    # Every internal truncation takes a step from the end of its row; the boundary takes one more.
    for env in range(3):
        inner = sum(row == env and t < 7 for row, t in truncated)
        assert valid[env].sum() >= 8 - max(0, inner + 1 - budget)
        assert valid[env].all() or inner >= budget
    two_passes = make(cls, net)(data.copy())
    for key in ("state_value", ("next", "state_value")):
        read = valid.unsqueeze(-1) & (True if key == "state_value" else ~data["next", "terminated"])
        assert_close(out[key][read], two_passes[key][read])
    assert all(not out[key][~valid].any() for key in OUTPUTS)
    if valid.all():
        assert_same(two_passes, out)
    expected = theirs(cls)(**COEFFICIENTS[cls], value_network=net, shifted=True, shifted_budget=budget)(data)
    assert_same(expected, out, (*OUTPUTS, "shifted_valid"))


def test_shifted_accepts_odd_strides_and_is_recomputed(cls):
    net = value_net()
    module = make(cls, net, shifted=True)
    wide = rollout(8, 10, rate=0.3)
    data = wide[::2]
    dense = module(data.clone())
    assert_same(dense, module(data.copy()), (*OUTPUTS, "shifted_valid"))
    turned = module(data.clone().transpose(0, 1).contiguous().transpose(0, 1))
    assert_same(dense, turned, (*OUTPUTS, "shifted_valid"))
    assert not dense["shifted_valid"].all()
    dense["next", "done"] = torch.zeros_like(dense["next", "done"])
    assert module(dense)["shifted_valid"].all()


def test_shifted_averages_count_valid_entries():
    net = value_net()
    data = rollout(4, 12, rate=0.3)
    plain = make(GAE, net, shifted=True)(data.copy())
    out = make(GAE, net, shifted=True, average_gae=True)(data)
    valid = out["shifted_valid"]
    assert not valid.all()
    chosen = plain["advantage"][valid]
    expected = (chosen - chosen.mean()) / chosen.std(unbiased=False)
    assert_close(out["advantage"][valid], expected)
    assert not out["advantage"][~valid].any()


@pytest.mark.parametrize("budget", [{"shifted": True}, {"bootstrap_budget": 6}])
def test_losses_count_valid_entries(budget):
    actor, critic = actor_and_critic()
    loss = ClipPPOLoss(actor, critic, critic_coeff=1.0, loss_critic_type="l2")
    data = GAE(**COEFFICIENTS[GAE], value_network=critic, **budget)(acted(actor, rollout(4, 12, rate=0.3)))
    valid = data["shifted_valid"]
    assert not valid.all()
    expected = (critic(data.clone())["state_value"] - data["value_target"]).square()[valid].mean()
    assert_close(loss(data)["loss_critic"], expected)


# Recurrent networks.


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("batch", "budget"), [((3, 10), 10), ((4, 64), 64)])
def test_recurrent_networks(kind, batch, budget):
    net = recurrent_value_net(kind)
    data = with_hidden_state(rollout(*batch, rate=0.0))
    # Episodes of several steps: TorchRL's passes lose the state of one that ends where it begins.
    for t in range(3, batch[1] - 3, 5):
        data["next", "done"][0, t] = data["next", "truncated"][0, t] = True
        data["next", "obs"][0, t].normal_()
        data["is_init"][0, t + 1] = True
    options = {"shifted": True, "shifted_budget": budget}
    with set_recurrent_mode(True):
        out = make(GAE, net, **options)(data.copy())
        assert_same(theirs(GAE)(**COEFFICIENTS[GAE], value_network=net, **options)(data.copy()), out)
        assert_same(out, make(GAE, net, single_pass=True)(data.copy()))
        expected = theirs(GAE)(**COEFFICIENTS[GAE], value_network=net, deactivate_vmap=True)(data.copy())
        for deactivate_vmap in (False, True):
            assert_same(expected, make(GAE, net, deactivate_vmap=deactivate_vmap)(data.copy()))


def test_random_layers_need_no_care(cls):
    net = value_net()
    net.module = nn.Sequential(nn.Linear(OBS, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    module = make(cls, net)
    assert module(rollout(3, 5))["advantage"].isfinite().all()
    assert module.vmap_randomness == "different"
    module.set_vmap_randomness("error")
    assert module.vmap_randomness == "error"
    assert make(cls, value_net()).vmap_randomness == "error"


# Columns and trajectories.


@pytest.mark.parametrize("batch", [(7,), (3, 7), (2, 3, 7)])
def test_columns_are_computed_one_by_one(cls, batch):
    data = rollout(*batch, features=(3,), values=True)
    out = make(cls)(data.copy())
    for column in range(3):
        one = data.apply(lambda x, i=column: x[..., i : i + 1], filter_empty=False)
        for key in OUTPUTS:
            assert_close(out[key][..., column : column + 1], make(cls)(one.copy())[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_successive_trajectories_equal_each_alone(cls, dtype):
    parts = [rollout(2, length, dtype=dtype, values=True, rate=0.0) for length in (3, 1, 5)]
    for part, end in zip(parts, ("terminated", "truncated", "terminated"), strict=True):
        for name in ("done", end):
            part["next", name][:, -1] = True
    whole = make(cls)(torch.cat(parts, 1))
    alone = torch.cat([make(cls)(part) for part in parts], 1)
    assert whole["advantage"].dtype == dtype
    assert_same(alone, whole)


# Calls with tensors.


@pytest.mark.parametrize("shifted", [False, True])
def test_dispatch(cls, shifted):
    module = make(cls, value_net(), shifted=shifted)
    data = rollout(3, 7)
    inputs = {"_".join(key) if isinstance(key, tuple) else key: data[key] for key in module.in_keys}
    assert set(inputs) == {"obs", "next_obs", "next_reward", "next_done", "next_terminated"}
    expected = module(data.copy())
    for outputs in (module(**inputs), module(*inputs.values())):
        for key, output in zip(OUTPUTS, outputs, strict=True):
            assert_close(output, expected[key])
    with pytest.raises(TypeError):
        module(**inputs, unknown=data["obs"])


def test_out_keys_and_group_key(cls):
    module = make(cls, value_net(), group_key="task")
    assert module.out_keys == list(OUTPUTS)
    assert module.in_keys[-1] == "task"
    assert (
        module.in_keys
        == theirs(cls)(**COEFFICIENTS[cls], value_network=module.value_network, group_key="task").in_keys
    )
    normalised = {"average_gae": True} if cls is GAE else {"average_rewards": True}
    with pytest.raises(KeyError, match="task"):
        make(cls, value_net(), group_key="task", **normalised)(rollout(2, 4))


# Gradients.


@pytest.mark.parametrize("differentiable", [True, False])
def test_differentiable(cls, differentiable):
    net = value_net()
    scale: Any = torch.ones((), requires_grad=True)
    data = rollout(3, 6)
    data["next", "reward"] = data["next", "reward"] * scale
    out = make(cls, net, differentiable=differentiable)(data)
    assert out["advantage"].requires_grad == differentiable
    if differentiable:
        out["advantage"].sum().backward()
        assert scale.grad.isfinite() and scale.grad != 0
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())


# Values that exist.


@pytest.mark.parametrize("skip_existing", [True, False, None])
@pytest.mark.parametrize("options", [{}, {"shifted": True}, {"single_pass": True}])
def test_skip_existing(cls, skip_existing, options):
    def constant(obs):
        return torch.zeros_like(obs[..., :1])

    net = TensorDictModule(constant, in_keys=["obs"], out_keys=["state_value"])
    data = rollout(3, 6, values=True)
    data["state_value"] = data["next", "state_value"] = torch.ones(3, 6, 1)
    out = make(cls, net, skip_existing=skip_existing, **options)(data.copy())
    assert (out["state_value"] == (1.0 if skip_existing else 0.0)).all()
    absent = make(cls, net, skip_existing=skip_existing, **options)(
        data.exclude("state_value", ("next", "state_value"))
    )
    assert (absent["state_value"] == 0).all()
    stored = make(cls, None, skip_existing=skip_existing)(data)
    assert (stored["state_value"] == 1).all()


# Keys.

KEYS = {
    "advantage": "advantage",
    "value_target": "value_target",
    "value": "state_value",
    "reward": "reward",
    "done": "done",
    "terminated": "terminated",
    "steps_to_next_obs": "steps_to_next_obs",
    "bootstrap": "bootstrap_value",
    "truncated": "truncated",
    "valid": "valid",
}


def test_default_keys(cls):
    module = make(cls)
    for name, key in KEYS.items():
        assert getattr(module.tensor_keys, name) == key
    assert module.tensor_keys.sample_log_prob in ("sample_log_prob", "action_log_prob")
    assert (module.advantage_key, module.value_key, module.terminated_key) == (
        "advantage",
        "state_value",
        "terminated",
    )


@pytest.mark.parametrize("name", KEYS)
def test_set_keys(cls, name):
    module = make(cls)
    for key in ("flat", ("nested", "key")):
        module.set_keys(**{name: key})
        assert getattr(module.tensor_keys, name) == key
    module.set_keys(**{name: (("nested", "key"), "deep")})
    assert getattr(module.tensor_keys, name) == ("nested", "key", "deep")
    for wrong in (None, 3, {"a"}):
        with pytest.raises(ValueError):
            module.set_keys(**{name: wrong})
    assert getattr(module.tensor_keys, name) == ("nested", "key", "deep")


def test_unknown_keys(cls):
    with pytest.raises(KeyError, match="unknown"):
        make(cls).set_keys(unknown="key")
    with pytest.raises(KeyError, match="other"):
        make(cls, value_net()).set_keys(value="other")
    make(cls, value_net(key="other")).set_keys(value="other")


@pytest.mark.parametrize("name", ["advantage_key", "value_target_key", "value_key"])
def test_constructor_keys_are_deprecated(cls, name):
    with pytest.raises(RuntimeError, match=f"{name}.*deprecated"):
        make(cls, **{name: "key"})


@pytest.mark.parametrize("nested", [False, True])
def test_renamed_entries(cls, nested):
    names = {name: ("group", name) if nested else f"my_{name}" for name in KEYS}
    data = rollout(3, 6, values=True)
    data["valid"] = torch.rand(3, 6, 1) < 0.8
    expected = make(cls)(data.copy())
    moved = TensorDict({}, data.shape)
    moved[names["valid"]], moved[names["value"]] = data["valid"], data["state_value"]
    for name in ("reward", "done", "terminated", "value"):
        key = ("next", *names[name]) if nested else ("next", names[name])
        moved[key] = data["next", KEYS[name]]
    module = make(cls)
    module.set_keys(**names)
    out = module(moved)
    for key in OUTPUTS:
        assert_close(out[names[key]], expected[key])
    assert module.out_keys == [names[key] for key in OUTPUTS]


# Losses, buffers and the namespace.


def actor_and_critic():
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(nn.Linear(OBS, 4), NormalParamExtractor()),
            in_keys=["obs"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
        spec=Bounded(-1, 1, torch.Size([2])),
    )
    return actor, ValueOperator(nn.Linear(OBS, 1), in_keys=["obs"])


def acted(actor, data):
    with torch.no_grad():
        return actor(data)


@pytest.mark.parametrize("name", ["critic_network", "value_network"])
def test_for_loss_finds_the_network(cls, name):
    class Loss:
        pass

    loss, net = Loss(), value_net()
    setattr(loss, name, net)
    assert cls.for_loss(loss, **COEFFICIENTS[cls]).value_network is net
    assert cls.for_loss(loss, **COEFFICIENTS[cls], value_network=None).value_network is None


@pytest.mark.parametrize("loss_class", [ClipPPOLoss, A2CLoss])
def test_losses_take_the_estimator(cls, loss_class):
    actor, critic = actor_and_critic()
    data = acted(actor, rollout(3, 6))
    losses = []
    for estimator in (theirs(cls), cls):
        loss = loss_class(actor, critic)
        loss.make_value_estimator(estimator(**COEFFICIENTS[cls], value_network=critic, differentiable=True))
        torch.manual_seed(1)
        losses.append(loss(data.copy()))
    for key, expected in losses[0].items():
        assert_close(losses[1][key], expected)
    loss.make_value_estimator(cls, **COEFFICIENTS[cls], value_network=critic)
    assert type(loss.value_estimator) is cls
    loss.set_keys(advantage="other")
    assert loss.value_estimator.tensor_keys.advantage == "other"
    kinds = {
        GAE: ValueEstimators.GAE,
        TDLambdaEstimator: ValueEstimators.TDLambda,
        TD1Estimator: ValueEstimators.TD1,
    }
    loss.make_value_estimator(kinds[cls])
    assert type(loss.value_estimator) is theirs(cls)


@pytest.mark.parametrize("options", [{"single_pass": True}, {"bootstrap_budget": 20}])
def test_losses_that_compute_advantages_in_a_single_pass(options):
    actor, critic = actor_and_critic()
    data = acted(actor, rollout(3, 6))
    losses = []
    for option in ({}, options):
        loss: Any = ClipPPOLoss(actor, critic)
        loss.make_value_estimator(GAE, **COEFFICIENTS[GAE], value_network=critic, **option)
        torch.manual_seed(1)
        losses.append(loss(data.copy()))
    assert_close(losses[1]["loss_objective"], losses[0]["loss_objective"])
    assert_close(losses[1]["loss_critic"], losses[0]["loss_critic"])


def test_coefficients_are_buffers_on_the_device_of_the_data(cls):
    module = make(cls)
    assert {name for name, _ in module.named_buffers()} == set(COEFFICIENTS[cls])
    assert all(buffer.dtype == torch.float32 for buffer in module.buffers())
    data = rollout(2, 3, values=True).to("cuda" if torch.cuda.is_available() else "meta")
    assert module(data)["advantage"].device == data.device
    assert all(buffer.device == data["state_value"].device for buffer in module.buffers())
    assert all(buffer.is_meta for buffer in make(cls, device=torch.device("meta")).buffers())


def test_a_star_swap_keeps_every_name():
    for name in torchrl_value.__all__:
        assert name in estimators.__all__ and hasattr(estimators, name)
    for cls, coefficients in COEFFICIENTS.items():
        assert issubclass(cls, getattr(torchrl_value, cls.__name__))
        assert cls(**coefficients, value_network=None).single_pass is False
    for name in ("TD0Estimate", "TD1Estimate", "TDLambdaEstimate"):
        lmbda = {"lmbda": 0.9} if "Lambda" in name else {}
        assert getattr(estimators, name)(gamma=0.9, value_network=None, **lmbda).gamma == torch.tensor(0.9)
    assert torchrl_value.GAE is not GAE
