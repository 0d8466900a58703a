"""Retrace, discounted returns, traces and sums as modules, against the float64 loops."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from rl_triton import reference
from rl_triton.integrations.torchrl import DiscountedReturn, EligibilityTrace, EpisodicPrefixSum, Retrace

GAMMA, LAMBDA = 0.9, 0.8
A = 3


def rollout(batch=(4, 7), feature=(1,)) -> Any:
    done = torch.rand(*batch, 1) < 0.25
    terminated = done & (torch.rand(*batch, 1) < 0.5)
    is_init = torch.ones(*batch, 1, dtype=torch.bool)
    is_init[..., 1:, :] = done[..., :-1, :]
    td = TensorDict(
        {
            "action": torch.randint(A, batch),
            "action_value": torch.randn(*batch, A),
            "action_probs": torch.randn(*batch, A).softmax(-1),
            "action_log_prob": torch.randn(batch) - 1,
            "log_pi": torch.randn(batch) - 1,
            "state_action_value": torch.randn(*batch, 1),
            "gradient": torch.randn(*batch, *feature),
            "is_init": is_init,
            "next": {
                "action_value": torch.randn(*batch, A),
                "action_probs": torch.randn(*batch, A).softmax(-1),
                "state_value": torch.randn(*batch, 1),
                "reward": torch.randn(*batch, 1),
                "done": done,
                "terminated": terminated,
                "bootstrap_value": torch.randn(*batch, 1),
            },
        },
        batch,
    )
    td.names = [*[None] * (len(batch) - 1), "time"]
    return td


def flat(td, key):
    """An entry without its feature axis, as the functions take it."""
    value = td[key]
    return value if value.dim() == td.ndim else value.squeeze(-1)


def ends(td):
    return flat(td, ("next", "terminated")), flat(td, ("next", "done"))


def retrace_discrete(td, **options):
    target, advantage = reference.compute_retrace(
        td["action_probs"],
        td["action_log_prob"].exp(),
        td["action_value"].gather(-1, td["action"].unsqueeze(-1)).squeeze(-1),
        td["next", "action_value"],
        td["action"],
        flat(td, ("next", "reward")),
        *ends(td),
        GAMMA,
        LAMBDA,
        **{"next_action_probs_target": td["next", "action_probs"], **options},
    )
    return {"advantage": advantage, "value_target": target}


def retrace_continuous(td, **options):
    target, advantage = reference.compute_retrace_from_log_probs(
        td["log_pi"],
        td["action_log_prob"],
        flat(td, "state_action_value"),
        flat(td, ("next", "state_value")),
        flat(td, ("next", "reward")),
        *ends(td),
        GAMMA,
        LAMBDA,
        **options,
    )
    return {"advantage": advantage, "value_target": target}


def discounted_return(td, **options):
    bootstrap = flat(td, ("next", "bootstrap_value"))
    reward = flat(td, ("next", "reward"))
    returns = reference.compute_discounted_returns(reward, *ends(td), GAMMA, bootstrap, **options)
    return {"value_target": returns}


def eligibility_trace(td, **options):
    done = flat(td, ("next", "done"))
    traces = reference.compute_eligibility_traces(flat(td, "gradient"), done, GAMMA, LAMBDA, **options)
    return {"eligibility_trace": traces}


def prefix_sum(td, **options):
    reward, done = flat(td, ("next", "reward")), flat(td, ("next", "done"))
    return {"prefix_sum": reference.compute_episodic_prefix_sum(reward, done, **options)}


MODULES = {
    "Retrace": (lambda **kw: Retrace(gamma=GAMMA, lmbda=LAMBDA, **kw), retrace_discrete),
    "Retrace, continuous": (
        lambda **kw: Retrace(gamma=GAMMA, lmbda=LAMBDA, continuous=True, **kw),
        retrace_continuous,
    ),
    "DiscountedReturn": (lambda **kw: DiscountedReturn(gamma=GAMMA, **kw), discounted_return),
    "EligibilityTrace": (lambda **kw: EligibilityTrace(gamma=GAMMA, lmbda=LAMBDA, **kw), eligibility_trace),
    "EpisodicPrefixSum": (lambda **kw: EpisodicPrefixSum(**kw), prefix_sum),
    "EpisodicPrefixSum, starts_at": (lambda **kw: EpisodicPrefixSum(boundary="starts_at", **kw), prefix_sum),
}
every_module = pytest.mark.parametrize("name", MODULES)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_written(td, want, rtol=1e-5, atol=1e-5):
    for key, value in want.items():
        got = td[key]
        got = got if got.dim() == td.ndim else got.squeeze(-1)
        torch.testing.assert_close(got.double(), value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("batch", [(7,), (4, 7), (2, 3, 5)], ids=str)
@every_module
def test_agrees_with_the_oracle(name, batch):
    module, oracle = MODULES[name]
    td = rollout(batch)
    want = oracle(td)
    out = module()(td)
    assert out is td and set(module().out_keys) == set(want)
    assert_written(td, want)


@every_module
def test_fp64_takes_the_coefficients_as_given(name):
    module, oracle = MODULES[name]
    td = rollout((2, 60)).double()
    td["action"] = td["action"].long()
    for key in ("done", "terminated"):
        td["next", key] = td["next", key].bool()
    td["is_init"] = td["is_init"].bool()
    assert_written(module()(td), oracle(td), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["named", "constructor", "call", "negative"])
@every_module
def test_time_dim(name, how):
    module, oracle = MODULES[name]
    td = rollout((4, 7))
    want = oracle(td)
    td = td.transpose(0, 1).contiguous()
    if how != "named":
        td.names = [None, None]
    constructor = {"constructor": {"time_dim": 0}, "negative": {"time_dim": -2}}.get(how, {})
    module(**constructor)(td, **({"time_dim": 0} if how == "call" else {}))
    assert_written(td.transpose(0, 1), want)


@pytest.mark.parametrize("trailing", [False, True])
@every_module
def test_invalid_rows_are_left_out(name, trailing):
    module, oracle = MODULES[name]
    td = rollout()
    # Whatever starts after an invalid row opens an episode.
    td["is_init"][:, 3] = True
    valid = torch.ones(4, 7, dtype=torch.bool)
    valid[:, 2] = False
    want = oracle(td, valid=valid)
    td["valid"] = valid.unsqueeze(-1) if trailing else valid
    for part in (td, td["next"]):
        for value in part.values():
            if torch.is_tensor(value) and value.is_floating_point():
                value[:, 2] = torch.nan
    td["action"][:, 2] = -1
    module()(td)
    assert_written(td, want)
    for key in want:
        assert td[key][:, 2].eq(0).all()


@every_module
def test_call_with_tensors(name):
    # Without a batch size in sight every common axis is batch, so the time dimension must be named.
    module = MODULES[name][0](time_dim=1)
    td = rollout((1, 7))
    arguments = {"_".join(key) if isinstance(key, tuple) else key: td[key] for key in module.in_keys}
    got = module(**arguments)
    td = td.select(*module.in_keys)
    want = [module(td)[key] for key in module.out_keys]
    for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        assert a.equal(b)
    with pytest.raises(TypeError, match="unknown"):
        module(**arguments, unknown=torch.zeros(1, 7))


@every_module
def test_keys_may_be_renamed(name):
    module, oracle = MODULES[name]
    td = rollout()
    want = oracle(td)
    module = module()
    names = vars(module.tensor_keys)
    for key, entry in names.items():
        new = ("next", "renamed", key) if isinstance(entry, tuple) else ("renamed", key)
        for part in (td, td["next"]):
            if part.get(entry, None) is not None:
                part.rename_key_(entry, new)
        module.set_keys(**{key: new})
        assert getattr(module.tensor_keys, key) == new
    module(td)
    assert_written(td, {("renamed", key): want[entry] for key, entry in names.items() if entry in want})


@every_module
def test_set_keys_refuses(name):
    module = MODULES[name][0]()
    with pytest.raises(KeyError, match="unknown is not an accepted"):
        module.set_keys(unknown="x")
    with pytest.raises(ValueError, match="NestedKey"):
        module.set_keys(valid=3)


@every_module
def test_a_missing_entry_is_named(name):
    module = MODULES[name][0]()
    # Terminated may stand in for done, and a policy at the next observation for the one given.
    for key in set(module.in_keys) - {("next", "terminated"), ("next", "done"), ("next", "action_probs")}:
        with pytest.raises(KeyError, match=key[-1] if isinstance(key, tuple) else key):
            module(rollout().exclude(key))
    if ("next", "done") in module.in_keys:
        with pytest.raises(KeyError, match="done"):
            module(rollout().exclude(("next", "done"), ("next", "terminated")))


@every_module
def test_differentiable(name):
    module, _ = MODULES[name]
    td = rollout()
    keys = [("next", "reward"), "gradient", "state_action_value", "action_value"]
    leaves = [td[key].requires_grad_() for key in keys]
    module()(td)
    assert not any(td[key].requires_grad for key in module().out_keys)
    module(differentiable=True)(td)
    total: Any = sum(td[key].square().sum() for key in module().out_keys)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    assert any(gradient is not None and gradient.ne(0).any() for gradient in gradients)


@every_module
def test_copies(name):
    module, oracle = MODULES[name]
    td = rollout()
    want = oracle(td)
    for copied in (copy.deepcopy(module()), pickle.loads(pickle.dumps(module()))):
        assert_written(copied(td.clone()), want)


ACTIONS = {
    "index": lambda action: action,
    "index with a trailing axis": lambda action: action.unsqueeze(-1),
    "int32": lambda action: action.int(),
    "one-hot": lambda action: nn.functional.one_hot(action, A),
    "one-hot bool": lambda action: nn.functional.one_hot(action, A).bool(),
}


@pytest.mark.parametrize("form", ACTIONS)
def test_forms_of_a_discrete_action(form):
    td = rollout()
    want = retrace_discrete(td)
    td["action"] = ACTIONS[form](td["action"])
    assert_written(Retrace(gamma=GAMMA, lmbda=LAMBDA)(td), want)


def test_retrace_without_a_next_policy(monkeypatch):
    monkeypatch.setattr("rl_triton.functional._warned_next_policy", False)
    td = rollout().exclude(("next", "action_probs"))
    want = retrace_discrete(rollout_like(td), next_action_probs_target=None)
    module = Retrace(gamma=GAMMA, lmbda=LAMBDA)
    with pytest.warns(UserWarning, match="next_action_probs_target"):
        module(td)
    assert_written(td, want)
    module(td)


def rollout_like(td):
    """The same data with an entry that an oracle call replaces."""
    td = td.clone()
    td["next", "action_probs"] = td["action_probs"]
    return td


@pytest.mark.parametrize("continuous", [False, True])
def test_retrace_bounds(continuous):
    td = rollout()
    oracle = retrace_continuous if continuous else retrace_discrete
    want = oracle(td, c_bar=0.7, rho_bar=1.6)
    module = Retrace(gamma=GAMMA, lmbda=LAMBDA, continuous=continuous, c_thresh=0.7, rho_thresh=1.6)
    assert_written(module(td), want)


def test_retrace_sums_log_probs_over_action_dimensions():
    td = rollout()
    want = retrace_continuous(td)
    for key in ("log_pi", "action_log_prob"):
        td[key] = torch.stack([td[key] - 0.4, torch.full((4, 7), 0.4)], -1)
    assert_written(Retrace(gamma=GAMMA, lmbda=LAMBDA, continuous=True)(td), want)


def test_retrace_in_a_loss():
    actor = QValueActor(nn.Linear(2, A), in_keys=["obs"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical")
    module: Any = Retrace(gamma=GAMMA)
    loss.make_value_estimator(module)
    assert loss.value_estimator is module


@pytest.mark.parametrize("gamma", [torch.tensor(GAMMA), torch.tensor([GAMMA]), torch.full((4, 1, 1), GAMMA)])
def test_tensor_coefficients_follow_the_module(gamma):
    td = rollout()
    want = discounted_return(td)
    module = DiscountedReturn(gamma=gamma)
    assert module.state_dict().keys() == {"gamma"}
    assert_written(module(td), want)
    assert_written(module.double()(td), want)


def test_steps_to_next_obs():
    td = rollout()
    steps = torch.randint(1, 4, (4, 7))
    td["steps_to_next_obs"] = steps.unsqueeze(-1)
    returns = reference.compute_discounted_returns(
        flat(td, ("next", "reward")), *ends(td), GAMMA**steps, flat(td, ("next", "bootstrap_value"))
    )
    assert_written(DiscountedReturn(gamma=GAMMA)(td), {"value_target": returns})


def test_returns_without_a_bootstrap():
    td = rollout().exclude(("next", "bootstrap_value"))
    returns = reference.compute_discounted_returns(flat(td, ("next", "reward")), *ends(td), GAMMA)
    assert_written(DiscountedReturn(gamma=GAMMA)(td), {"value_target": returns})


def test_end_flags_in_any_pair():
    td = rollout()
    want = discounted_return(td)
    td["next", "truncated"] = td["next", "done"] & ~td["next", "terminated"]
    for missing in ("done", "terminated", "truncated"):
        assert_written(DiscountedReturn(gamma=GAMMA)(td.exclude(("next", missing))), want)


@pytest.mark.parametrize("feature", [(), (2,), (2, 3)], ids=str)
def test_traces_of_any_feature_shape(feature):
    td = rollout(feature=feature)
    done = flat(td, ("next", "done"))
    done = done.view(4, 7, *[1] * len(feature))
    want = reference.compute_eligibility_traces(td["gradient"], done, GAMMA, LAMBDA, time_dim=1)
    got = EligibilityTrace(gamma=GAMMA, lmbda=LAMBDA)(td)["eligibility_trace"]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["EligibilityTrace", "EpisodicPrefixSum"])
def test_windows_go_on_where_the_last_one_ended(name):
    module = MODULES[name][0]()
    td = rollout((4, 10))
    (key,) = module.out_keys
    want = module(td.clone())[key]
    first = module(td[:, :6].clone())[key]
    seed = torch.where(td["next", "done"][:, 5], 0, first[:, -1])
    second = module(td[:, 6:].clone(), seed_values=seed)[key]
    torch.testing.assert_close(torch.cat([first, second], 1), want)


def test_prefix_sum_of_another_entry():
    td = rollout()
    td["steps"] = torch.ones(4, 7, dtype=torch.int64)
    module = EpisodicPrefixSum()
    module.set_keys(input="steps", prefix_sum=("counts", "step"))
    done = flat(td, ("next", "done"))
    want = reference.compute_episodic_prefix_sum(td["steps"], done)
    assert_written(module(td), {("counts", "step"): want})


def test_unknown_boundary():
    with pytest.raises(ValueError, match="boundary must be 'ends_at' or 'starts_at', got 'middle'"):
        EpisodicPrefixSum(boundary="middle")(rollout())
