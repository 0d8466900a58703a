"""Factors above 1, whose products overflow where the states they carry are zero."""

import math

import pytest
import torch

import rl_triton


@pytest.mark.parametrize("T", [5, 64, 130])
@pytest.mark.parametrize("time_dim", [0, -1])
def test_zeros_stay_zeros(path, device, T, time_dim):
    shape = (T, 3) if time_dim == 0 else (3, T)
    a, b = torch.zeros(shape, device=device), torch.full(shape, 1e20, device=device)
    for reverse in (False, True):
        assert (rl_triton.affine_scan(a, b, reverse=reverse, time_dim=time_dim) == 0).all()


@pytest.mark.parametrize("c_bar", [100.0, math.inf])
def test_large_ratios_behind_zero_errors(path, device, c_bar):
    zeros = torch.zeros(2, 64, device=device)
    behind = torch.full_like(zeros, -3.0)
    for y in rl_triton.compute_vtrace(zeros, behind, zeros, zeros, zeros, gamma=1.0, c_bar=c_bar):
        assert (y == 0).all()
    retrace = rl_triton.compute_retrace_from_log_probs
    for y in retrace(zeros, behind, zeros, zeros, zeros, zeros, gamma=1.0, c_bar=c_bar):
        assert (y == 0).all()


def test_a_nan_factor_shows_before_a_zero_state(path, device):
    a = torch.zeros(1, 6, device=device)
    b = torch.tensor([[1.0, 1.0, math.nan, 1.0, 1.0, 1.0]], device=device)
    assert rl_triton.affine_scan(a, b, reverse=True).isnan().tolist() == [[True] * 3 + [False] * 3]


def test_no_actions_is_an_error(path, device):
    probs, step = torch.zeros(1, 3, 0, device=device), torch.zeros(1, 3, device=device)
    with pytest.raises(ValueError, match="action_probs_target must have at least one action"):
        rl_triton.compute_retrace(
            probs, step, step, probs, step.long(), step, step, next_action_probs_target=probs
        )


def test_a_single_row_is_not_handed_back(path, device):
    a = torch.tensor([[torch.inf], [1.0]], device=device)
    b = torch.zeros_like(a)
    y = rl_triton.affine_scan(a, b)
    assert torch.equal(y, a)
    assert y.data_ptr() != a.data_ptr()
    gradient = torch.func.grad(lambda a: rl_triton.affine_scan(a, b).sum())
    assert torch.equal(gradient(a), torch.ones_like(a))
