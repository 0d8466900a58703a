"""Every function against the float64 loop: optional inputs, sizes, forms of gamma and lambda."""

import pytest
import torch
from cases import (
    ALL_CHOICES,
    FULL,
    FUNCTIONS,
    TOLERANCE,
    as_tuple,
    assert_close,
    call,
    choice_id,
    oracle,
    problem,
    thorough,
)

import rl_triton

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000, 1023, 1025, 4097)
BATCHES = (1, 2, 31, 33, 65536, 70000)


def check(name, **setting):
    kwargs = problem(name, **setting)
    actual = call(getattr(rl_triton, name), kwargs)
    assert_close(actual, oracle(name, kwargs), setting.get("time_dim", -1))


@pytest.mark.parametrize(("name", "given"), ALL_CHOICES, ids=choice_id)
def test_optional_inputs(path, device, name, given):
    check(name, batch=(3,), T=5, given=given, device=device)


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("T", thorough(LENGTHS, quick=(1, 2, 3, 17)))
@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_lengths(path, device, name, given, T, time_dim):
    check(name, batch=(3,), T=T, given=given, time_dim=time_dim, device=device)


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("N", thorough(BATCHES, quick=(1, 2)))
@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_batches(path, device, name, given, N, time_dim):
    check(name, batch=(N,), T=3, given=given, time_dim=time_dim, device=device)


@pytest.mark.parametrize("boundary", ["ends_at", "starts_at"])
@pytest.mark.parametrize("given", [(), ("seed_values", "valid")], ids=choice_id)
def test_boundary(path, device, boundary, given):
    check("compute_episodic_prefix_sum", T=33, given=given, boundary=boundary, device=device)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("given", [(), ("init",)], ids=choice_id)
def test_scan_direction(path, device, reverse, given):
    check("affine_scan", T=33, given=given, reverse=reverse, device=device)


@pytest.mark.parametrize(
    "bars", [(1.0, 1.0, None), (2.0, 0.5, 1.2), (0.5, 2.0, 0.0), (float("inf"), 0.0, 3.0)]
)
def test_clipping_bounds(path, device, bars):
    rho_bar, c_bar, rho_pg_bar = bars
    check(
        "compute_vtrace",
        given=("truncateds",),
        rho_bar=rho_bar,
        c_bar=c_bar,
        rho_pg_bar=rho_pg_bar,
        device=device,
    )
    for name in ("compute_retrace", "compute_retrace_from_log_probs"):
        check(name, given=("truncateds",), rho_bar=rho_bar, c_bar=c_bar, device=device)


FORMS = {"float": (), "0-d": (), "per env": (3, 1), "per step": (1, 9), "full": (3, 9)}
UNDECAYED = ("compute_episodic_prefix_sum", "affine_scan")
DECAYING = [(name, given) for name, given in FULL if name not in UNDECAYED]


def coefficient(form, low, high, device):
    """A coefficient between the bounds for `[3, 9]` inputs."""
    value = low + (high - low) * torch.rand(FORMS[form], generator=torch.Generator().manual_seed(0))
    return value.item() if form == "float" else value.to(device)


@pytest.mark.parametrize("lambda_form", thorough(FORMS, quick=("full",)))
@pytest.mark.parametrize("gamma_form", FORMS)
@pytest.mark.parametrize(("name", "given"), DECAYING, ids=choice_id)
def test_forms_of_gamma_and_lambda(path, device, name, given, gamma_form, lambda_form):
    gamma, lambda_ = coefficient(gamma_form, 0.8, 1.0, device), coefficient(lambda_form, 0.5, 1.0, device)
    check(name, batch=(3,), T=9, given=given, device=device, **coefficients(name, gamma, lambda_))


def coefficients(name, gamma, lambda_):
    """Discounted returns take no lambda."""
    return {"gamma": gamma} if name == "compute_discounted_returns" else {"gamma": gamma, "lambda_": lambda_}


@pytest.mark.parametrize(
    ("gamma", "lambda_"), [(0.0, 0.9), (0.9, 0.0), (0.0, 0.0), (1.0, 1.0), (9e-10, 1.0), (1, 0)]
)
@pytest.mark.parametrize(("name", "given"), DECAYING, ids=choice_id)
def test_edges_of_gamma_and_lambda(path, device, name, given, gamma, lambda_):
    check(name, T=17, given=given, device=device, **coefficients(name, gamma, lambda_))


@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_calls_that_alternate(path, device, name, given):
    """What is kept from one call serves the next of its kind alone."""
    settings = [{}, {"seed": 1}, {"T": 5}, {"dtype": torch.float64}, {"time_dim": 0}, {}]
    for setting in settings:
        check(name, given=given, device=device, **{"T": 3} | setting)
    if (name, given) in DECAYING:
        for gamma in (0.9, 0.5, 1, torch.tensor(0.7, device=device), 0.9):
            check(name, given=given, device=device, gamma=gamma, T=3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_error_at_4096_rows(name, device):
    check(name, batch=(2,), T=4096, device=device)


@pytest.mark.parametrize("T", thorough((200, 4096), quick=(200,)))
@pytest.mark.parametrize("gamma", [0.99, 0.9999])
def test_float64_keeps_its_precision(path, device, gamma, T):
    check("compute_gae", batch=(2,), T=T, dtype=torch.float64, gamma=gamma, lambda_=gamma, device=device)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_error_above_the_tolerance_is_noticed(dtype):
    kwargs = problem("compute_gae", dtype=dtype)
    expected = oracle("compute_gae", kwargs)
    off = 2 * sum(TOLERANCE[dtype]) * max(1, expected[0].abs().max())
    assert_close(tuple(x.to(dtype) for x in expected), expected)
    with pytest.raises(AssertionError):
        assert_close(tuple((x + off).to(dtype) for x in expected), expected)
    with pytest.raises(AssertionError):
        assert_close(as_tuple(torch.full_like(expected[0], torch.nan)), expected)
