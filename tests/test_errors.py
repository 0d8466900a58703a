"""Bad input gets one error that names the argument, what was expected and what came."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import FUNCTIONS, call, problem, tensor_arguments

import rl_triton


def fails(name, changes, error, message, **setting):
    kwargs = problem(name, **setting) | changes
    with pytest.raises(error, match=message):
        call(getattr(rl_triton, name), kwargs)


ONES = torch.ones(3, 7)
ONE_ENV = torch.ones(3)
FOUR_ACTIONS = torch.ones(3, 7, 4)


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in FUNCTIONS for keys in tensor_arguments(name) for key in keys]
)
@pytest.mark.parametrize(
    ("wrong", "came"),
    [
        (np.ones((3, 7), dtype=np.float32), "ndarray"),
        ([[1.0] * 7] * 3, "list"),
        (1.0, "float"),
        (torch.ones(4, 5), r"\[4, 5\]"),
        (torch.ones(3, 7, 2, 2), r"\[3, 7, 2, 2\]"),
        (torch.ones(3, 7, dtype=torch.complex64), "complex64"),
        (torch.ones(3, 7).to_sparse(), "sparse_coo"),
    ],
    ids=["array", "list", "number", "shape", "rank", "complex", "sparse"],
)
def test_every_tensor_argument_is_named(name, key, wrong, came):
    required, _ = tensor_arguments(name)
    # The first input in memory fixes the rank, so that another one is named when it is the odd one.
    given = () if key in required else (key,)
    kwargs = problem(name, given=given) | {key: wrong}
    with pytest.raises((TypeError, ValueError)) as caught:
        call(getattr(rl_triton, name), kwargs)
    message = str(caught.value)
    assert any(argument in message for argument in (*required, key)), message
    if not isinstance(wrong, torch.Tensor) or wrong.is_complex() or wrong.is_sparse:
        assert key in message and came in message, message


@pytest.mark.parametrize("name", FUNCTIONS)
def test_required_inputs_may_not_be_none(name):
    for key in tensor_arguments(name)[0]:
        fails(name, {key: None}, TypeError, rf"{key} must be .*None")


GIVEN_TWICE = {"next_values": ONES, "last_value": ONE_ENV}, {"next_values": ONES, "bootstrap_values": ONES}
SUM = "compute_episodic_prefix_sum"


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("compute_gae", {"values": torch.ones(3, 8)}, ValueError, r"values .*\[3, 7\].*\[3, 8\]"),
        ("compute_gae", {"values": torch.ones(3)}, ValueError, r"values .*\[3\]"),
        ("compute_gae", {"last_value": torch.ones(4)}, ValueError, r"last_value .*\[3\].*\[4\]"),
        ("compute_gae", {"last_value": torch.ones(3, 2)}, ValueError, r"last_value .*\[3, 2\]"),
        ("compute_gae", {"valid": torch.ones(7, 3)}, ValueError, r"valid .*\[7, 3\]"),
        ("compute_gae", GIVEN_TWICE[0], ValueError, "last_value .*next_values"),
        ("compute_gae", GIVEN_TWICE[1], ValueError, "bootstrap_values .*next_values"),
        ("compute_vtrace", GIVEN_TWICE[0], ValueError, "last_value .*next_values"),
        ("compute_vtrace", GIVEN_TWICE[1], ValueError, "bootstrap_values .*next_values"),
        (SUM, {"boundary": "begins"}, ValueError, "boundary .*ends_at.*starts_at.*begins"),
        (SUM, {"seed_values": torch.ones(2)}, ValueError, r"seed_values .*\[3\].*\[2\]"),
        ("affine_scan", {"init": torch.ones(2)}, ValueError, r"init .*\[3\].*\[2\]"),
        ("compute_gae", {"gamma": "0.9"}, TypeError, "gamma .*str"),
        ("compute_gae", {"gamma": None}, TypeError, "gamma .*None"),
        ("compute_gae", {"lambda_": [0.9]}, TypeError, "lambda_ .*list"),
        ("compute_gae", {"gamma": torch.ones(7)}, ValueError, r"gamma .*\[7\]"),
        ("compute_gae", {"gamma": torch.ones(2, 1)}, ValueError, r"gamma .*\[3, 7\].*\[2, 1\]"),
        ("compute_gae", {"lambda_": torch.ones(3, 7, 1)}, ValueError, r"lambda_ .*\[3, 7, 1\]"),
        ("compute_gae", {"time_dim": 2}, ValueError, "time_dim .*2"),
        ("compute_gae", {"time_dim": -3}, ValueError, "time_dim .*-3"),
        ("compute_gae", {"time_dim": "time"}, TypeError, "time_dim .*str"),
        ("compute_vtrace", {"rho_bar": "1"}, TypeError, "rho_bar .*str"),
        ("compute_vtrace", {"c_bar": -1.0}, ValueError, "c_bar .*-1"),
        ("compute_vtrace", {"rho_pg_bar": float("nan")}, ValueError, "rho_pg_bar .*nan"),
        ("compute_retrace", {"c_bar": None}, TypeError, "c_bar .*None"),
        ("compute_retrace", {"actions": ONES}, TypeError, "actions .*integer.*float32"),
        ("compute_retrace", {"next_q_values_all": FOUR_ACTIONS}, ValueError, "next_q_values_all .*3.*4"),
        ("compute_retrace", {"next_action_probs_target": FOUR_ACTIONS}, ValueError, "3 actions|4 actions"),
        ("compute_retrace", {"next_q_values_all": ONES}, ValueError, r"next_q_values_all .*\[3, 7\]"),
        ("compute_gae", {"values": ONES.long()}, TypeError, "values .*int64"),
        ("compute_gae", {"last_value": ONE_ENV.int()}, TypeError, "last_value .*int32"),
        ("compute_gae", {"bootstrap_values": ONES.bool()}, TypeError, "bootstrap_values .*bool"),
        ("compute_vtrace", {"log_pi_target": ONES.long()}, TypeError, "log_pi_target .*int64"),
        ("compute_retrace", {"q_values": ONES.long()}, TypeError, "q_values .*int64"),
        ("compute_lambda_returns", {"next_values": ONES.long()}, TypeError, "next_values .*int64"),
    ],
)  # fmt: skip
def test_messages(name, changes, error, message):
    fails(name, changes, error, message)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_without_a_time_axis(name):
    required, _ = tensor_arguments(name)
    scalars = {key: torch.tensor(1.0) for key in required}
    with pytest.raises((TypeError, ValueError), match="|".join(required)):
        call(getattr(rl_triton, name), problem(name) | scalars)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mixed_devices(name):
    """Metadata alone decides, so that a tensor without data serves as one on another device."""
    kwargs = problem(name)
    first, *others = tensor_arguments(name)[0]
    for key in others:
        elsewhere = kwargs | {key: kwargs[key].to("meta")}
        with pytest.raises(ValueError, match="cpu") as caught:
            call(getattr(rl_triton, name), elsewhere)
        assert "meta" in str(caught.value)
        assert key in str(caught.value) or first in str(caught.value)


@pytest.mark.parametrize("key", ["gamma", "lambda_"])
def test_coefficients_on_another_device(key):
    fails("compute_gae", {key: torch.ones((), device="meta")}, ValueError, f"{key} .*cpu.*meta")


def test_errors_come_from_the_kernel_path_too(path, device):
    fails("compute_gae", {"values": torch.ones(3, 8, device=device)}, ValueError, "values", device=device)


def test_retrace_warns_once_of_the_approximated_policy(monkeypatch):
    monkeypatch.setattr("rl_triton.functional._warned_next_policy", False)
    kwargs = problem("compute_retrace")
    with pytest.warns(UserWarning, match="next_action_probs_target"):
        rl_triton.compute_retrace(**kwargs)
    # A second warning would be an error here.
    rl_triton.compute_retrace(**kwargs)


@pytest.mark.parametrize("number", [Fraction, np.float64, np.float32])
def test_a_coefficient_may_be_any_real_number(path, device, number):
    kwargs = problem("compute_gae", device=device)
    (expected,) = call(rl_triton.compute_gae, kwargs | {"gamma": 0.75, "lambda_": 0.5})
    given = {"gamma": number(0.75), "lambda_": number(0.5)}
    assert torch.equal(call(rl_triton.compute_gae, kwargs | given)[0], expected)
