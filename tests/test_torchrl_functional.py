"""The functionals against TorchRL's own, by name, over the forms that their arguments may take."""

import inspect
import math
from typing import Any

import pytest
import torch
from torchrl.objectives.value import functional as theirs

from rl_triton.integrations.torchrl import functional as ours

# name: the tensor arguments after gamma (and lmbda)
RECURRENCES = {
    "generalized_advantage_estimate": ("state_value", "next_state_value"),
    "td_lambda_return_estimate": ("next_state_value",),
    "td_lambda_advantage_estimate": ("state_value", "next_state_value"),
    "td1_return_estimate": ("next_state_value",),
    "td1_advantage_estimate": ("state_value", "next_state_value"),
    "vtrace_advantage_estimate": ("log_pi", "log_mu", "state_value", "next_state_value"),
}
# shape, time_dim
LAYOUTS = [
    ((4, 7, 1), -2),
    ((3, 9, 2), 1),
    ((6, 5), -1),
    ((6, 5), 0),
    ((8,), -1),
    ((2, 3, 6, 4), 2),
    ((2, 6, 3, 2), -3),
    ((5, 1, 1), -2),
]
GAMMAS = {
    "float": lambda shape: 0.9,
    "0-d": lambda shape: torch.tensor(0.9),
    "one element": lambda shape: torch.tensor([0.9]),
    "per step": lambda shape: torch.rand(shape) * 0.2 + 0.8,
}


def arguments(
    name, shape, gamma: Any = 0.9, lmbda: Any = 0.8, dtype=torch.float32, requires_grad=False
) -> Any:
    """Random arguments of one recurrence with terminal and truncated rows."""
    values = {key: torch.randn(shape, dtype=dtype) for key in RECURRENCES[name]}
    values["reward"] = torch.randn(shape, dtype=dtype)
    if requires_grad:
        values = {key: value.requires_grad_() for key, value in values.items()}
    done = torch.rand(shape) < 0.3
    flags = {"done": done, "terminated": done & (torch.rand(shape) < 0.5)}
    coefficients = {"gamma": gamma}
    if "lmbda" in inspect.signature(getattr(theirs, name)).parameters:
        coefficients["lmbda"] = lmbda
    return {**coefficients, **values, **flags}


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def assert_same(name, kwargs, **tolerance):
    ours_out = outputs(getattr(ours, name)(**kwargs))
    theirs_out = outputs(getattr(theirs, name)(**kwargs))
    for got, expected in zip(ours_out, theirs_out, strict=True):
        torch.testing.assert_close(got, expected, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", RECURRENCES)
def test_agrees_with_torchrl(name, layout):
    shape, time_dim = layout
    torch.manual_seed(0)
    assert_same(name, {**arguments(name, shape), "time_dim": time_dim})


@pytest.mark.parametrize("form", GAMMAS)
@pytest.mark.parametrize("name", RECURRENCES)
def test_forms_of_gamma_and_lambda(name, form):
    torch.manual_seed(1)
    shape = (4, 6, 2)
    assert_same(name, arguments(name, shape, gamma=GAMMAS[form](shape), lmbda=GAMMAS[form](shape)))


def test_gamma_of_a_lower_rank_is_aligned_on_the_right():
    torch.manual_seed(2)
    per_step = torch.rand(6)
    kwargs = {**arguments("td1_return_estimate", (4, 6), gamma=per_step), "time_dim": -1}
    expected = ours.td1_return_estimate(**{**kwargs, "gamma": per_step.expand(4, 6)})
    torch.testing.assert_close(ours.td1_return_estimate(**kwargs), expected)


def test_integer_gamma_tensor():
    torch.manual_seed(3)
    assert_same("td1_return_estimate", arguments("td1_return_estimate", (3, 5, 1), gamma=torch.tensor(1)))


@pytest.mark.parametrize("name", RECURRENCES)
def test_terminated_defaults_to_done(name):
    torch.manual_seed(4)
    kwargs = arguments(name, (4, 7, 1))
    del kwargs["terminated"]
    assert_same(name, kwargs)


@pytest.mark.parametrize("name", RECURRENCES)
def test_fp64(name):
    torch.manual_seed(5)
    gamma = torch.tensor(0.99, dtype=torch.float64)
    lmbda = torch.tensor(0.95, dtype=torch.float64)
    kwargs = arguments(name, (2, 50, 1), gamma, lmbda, dtype=torch.float64)
    assert_same(name, kwargs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", RECURRENCES)
def test_gradients_agree(name):
    torch.manual_seed(6)
    kwargs = arguments(name, (3, 6, 2), requires_grad=True)
    leaves = [value for value in kwargs.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    weights = [torch.randn(3, 6, 2), torch.randn(3, 6, 2)]

    def gradients(library):
        results = outputs(getattr(library, name)(**kwargs))
        total: Any = sum((weight * result).sum() for weight, result in zip(weights, results, strict=False))
        return torch.autograd.grad(total, leaves)

    for got, expected in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_flags_of_any_dtype(name, dtype):
    torch.manual_seed(7)
    kwargs = arguments(name, (3, 6, 1))
    flags = {key: kwargs[key].to(dtype) for key in ("done", "terminated")}
    for got, expected in zip(
        outputs(getattr(ours, name)(**{**kwargs, **flags})),
        outputs(getattr(ours, name)(**kwargs)),
        strict=True,
    ):
        assert got.equal(expected)


@pytest.mark.parametrize("name", RECURRENCES)
def test_next_value_of_a_terminated_row_is_not_read(name):
    torch.manual_seed(8)
    kwargs = arguments(name, (3, 6, 1))
    expected = outputs(getattr(ours, name)(**kwargs))
    poisoned = kwargs["next_state_value"].masked_fill(kwargs["terminated"], math.nan)
    for got, want in zip(
        outputs(getattr(ours, name)(**{**kwargs, "next_state_value": poisoned})), expected, strict=True
    ):
        assert got.equal(want)


@pytest.mark.parametrize(
    "name", ["generalized_advantage_estimate", "td_lambda_return_estimate", "td_lambda_advantage_estimate"]
)
def test_lambda_zero_is_one_step(name):
    # TorchRL's vectorised functions raise an IndexError here; its loops do not.
    torch.manual_seed(9)
    assert_same(name, arguments(name, (3, 6, 1), lmbda=0.0))
    kwargs = arguments(name, (3, 6, 1), lmbda=0.0)
    plain = outputs(getattr(ours, name)(**kwargs))
    for got, expected in zip(outputs(getattr(ours, f"vec_{name}")(**kwargs)), plain, strict=True):
        assert got.equal(expected)


@pytest.mark.parametrize("name", ["td_lambda_return_estimate", "td1_return_estimate"])
def test_gamma_that_does_not_roll_is_handed_on(name):
    torch.manual_seed(10)
    shape = (3, 6, 1)
    kwargs = {**arguments(name, shape, gamma=torch.rand(shape)), "rolling_gamma": False}
    assert getattr(ours, name)(**kwargs).equal(getattr(theirs, name)(**kwargs))
    assert not torch.allclose(
        getattr(ours, name)(**kwargs), getattr(ours, name)(**{**kwargs, "rolling_gamma": True})
    )
    with pytest.raises(RuntimeError, match="rolling_gamma"):
        getattr(ours, name)(**{**kwargs, "gamma": 0.9})


def test_every_functional_of_torchrl_is_here_with_its_signature():
    assert {*theirs.__all__, "reward2go"} == set(ours.__all__)
    for name in ours.__all__:
        expected = inspect.signature(getattr(theirs, name)).parameters
        got = inspect.signature(getattr(ours, name)).parameters
        assert list(got) == list(expected)
        for key, parameter in expected.items():
            assert got[key].default == parameter.default, (name, key)


@pytest.mark.parametrize("name", RECURRENCES)
def test_tensors_of_one_call_have_one_shape(name):
    kwargs = arguments(name, (3, 6, 1))
    with pytest.raises(RuntimeError, match=r"reward \[3, 6\]"):
        getattr(ours, name)(**{**kwargs, "reward": kwargs["reward"].squeeze(-1)})


def test_vtrace_corrects_for_the_behaviour_policy():
    pi, mu = torch.tensor([0.25, 0.75]), torch.tensor([0.75, 0.25])
    actions = torch.tensor([0, 1, 0, 1])
    zeros, flags = torch.zeros(4), torch.tensor([False, False, False, True])
    _, targets = ours.vtrace_advantage_estimate(
        0.9, pi[actions].log(), mu[actions].log(), zeros, zeros, torch.ones(4), flags, flags, time_dim=-1
    )
    torch.testing.assert_close(targets, torch.tensor([0.8043, 1.57, 0.6333, 1.0]), rtol=1e-4, atol=1e-4)


THRESHOLDS = {
    "ordered": (torch.tensor(1.5), torch.tensor(0.7)),
    "crossed": (torch.tensor(0.6), torch.tensor(1.3)),
    "one tensor": (1.0, torch.tensor(0.7)),
    "zero rho": (torch.tensor(0.0), torch.tensor(1.0)),
    "zero c": (torch.tensor(1.0), torch.tensor(0.0)),
}


@pytest.mark.parametrize("thresholds", THRESHOLDS)
def test_vtrace_thresholds_may_be_tensors(thresholds):
    torch.manual_seed(11)
    rho_thresh, c_thresh = THRESHOLDS[thresholds]
    kwargs = arguments("vtrace_advantage_estimate", (3, 8, 1))
    tensors: Any = {**kwargs, "rho_thresh": rho_thresh, "c_thresh": c_thresh}
    assert_same("vtrace_advantage_estimate", tensors)
    floats: Any = {**kwargs, "rho_thresh": float(rho_thresh), "c_thresh": float(c_thresh)}
    for got, expected in zip(
        ours.vtrace_advantage_estimate(**tensors), ours.vtrace_advantage_estimate(**floats), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_vtrace_thresholds_per_step():
    torch.manual_seed(12)
    kwargs = arguments("vtrace_advantage_estimate", (3, 8, 1))
    kwargs |= {"rho_thresh": torch.rand(3, 8, 1) + 0.5, "c_thresh": torch.rand(3, 8, 1) + 0.5}
    assert_same("vtrace_advantage_estimate", kwargs)


def test_vtrace_gradient_through_tensor_thresholds():
    torch.manual_seed(13)
    kwargs = arguments("vtrace_advantage_estimate", (3, 8, 1), requires_grad=True)
    # On-policy rows sit on the threshold itself.
    with torch.no_grad():
        kwargs["log_pi"][0] = kwargs["log_mu"][0]
    thresholds: Any = {"rho_thresh": torch.tensor(1.0), "c_thresh": torch.tensor(1.0)}

    def gradients(**more):
        advantage, target = ours.vtrace_advantage_estimate(**kwargs, **more)
        return torch.autograd.grad((advantage * target).sum(), [kwargs["log_pi"], kwargs["state_value"]])

    for got, expected in zip(gradients(**thresholds), gradients(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_vtrace_extreme_ratios_with_tensor_thresholds():
    torch.manual_seed(14)
    kwargs = arguments("vtrace_advantage_estimate", (1, 6, 1))
    kwargs["log_pi"] = torch.tensor([1000.0, -1000.0, -math.inf, 0.0, 0.5, 0.0]).view(1, 6, 1)
    kwargs["log_mu"] = torch.tensor([0.0, 0.0, 0.0, -math.inf, 0.0, 0.0]).view(1, 6, 1)
    tensors: Any = {"rho_thresh": torch.tensor(1.0), "c_thresh": torch.tensor(0.9)}
    for got, expected in zip(
        ours.vtrace_advantage_estimate(**kwargs, **tensors),
        ours.vtrace_advantage_estimate(**kwargs, rho_thresh=1.0, c_thresh=0.9),
        strict=True,
    ):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_vtrace_dtype_does_not_depend_on_the_thresholds():
    kwargs = arguments("vtrace_advantage_estimate", (3, 8, 1), dtype=torch.bfloat16)
    thresholds: Any = {"rho_thresh": torch.tensor(1.0), "c_thresh": torch.tensor(1.0)}
    advantage, target = ours.vtrace_advantage_estimate(**kwargs, **thresholds)
    assert advantage.dtype == target.dtype == torch.bfloat16


def test_reward2go_keeps_its_columns():
    reward = torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.0, -4.0]])
    done = torch.tensor([[False, False], [False, False], [True, True]])
    expected = torch.tensor([[0.5, -1.0], [1.0, -2.0], [2.0, -4.0]])
    torch.testing.assert_close(ours.reward2go(reward, done, 0.5), expected)


@pytest.mark.parametrize("layout", [((4, 7, 1), -2), ((2, 3, 7, 2), -2), ((7, 3), -2)], ids=str)
def test_reward2go_agrees_with_torchrl(layout):
    shape, time_dim = layout
    torch.manual_seed(15)
    reward, done = torch.randn(shape), torch.rand(shape) < 0.3
    expected = theirs.reward2go(reward, done, 0.9, time_dim=time_dim)
    torch.testing.assert_close(ours.reward2go(reward, done, 0.9, time_dim=time_dim), expected)


def test_reward2go_refuses_two_shapes():
    with pytest.raises(
        ValueError, match=r"reward and done must have one shape, got \[3, 4\] and \[3, 4, 1\]"
    ):
        ours.reward2go(torch.zeros(3, 4), torch.zeros(3, 4, 1, dtype=torch.bool), 0.9)


def test_on_the_kernels(path):
    torch.manual_seed(16)
    for name in RECURRENCES:
        assert_same(name, arguments(name, (2, 5, 1)))
