"""Dtypes of inputs, flags and outputs, and what a call leaves untouched."""

import pytest
import torch
from cases import (
    COEFFICIENTS,
    FLAG_DTYPES,
    FLAGS,
    FULL,
    TOLERANCE,
    assert_close,
    call,
    choice_id,
    oracle,
    problem,
    thorough,
)
from poison import floating
from torch import Tensor

import rl_triton

every_function = pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)


@pytest.mark.parametrize("dtype", TOLERANCE)
@every_function
def test_floating_dtypes(path, device, name, given, dtype):
    kwargs = problem(name, T=9, given=given, dtype=dtype, device=device)
    outputs = call(getattr(rl_triton, name), kwargs)
    assert all(y.dtype == dtype for y in outputs)
    assert_close(outputs, oracle(name, kwargs))


@pytest.mark.parametrize("flag_dtype", FLAG_DTYPES)
@pytest.mark.parametrize(("name", "given"), thorough(FULL, quick=FULL[0::7]), ids=choice_id)
def test_flag_dtypes_give_the_same_bits(path, device, name, given, flag_dtype):
    kwargs = problem(name, given=given, device=device)
    true = 1 if flag_dtype == torch.bool else 3
    recast = {k: x.to(flag_dtype) * true if k in FLAGS else x for k, x in kwargs.items()}
    function = getattr(rl_triton, name)
    assert all(map(torch.equal, call(function, kwargs), call(function, recast)))


def test_a_true_flag_may_be_any_byte(path, device):
    kwargs = problem("compute_gae", given=("truncateds", "valid"), device=device)
    bytes_255 = {k: (x.byte() * 255).view(torch.bool) if k in FLAGS else x for k, x in kwargs.items()}
    function = rl_triton.compute_gae
    assert all(map(torch.equal, call(function, kwargs), call(function, bytes_255)))


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float32),
]
INTEGERS = [
    ("compute_discounted_returns", "rewards"),
    ("compute_episodic_prefix_sum", "inputs"),
    ("compute_eligibility_traces", "gradients"),
]


@pytest.mark.parametrize(("one", "others"), MIXED)
@pytest.mark.parametrize(("name", "given"), thorough(FULL, quick=FULL[0::7]), ids=choice_id)
def test_mixed_dtypes_promote(path, device, name, given, one, others):
    kwargs = problem(name, given=given, dtype=others, device=device)
    for key in floating(kwargs):
        mixed = kwargs | {key: kwargs[key].to(one)}
        outputs = call(getattr(rl_triton, name), mixed)
        assert all(y.dtype == torch.promote_types(one, others) for y in outputs)
        assert_close(outputs, oracle(name, mixed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gamma_and_lambda_do_not_count(path, device, dtype):
    kwargs = problem("compute_gae", device=device)
    coefficients = {key: torch.tensor(0.5, dtype=dtype, device=device) for key in COEFFICIENTS}
    (output,) = call(rl_triton.compute_gae, kwargs | coefficients)
    assert output.dtype == torch.float32
    assert_close((output,), oracle("compute_gae", kwargs | {"gamma": 0.5, "lambda_": 0.5}))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(("name", "key"), INTEGERS)
def test_integers_alone_give_the_default_dtype(path, device, name, key, dtype):
    kwargs = problem(name, device=device)
    kwargs[key] = torch.arange(21, device=device).view(3, 7).to(dtype)
    outputs = call(getattr(rl_triton, name), kwargs)
    assert outputs[0].dtype == torch.get_default_dtype()
    assert_close(outputs, oracle(name, kwargs))


def test_the_default_dtype_may_change_between_calls(path, device):
    rewards = torch.ones(3, 7, dtype=torch.int64, device=device)
    terminateds = torch.zeros(3, 7, device=device)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert rl_triton.compute_discounted_returns(rewards, terminateds).dtype == dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_integer_rewards_beside_floats_do_not_count(path, device, dtype):
    kwargs = problem("compute_gae", dtype=dtype, device=device)
    kwargs["rewards"] = torch.arange(21, device=device).view(3, 7) % 3
    (output,) = call(rl_triton.compute_gae, kwargs)
    assert output.dtype == dtype
    assert_close((output,), oracle("compute_gae", kwargs))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_actions_of_any_integer_dtype(path, device, dtype):
    kwargs = problem("compute_retrace", given=("next_action_probs_target",), device=device)
    recast = kwargs | {"actions": kwargs["actions"].to(dtype)}
    assert all(
        map(torch.equal, call(rl_triton.compute_retrace, kwargs), call(rl_triton.compute_retrace, recast))
    )


@pytest.mark.parametrize("actions", [1, 2, 5, 16, 17, 64])
def test_any_number_of_actions(path, device, actions):
    kwargs = problem("compute_retrace", given=("truncateds", "next_action_probs_target"), device=device)
    generator = torch.Generator().manual_seed(actions)
    for key in ("action_probs_target", "next_action_probs_target", "next_q_values_all"):
        kwargs[key] = torch.randn(3, 7, actions, generator=generator).softmax(-1).to(device)
    kwargs["actions"] = torch.randint(actions, (3, 7), generator=generator).to(device)
    for given in (kwargs, {k: x for k, x in kwargs.items() if k != "next_action_probs_target"}):
        assert_close(call(rl_triton.compute_retrace, given), oracle("compute_retrace", given))


@every_function
def test_inputs_are_left_alone_and_shared_with_no_output(path, device, name, given):
    # With one row several functions return what they were given.
    for T in (1, 7):
        kwargs = problem(name, T=T, given=given, device=device)
        tensors = {k: x for k, x in kwargs.items() if isinstance(x, Tensor)}
        before = {k: x.clone() for k, x in tensors.items()}
        outputs = call(getattr(rl_triton, name), kwargs)
        storages = [x.untyped_storage().data_ptr() for x in (*outputs, *tensors.values())]
        assert len(set(storages)) == len(storages)
        assert all(torch.equal(tensors[k], before[k]) for k in tensors)


@pytest.mark.parametrize(("gamma", "lambda_"), [(0.9999, 0.999999), (0.999, 0.999)])
def test_gamma_and_lambda_are_rounded_each_before_they_are_multiplied(gamma, lambda_):
    T = 4096
    traces = rl_triton.compute_eligibility_traces(torch.ones(1, T), torch.zeros(1, T), gamma, lambda_)[0]
    decay = torch.tensor(gamma).double() * torch.tensor(lambda_).double()
    expected = (1 - decay ** torch.arange(1, T + 1)) / (1 - decay)
    torch.testing.assert_close(traces.double(), expected, rtol=1e-5, atol=0)
