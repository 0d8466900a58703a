"""The V-trace module: the stored action, where its log-probabilities come from, and TorchRL's conventions."""

import copy
import multiprocessing
import pickle
import warnings
from typing import Any

import pytest
import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import (
    CompositeDistribution,
    CudaGraphModule,
    InteractionType,
    TensorDictModule,
    composite_lp_aggregate,
    set_composite_lp_aggregate,
    set_interaction_type,
)
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl.objectives import A2CLoss
from torchrl.objectives import value as torchrl_value
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from rl_triton.integrations.torchrl.vtrace import VTrace

GAMMA = 0.9
OBS = 3


class Independent1(Independent):
    """A diagonal Gaussian whose log-probability is that of the whole action."""

    def __init__(self, loc, scale):
        super().__init__(Normal(loc, scale), 1)


class Gaussian(nn.Module):
    def __init__(self, size=2):
        super().__init__()
        self.net = nn.Linear(OBS, size)

    def forward(self, obs):
        loc = self.net(obs)
        return loc, torch.ones_like(loc) * 0.7


def critic(in_key: NestedKey = "obs", out_key: NestedKey = "state_value"):
    return TensorDictModule(nn.Linear(OBS, 1), in_keys=[in_key], out_keys=[out_key])


def gaussian_actor(distribution=Independent1, action: NestedKey = "action"):
    params = TensorDictModule(Gaussian(), in_keys=["obs"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        params,
        in_keys=["loc", "scale"],
        out_keys=[action],
        distribution_class=distribution,
        return_log_prob=True,
    )


def categorical_actor(distribution=Categorical, size=3):
    params = TensorDictModule(nn.Linear(OBS, size), in_keys=["obs"], out_keys=["logits"])
    return ProbabilisticActor(
        params,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=distribution,
        return_log_prob=True,
    )


def rollout(batch=(4, 7), action=None, log_prob_key: NestedKey = "action_log_prob") -> Any:
    """Random transitions whose next observation is the next row's, but for the ends of episodes."""
    obs = torch.randn(*batch, OBS)
    done = torch.rand(*batch, 1) < 0.25
    following = torch.cat([obs[..., 1:, :], torch.randn(*batch[:-1], 1, OBS)], -2)
    following = torch.where(done, torch.randn(*batch, OBS), following)
    td = TensorDict(
        {
            "obs": obs,
            "action": torch.randn(*batch, 2) if action is None else action,
            log_prob_key: torch.randn(batch) - 2,
            "next": {
                "obs": following,
                "reward": torch.randn(*batch, 1),
                "done": done,
                "terminated": done & (torch.rand(*batch, 1) < 0.5),
            },
        },
        batch,
    )
    td.names = [None] * (len(batch) - 1) + ["time"]
    return td


def stored_log_prob(actor, td):
    with torch.no_grad():
        return actor.get_dist(td.clone()).log_prob(td["action"])


def expected(td, log_pi, value_net, gamma: Any = GAMMA, log_mu=None, **kwargs):
    """TorchRL's functional with the stored action's log-probability."""
    following = td["next"]
    with torch.no_grad():
        value, next_value = value_net.module(td["obs"]), value_net.module(following["obs"])
    log_mu = td["action_log_prob"] if log_mu is None else log_mu
    return vtrace_advantage_estimate(
        gamma,
        log_pi.view_as(value),
        log_mu.view_as(value),
        value,
        next_value,
        following["reward"],
        following["done"],
        following["terminated"],
        **kwargs,
    )


def assert_written(td, pair, **tolerance):
    advantage, target = pair
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(td["advantage"], advantage, **tolerance)
    torch.testing.assert_close(td["value_target"], target, **tolerance)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Zero(nn.Module):
    def forward(self, obs):
        return torch.zeros(*obs.shape[:-1], 1)


class FixedLogits(nn.Module):
    def forward(self, obs):
        return torch.tensor([0.25, 0.75]).log().expand(*obs.shape[:-1], 2)


ACTIONS = torch.tensor([[0, 1, 0, 1]])
STORED = {
    "index": (Categorical, ACTIONS),
    "index with a trailing axis": (Categorical, ACTIONS.unsqueeze(-1)),
    "one-hot": (OneHotCategorical, nn.functional.one_hot(ACTIONS, 2)),
}


def two_armed(action):
    done = torch.tensor([False, False, False, True]).view(1, 4, 1)
    return TensorDict(
        {
            "obs": torch.zeros(1, 4, OBS),
            "action": action,
            "action_log_prob": torch.tensor([0.75, 0.25]).log()[ACTIONS],
            "next": {
                "obs": torch.zeros(1, 4, OBS),
                "reward": torch.ones(1, 4, 1),
                "done": done,
                "terminated": done,
            },
        },
        [1, 4],
    )


@pytest.mark.parametrize("interaction", [None, InteractionType.RANDOM, InteractionType.DETERMINISTIC])
@pytest.mark.parametrize("stored", STORED)
def test_off_policy_targets(stored, interaction):
    distribution, action = STORED[stored]
    params = TensorDictModule(FixedLogits(), in_keys=["obs"], out_keys=["logits"])
    actor = ProbabilisticActor(
        params, in_keys=["logits"], out_keys=["action"], distribution_class=distribution, return_log_prob=True
    )
    value = TensorDictModule(Zero(), in_keys=["obs"], out_keys=["state_value"])
    td = two_armed(action)
    with set_interaction_type(interaction):
        VTrace(gamma=GAMMA, actor_network=actor, value_network=value)(td)
    target = torch.tensor([0.8043, 1.57, 0.6333, 1.0])
    torch.testing.assert_close(td["value_target"].flatten(), target, rtol=1e-4, atol=1e-4)


def test_off_policy_targets_from_stored_log_probs():
    td = two_armed(ACTIONS)
    td["log_pi"] = torch.tensor([0.25, 0.75]).log()[ACTIONS]
    td["state_value"] = td["next", "state_value"] = torch.zeros(1, 4, 1)
    VTrace(gamma=GAMMA, actor_network=None, value_network=None)(td)
    target = torch.tensor([0.8043, 1.57, 0.6333, 1.0])
    torch.testing.assert_close(td["value_target"].flatten(), target, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [(7,), (4, 7), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("distribution", [Independent1, Normal])
def test_continuous_actions(distribution, batch):
    actor, value = gaussian_actor(distribution), critic()
    td = rollout(batch)
    log_pi = stored_log_prob(actor, td)
    log_pi = log_pi.sum(-1) if distribution is Normal else log_pi
    VTrace(gamma=GAMMA, actor_network=actor, value_network=value)(td)
    assert_written(td, expected(td, log_pi, value))


@pytest.mark.parametrize("shape", ["[*B, T]", "[*B, T, 1]", "per action dimension"])
def test_log_prob_shapes(shape):
    actor, value = gaussian_actor(), critic()
    td = rollout()
    want = expected(td, stored_log_prob(actor, td), value)
    log_mu = td["action_log_prob"]
    if shape == "[*B, T, 1]":
        td["action_log_prob"] = log_mu.unsqueeze(-1)
    elif shape == "per action dimension":
        td["action_log_prob"] = torch.stack([log_mu - 0.3, torch.full_like(log_mu, 0.3)], -1)
    VTrace(gamma=GAMMA, actor_network=actor, value_network=value)(td)
    assert_written(td, want)


@pytest.mark.parametrize("key", ["action_log_prob", "sample_log_prob", ("policy", "lp")], ids=str)
def test_log_prob_keys(key):
    actor, value = gaussian_actor(), critic()
    td = rollout(log_prob_key=key)
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    if isinstance(key, tuple):
        module.set_keys(sample_log_prob=key)
        assert key in module.in_keys
    want = expected(td, stored_log_prob(actor, td), value, log_mu=td[key])
    assert_written(module(td), want)


@pytest.mark.parametrize("how", ["named", "constructor", "call", "negative"])
def test_time_dim(how):
    actor, value = gaussian_actor(), critic()
    td = rollout((4, 7))
    want = expected(td, stored_log_prob(actor, td), value)
    td = td.transpose(0, 1).contiguous()
    constructor = {"constructor": {"time_dim": 0}, "negative": {"time_dim": -2}}.get(how, {})
    call = {"time_dim": 0} if how == "call" else {}
    if how != "named":
        td.names = [None, None]
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value, **constructor)
    module(td, **call)
    td = td.transpose(0, 1)
    assert_written(td, want)


def test_nested_keys():
    actor = gaussian_actor(action=("agent", "action"))
    value = critic(out_key=("agent", "value"))
    td = rollout()
    want = expected(td, stored_log_prob(actor, td), value)
    renames = {"action": ("agent", "action"), "action_log_prob": ("agent", "lp")}
    for old, new in renames.items():
        td.rename_key_(old, new)
    for key in ("reward", "done", "terminated"):
        td["next"].rename_key_(key, ("agent", key))
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    module.set_keys(
        advantage=("agent", "advantage"),
        value_target=("agent", "target"),
        value=("agent", "value"),
        reward=("agent", "reward"),
        done=("agent", "done"),
        terminated=("agent", "terminated"),
        sample_log_prob=("agent", "lp"),
    )
    # What the actor writes is found without being set.
    assert ("agent", "action") in module.in_keys
    module(td)
    torch.testing.assert_close(td["agent", "advantage"], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(td["agent", "target"], want[1], rtol=1e-5, atol=1e-5)


def test_action_key():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    want = expected(td, stored_log_prob(actor, td), value)
    td.rename_key_("action", "executed")
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    module.set_keys(action="executed")
    assert "executed" in module.in_keys and "action" not in module.in_keys
    assert_written(module(td), want)


def composite_actor(aggregate) -> Any:
    class Params(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(OBS, 5)

        def forward(self, obs):
            out = self.net(obs)
            loc, logits = out[..., :2], out[..., 2:]
            return TensorDict(
                {"arm": {"loc": loc, "scale": torch.ones_like(loc)}, "leg": {"logits": logits}},
                obs.shape[:-1],
            )

    with set_composite_lp_aggregate(aggregate):
        return ProbabilisticActor(
            TensorDictModule(Params(), in_keys=["obs"], out_keys=["params"]),
            in_keys=["params"],
            out_keys=[("action", "arm"), ("action", "leg")],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"arm": Normal, "leg": Categorical},
                "name_map": {"arm": ("action", "arm"), "leg": ("action", "leg")},
            },
            return_log_prob=True,
        )


@pytest.mark.parametrize("aggregate", [True, False])
def test_composite_actions(aggregate):
    actor, value = composite_actor(aggregate), critic()
    td = rollout(action=TensorDict({}, [4, 7]))
    del td["action_log_prob"]
    with set_composite_lp_aggregate(aggregate), set_interaction_type(InteractionType.RANDOM):
        actor(td)
    params = td["params"].clone()
    arm, leg = td["action", "arm"], td["action", "leg"]
    log_mu = Normal(params["arm", "loc"], params["arm", "scale"]).log_prob(arm).sum(-1)
    log_mu = log_mu + Categorical(logits=params["leg", "logits"]).log_prob(leg)
    with torch.no_grad():
        actor[0].module.net.weight.mul_(-1.5)
        params = actor[0].module(td["obs"])
    log_pi = Normal(params["arm", "loc"], params["arm", "scale"]).log_prob(arm).sum(-1)
    log_pi = log_pi + Categorical(logits=params["leg", "logits"]).log_prob(leg)
    with set_composite_lp_aggregate(aggregate):
        module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
        module(td)
        assert ("action", "arm") in module.in_keys and ("action", "leg") in module.in_keys
        want = expected(td, log_pi, value, log_mu=log_mu)
        assert_written(td, want)
        if not aggregate:
            keys = [("action", "arm_log_prob"), ("action", "leg_log_prob")]
            module.set_keys(sample_log_prob=keys)
            assert set(keys) <= set(module.in_keys)
            assert_written(module(td), want)


def test_without_an_action_as_torchrl_and_one_warning():
    actor, value = gaussian_actor(), critic()
    td = rollout().exclude("action")
    theirs = td.clone()
    torchrl_value.VTrace(gamma=GAMMA, actor_network=actor, value_network=value)(theirs)
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    with pytest.warns(UserWarning, match="no stored action under"):
        module(td)
    assert_written(td, (theirs["advantage"], theirs["value_target"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(td)


def test_stored_log_pi_needs_no_actor():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    td["current", "lp"] = stored_log_prob(actor, td)
    module = VTrace(gamma=GAMMA, actor_network=None, value_network=value)
    module.set_keys(log_pi=("current", "lp"))
    assert ("current", "lp") in module.in_keys and "action" not in module.in_keys
    module(td)
    assert_written(td, expected(td, td["current", "lp"], value))


def test_a_key_that_was_set_is_the_only_one_read():
    module = VTrace(gamma=GAMMA, actor_network=gaussian_actor(), value_network=critic())
    module.set_keys(sample_log_prob="behaviour")
    with pytest.raises(KeyError, match="behaviour"):
        module(rollout())


MISSING = {
    "log_pi": (("action",), {"actor_network": None}, "'log_pi'"),
    "sample_log_prob": (("action_log_prob",), {}, "'action_log_prob'"),
    "reward": ((("next", "reward"),), {}, "reward"),
    "done": ((("next", "done"), ("next", "terminated")), {}, "done"),
}


@pytest.mark.parametrize("missing", MISSING)
def test_a_missing_entry_is_named(missing):
    keys, kwargs, name = MISSING[missing]
    td = rollout().exclude(*keys)
    kwargs = {"actor_network": gaussian_actor(), "value_network": critic(), **kwargs}
    with pytest.raises(KeyError, match=name):
        VTrace(gamma=GAMMA, **kwargs)(td)


def test_a_missing_value_is_named():
    td = rollout()
    td["state_value"] = torch.zeros(4, 7, 1)
    with pytest.raises(ValueError, match=r"\('next', 'state_value'\)"):
        VTrace(gamma=GAMMA, actor_network=gaussian_actor(), value_network=None)(td)


@pytest.mark.parametrize(
    "options",
    [
        {"shifted": True, "shifted_budget": 8},
        {"single_pass": True},
        {"bootstrap_budget": 28},
        {"value_chunk_size": 3},
        {"num_chunks": 2},
        {"shifted": True, "shifted_budget": 8, "num_chunks": 2},
    ],
    ids=str,
)
def test_ways_to_value_the_next_observations(options):
    actor, value = gaussian_actor(), critic()
    td = rollout()
    log_pi = stored_log_prob(actor, td)
    VTrace(gamma=GAMMA, actor_network=actor, value_network=value, **options)(td)
    assert_written(td, expected(td, log_pi, value))


def test_shifted_beyond_the_budget_outputs_zero():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    td["next", "done"][0, 2] = True
    td["next", "terminated"][0, 2] = False
    VTrace(gamma=GAMMA, actor_network=actor, value_network=value, shifted=True)(td)
    valid = td["shifted_valid"]
    assert not valid.all()
    assert td["advantage"][~valid].eq(0).all() and td["value_target"][~valid].eq(0).all()
    assert td["advantage"][valid].ne(0).all()


def test_bootstrap_entry():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    log_pi = stored_log_prob(actor, td)
    want = expected(td, log_pi, value)
    with torch.no_grad():
        next_value = value.module(td["next", "obs"])
    needed = td["next", "done"] & ~td["next", "terminated"]
    needed[:, -1] = True
    td["next", "bootstrap_value"] = torch.where(needed, next_value, torch.nan)
    del td["next", "obs"]
    VTrace(gamma=GAMMA, actor_network=actor, value_network=value)(td)
    assert_written(td, want)


def test_truncated_entry():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    want = expected(td, stored_log_prob(actor, td), value)
    td["next", "cut"] = td["next", "done"] & ~td["next", "terminated"]
    td = td.exclude(("next", "done"))
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    module.set_keys(truncated="cut")
    assert_written(module(td), want)


@pytest.mark.parametrize("trailing", [False, True])
def test_invalid_rows_are_left_out(trailing):
    actor, value = gaussian_actor(), critic()
    td = rollout((3, 8))
    td["next", "done"][:, 4] = False
    td["next", "terminated"][:, 4] = False
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    parts = [module(td[:, :5].clone()), module(td[:, 6:].clone())]
    valid = torch.ones(3, 8, dtype=torch.bool)
    valid[:, 5] = False
    td["valid"] = valid.unsqueeze(-1) if trailing else valid
    td["next", "reward"][:, 5] = torch.nan
    td["action_log_prob"][:, 5] = torch.nan
    module(td)
    for key in ("advantage", "value_target"):
        assert td[key][:, 5].eq(0).all()
        torch.testing.assert_close(td[key][:, :5], parts[0][key])
        torch.testing.assert_close(td[key][:, 6:], parts[1][key])


def test_steps_to_next_obs():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    td["steps_to_next_obs"] = torch.randint(1, 4, (4, 7, 1))
    want = expected(td, stored_log_prob(actor, td), value, gamma=GAMMA ** td["steps_to_next_obs"])
    assert_written(VTrace(gamma=GAMMA, actor_network=actor, value_network=value)(td), want)


@pytest.mark.parametrize("shape", [(), (1,), (1, 7, 1), (4, 7, 1)], ids=str)
def test_tensor_gamma(shape):
    actor, value = gaussian_actor(), critic()
    td = rollout()
    gamma = torch.rand(shape) * 0.2 + 0.7
    want = expected(td, stored_log_prob(actor, td), value, gamma=gamma)
    assert_written(VTrace(gamma=gamma, actor_network=actor, value_network=value)(td), want)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_thresholds(as_tensor):
    actor, value = gaussian_actor(), critic()
    td = rollout()
    thresholds = {"rho_thresh": 1.7, "c_thresh": 0.6}
    want = expected(td, stored_log_prob(actor, td), value, **thresholds)
    if as_tensor:
        thresholds = {key: torch.tensor(value) for key, value in thresholds.items()}
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value, **thresholds)
    assert_written(module(td), want)


def test_thresholds_are_buffers_that_may_change():
    actor, value = gaussian_actor(), critic()
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    theirs = torchrl_value.VTrace(
        gamma=0.8, actor_network=actor, value_network=value, rho_thresh=1.4, c_thresh=0.5
    )
    assert module.state_dict().keys() == theirs.state_dict().keys()
    module.load_state_dict(theirs.state_dict())
    td = rollout()
    want = expected(td, stored_log_prob(actor, td), value, gamma=0.8, rho_thresh=1.4, c_thresh=0.5)
    assert_written(module(td), want)
    module = module.to(torch.float64).to(torch.float32)
    buffers = dict(module.named_buffers())
    buffers["rho_thresh"].fill_(0.7)
    want = expected(td, stored_log_prob(actor, td), value, gamma=0.8, rho_thresh=0.7, c_thresh=0.5)
    assert_written(module(td), want)


def test_moving_the_module_keeps_its_thresholds():
    actor, value = gaussian_actor(), critic()
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value, rho_thresh=1.4, c_thresh=0.5)
    td = rollout()
    want = module(td.clone())["advantage"]
    module.to(torch.float64).to(torch.float32)
    assert module(td.clone())["advantage"].equal(want)
    dict(module.named_buffers())["c_thresh"].fill_(1.4)
    assert not module(td.clone())["advantage"].equal(want)


def test_gradients_reach_the_data_and_not_the_networks():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    reward, obs = td["next", "reward"].requires_grad_(), td["obs"].requires_grad_()
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value, differentiable=True)
    module(td)
    got = torch.autograd.grad(td["advantage"].square().sum(), [reward, obs])

    frozen_actor, frozen_value = copy.deepcopy(actor).requires_grad_(False), copy.deepcopy(value)
    frozen_value.requires_grad_(False)
    values = frozen_value.module(obs), frozen_value.module(td["next", "obs"])
    log_pi = frozen_actor.get_dist(TensorDict({"obs": obs}, td.shape)).log_prob(td["action"])
    advantage, _ = vtrace_advantage_estimate(
        GAMMA,
        log_pi.unsqueeze(-1),
        td["action_log_prob"].unsqueeze(-1),
        *values,
        reward,
        td["next", "done"],
        td["next", "terminated"],
    )
    want = torch.autograd.grad(advantage.square().sum(), [reward, obs])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None and p.requires_grad for p in [*actor.parameters(), *value.parameters()])


def test_without_differentiable_there_is_no_graph():
    td = rollout()
    td["next", "reward"].requires_grad_()
    VTrace(gamma=GAMMA, actor_network=gaussian_actor(), value_network=critic())(td)
    assert not td["advantage"].requires_grad and not td["value_target"].requires_grad


def test_functional_parameters():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    parameters: Any = TensorDict.from_module(value)
    params = parameters.clone()
    want = expected(td, stored_log_prob(actor, td), value)
    with torch.no_grad():
        value.module.weight.zero_()
    VTrace(gamma=GAMMA, actor_network=actor, value_network=value)(td, params=params)
    assert_written(td, want)


def test_call_with_tensors():
    actor, value = gaussian_actor(), critic()
    td = rollout((1, 7))
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    tensors = {
        "obs": td["obs"],
        "action": td["action"],
        "action_log_prob": td["action_log_prob"],
        **{f"next_{key}": value for key, value in td["next"].items()},
    }
    advantage, target = module(**tensors)
    assert_written(module(td), (advantage, target))
    with pytest.raises(TypeError, match="unknown"):
        module(**tensors, unknown=td["obs"])


def test_networks_with_inputs_of_their_own():
    actor, value = gaussian_actor(), critic(in_key="state")
    td = rollout((1, 7))
    for part in (td, td["next"]):
        part["state"] = part["obs"] * 2
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    assert "obs" in module.in_keys and ("next", "obs") not in module.in_keys
    advantage, _ = module(
        state=td["state"],
        next_state=td["next", "state"],
        obs=td["obs"],
        action=td["action"],
        action_log_prob=td["action_log_prob"],
        **{f"next_{key}": td["next", key] for key in ("reward", "done", "terminated")},
    )
    assert module(td)["advantage"].equal(advantage)


@pytest.mark.parametrize("skip", [True, False, None])
def test_skip_existing(skip):
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return super().forward(x)

    value = TensorDictModule(Counted(OBS, 1), in_keys=["obs"], out_keys=["state_value"])
    td = rollout()
    td["state_value"] = torch.zeros(4, 7, 1)
    td["next", "state_value"] = torch.zeros(4, 7, 1)
    module = VTrace(gamma=GAMMA, actor_network=gaussian_actor(), value_network=value, skip_existing=skip)
    module(td)
    assert (Counted.calls == 0) == bool(skip)
    assert td["state_value"].eq(0).all() == bool(skip)


def test_set_keys():
    module = VTrace(gamma=GAMMA, actor_network=gaussian_actor(), value_network=critic())
    defaults = {
        "advantage": "advantage",
        "value_target": "value_target",
        "value": "state_value",
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
        "steps_to_next_obs": "steps_to_next_obs",
        "sample_log_prob": "sample_log_prob" if composite_lp_aggregate(nowarn=True) else "action_log_prob",
        "bootstrap": "bootstrap_value",
        "truncated": "truncated",
        "valid": "valid",
        "action": "action",
        "log_pi": "log_pi",
    }
    assert vars(module.tensor_keys) == defaults
    for key in defaults:
        if key != "value":
            module.set_keys(**{key: ("a", key)})
            assert getattr(module.tensor_keys, key) == ("a", key)
    with pytest.raises(KeyError, match="unknown is not an accepted"):
        module.set_keys(unknown="x")
    with pytest.raises(ValueError, match="NestedKey"):
        module.set_keys(reward=3)
    with pytest.raises(KeyError, match="not found in value network"):
        module.set_keys(value="other")


@pytest.mark.parametrize("key", ["advantage_key", "value_target_key", "value_key"])
def test_keys_in_the_constructor_are_deprecated(key):
    options: Any = {"gamma": GAMMA, "actor_network": gaussian_actor(), "value_network": critic(), key: "x"}
    with pytest.raises(RuntimeError, match=key):
        VTrace(**options)


def test_standardised_advantage():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    options: Any = {"gamma": GAMMA, "actor_network": actor, "value_network": value}
    raw = VTrace(**options)(td.clone())["advantage"]
    want = (raw - raw.mean()) / raw.std()
    torch.testing.assert_close(VTrace(**options, average_adv=True)(td.clone())["advantage"], want)

    td["task"] = torch.arange(4).view(4, 1).expand(4, 7) % 2
    grouped = VTrace(**options, average_adv=True, group_key="task")
    got = grouped(td.clone())["advantage"]
    for task in (0, 1):
        group = raw[td["task"] == task]
        torch.testing.assert_close(got[td["task"] == task], (group - group.mean()) / group.std())
    assert "task" in grouped.in_keys

    td["valid"] = torch.arange(7).expand(4, 7) < 5
    raw = VTrace(**options)(td.clone())["advantage"]
    for module in (VTrace(**options, average_adv=True), grouped):
        got = module(td.clone())["advantage"]
        assert got[~td["valid"]].eq(0).all()
    counted = raw[td["valid"]]
    want = (counted - counted.mean()) / counted.std()
    got = VTrace(**options, average_adv=True)(td.clone())["advantage"][td["valid"]]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("functional", [True, False])
def test_for_loss_follows_the_loss_parameters(functional):
    actor, value = gaussian_actor(), critic()
    loss = A2CLoss(actor, value, functional=functional)
    module = VTrace.for_loss(loss, gamma=GAMMA)
    td = rollout()
    before = module(td.clone())["advantage"]
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.1)
    after = module(td.clone())["advantage"]
    assert not torch.allclose(before, after)


def _run(module, td, queue):
    queue.put(module(td)["advantage"].numpy())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "process"])
def test_copies_and_processes(how):
    actor, value = gaussian_actor(), critic()
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    module.set_keys(advantage="adv")
    module.set_keys(advantage="advantage")
    td = rollout()
    want = module(td.clone())["advantage"]
    if how == "process":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=_run, args=(module, td, queue))
        process.start()
        got = torch.as_tensor(queue.get(timeout=60))
        process.join()
    else:
        copied = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
        got = copied(td)["advantage"]
    torch.testing.assert_close(got, want)


def test_flags_of_any_dtype():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    want = module(td.clone())["advantage"]
    for dtype in (torch.uint8, torch.int64, torch.float32):
        other = td.clone()
        for key in ("done", "terminated"):
            other["next", key] = other["next", key].to(dtype)
        assert module(other)["advantage"].equal(want)


def test_only_done():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    td["next", "terminated"] = td["next", "done"]
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    want = module(td.clone())["advantage"]
    assert module(td.exclude(("next", "terminated")))["advantage"].equal(want)


def test_observations_may_be_nan_where_an_episode_terminates():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    want = module(td.clone())["advantage"]
    td["next", "obs"].masked_fill_(td["next", "terminated"], torch.nan)
    assert module(td)["advantage"].equal(want)


# TensorDict reads a setting that PyTorch deprecates.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiles_without_a_graph_break():
    actor, value = gaussian_actor(), critic()
    td = rollout()
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=value)
    want = module(td.clone())["advantage"]
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(td)["advantage"], want)


@pytest.mark.gpu
@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("options", [{}, {"rho_thresh": torch.tensor(1.2)}, {"bootstrap_budget": 9}], ids=str)
def test_cuda_graph_and_sync_mode(monkeypatch, options, scored):
    # A distribution that validates its arguments waits for the device.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    actor = categorical_actor().to("cuda") if scored else None
    module = VTrace(gamma=GAMMA, actor_network=actor, value_network=critic().to("cuda"), **options).to("cuda")
    td = rollout(action=torch.randint(3, (4, 7))).to("cuda")
    if not scored:
        td["log_pi"] = td["action_log_prob"] + 0.1
    want = module(td.copy())["advantage"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(td.copy())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph: Any = CudaGraphModule(module)
    for _ in range(5):
        torch.testing.assert_close(graph(td.copy())["advantage"], want)


@pytest.mark.gpu
def test_numbers_on_the_gpu():
    actor, value = gaussian_actor(), critic()
    td = rollout((16, 40))
    want = expected(td, stored_log_prob(actor, td), value)
    module = VTrace(gamma=GAMMA, actor_network=actor.to("cuda"), value_network=value.to("cuda"))
    td = module.to("cuda")(td.to("cuda"))
    assert_written(td.to("cpu"), want)
