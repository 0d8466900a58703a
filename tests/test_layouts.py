"""Memory layouts, ranks, the time axis, broadcasting, and empty inputs."""

import pytest
import torch
from cases import (
    BACKWARD,
    EDGES,
    FULL,
    LAYOUTS,
    PER_ACTION,
    as_tuple,
    assert_close,
    call,
    choice_id,
    oracle,
    problem,
    thorough,
)
from torch import Tensor

import rl_triton

every_function = pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)


def check(name, kwargs):
    outputs = call(getattr(rl_triton, name), kwargs)
    assert all(y.is_contiguous() for y in outputs)
    assert_close(outputs, oracle(name, kwargs), kwargs["time_dim"])
    return outputs


SHAPES = [((5,), -1), ((5,), 0), ((2, 3), -2), ((2, 3), 1), ((2, 3), 0), ((), 0), ((2, 1, 3), -3)]


@pytest.mark.parametrize("layout", thorough([*LAYOUTS, "mixed"], quick=("expanded", "mixed")))
@pytest.mark.parametrize(("batch", "time_dim"), thorough(SHAPES, quick=SHAPES[1:4]))
@every_function
def test_layouts(path, device, name, given, batch, time_dim, layout):
    check(name, problem(name, batch, 5, given, time_dim=time_dim, layout=layout, device=device))


@every_function
def test_permuted_batches_give_the_same_bits(path, device, name, given):
    kwargs = problem(name, (9,), 5, given, device=device)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0)).to(device)
    permuted = {k: x[order] if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    function = getattr(rl_triton, name)
    for y, y_permuted in zip(call(function, kwargs), call(function, permuted), strict=True):
        assert torch.equal(y[order], y_permuted)


@every_function
def test_two_runs_give_the_same_bits(path, device, name, given):
    kwargs = problem(name, (3,), 9, given, device=device)
    function = getattr(rl_triton, name)
    assert all(map(torch.equal, call(function, kwargs), call(function, kwargs)))


@pytest.mark.parametrize("time_dim", thorough([-1, 0], quick=[-1]))
@every_function
def test_per_step_inputs_broadcast(path, device, name, given, time_dim):
    """Every input in turn comes once for the team, or once for all steps."""
    kwargs = problem(name, (3,), 4, given, time_dim=time_dim, device=device)
    full = [k for k, x in kwargs.items() if isinstance(x, Tensor) and k not in EDGES]
    for key in full:
        for axis in (0, 1):
            one = kwargs | {key: kwargs[key].narrow(axis, 0, 1)}
            check(name, one)


def test_team_reward_for_every_agent(path, device):
    team = problem("compute_gae", (1,), 7, time_dim=0, device=device)
    agents = problem("compute_gae", (4,), 7, time_dim=0, device=device, seed=1)
    kwargs = team | {"values": agents["values"]}
    assert check("compute_gae", kwargs)[0].shape == (7, 4)


@every_function
def test_edge_values_with_a_time_axis(path, device, name, given):
    kwargs = problem(name, (3,), 7, given, device=device)
    with_axis = {k: x.unsqueeze(-1) if k in EDGES else x for k, x in kwargs.items()}
    function = getattr(rl_triton, name)
    assert all(map(torch.equal, call(function, kwargs), call(function, with_axis)))


@every_function
def test_a_negation_that_pytorch_has_put_off(path, device, name, given):
    """The imaginary part of a conjugated tensor is a view whose memory holds its negative."""
    kwargs = problem(name, (3,), 4, given, device=device)
    keys = [k for k, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()]

    def imaginary(key):
        return torch.complex(torch.zeros_like(kwargs[key]), kwargs[key])

    plain = kwargs | {key: imaginary(key).imag for key in keys}
    late = kwargs | {key: imaginary(key).neg().conj().imag for key in keys}
    assert all(late[key].is_neg() and not plain[key].is_neg() for key in keys)
    function = getattr(rl_triton, name)
    expected = call(function, plain)
    for _ in range(2):
        assert all(map(torch.equal, call(function, late), expected))


@pytest.mark.parametrize(("batch", "T"), [((3,), 0), ((0,), 5), ((0,), 0), ((2, 0), 3), ((), 0)])
@every_function
def test_empty_in_empty_out(path, device, name, given, batch, T):
    kwargs = problem(name, batch, T, given, device=device)
    outputs = call(getattr(rl_triton, name), kwargs)
    assert len(outputs) == len(as_tuple(oracle(name, kwargs)))
    assert all(y.shape == (*batch, T) and y.dtype == torch.float32 for y in outputs)


@pytest.mark.parametrize("name", BACKWARD)
def test_features_share_their_flags(path, device, name):
    """`[B, T, F]` values with `[B, T, 1]` flags: the columns are those of separate calls."""
    kwargs = problem(name, (2, 3), 7, ("truncateds",), time_dim=-2, device=device)
    for key in ("terminateds", "truncateds"):
        kwargs[key] = kwargs[key][..., :1]
    whole = check(name, kwargs)
    for f in range(3):

        def column(key, x, f=f):
            axis = -2 if key in PER_ACTION else -1
            return x if x.shape[axis] == 1 else x.narrow(axis, f, 1)

        one = {k: column(k, x) if isinstance(x, Tensor) else x for k, x in kwargs.items()}
        assert_close(
            call(getattr(rl_triton, name), one), tuple(y[..., f : f + 1].double().cpu() for y in whole), -2
        )


@pytest.mark.parametrize("stride", ["batch", "time"])
@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(device, stride):
    """Rows that lie 2^31 elements apart in a buffer that is never written as a whole."""
    apart = 2**31 + 8
    kwargs = problem("compute_gae", (2,), 2, dtype=torch.bfloat16, device=device)
    expected = oracle("compute_gae", kwargs)
    order = (1, apart) if stride == "time" else (apart, 1)
    for key in ("rewards", "values", "terminateds"):
        buffer = torch.empty(apart + 2, dtype=kwargs[key].dtype, device=device)
        kwargs[key] = buffer.as_strided((2, 2), order).copy_(kwargs[key])
    assert_close(call(rl_triton.compute_gae, kwargs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**15 + 1, 2**16), (2**24 + 1, 2**7)])
@pytest.mark.parametrize("time_dim", [0, 1])
def test_more_than_two_to_the_31_elements(device, shape, time_dim):
    """Stride-0 inputs: nothing but the output is large, and every row of it is the same."""
    row = problem("compute_gae", (1,), shape[1], dtype=torch.bfloat16, device=device)
    (expected,) = oracle("compute_gae", row)
    wide = {k: x.expand(shape) if isinstance(x, Tensor) else x for k, x in row.items()}
    if time_dim == 0:
        wide = {k: x.T if isinstance(x, Tensor) else x for k, x in wide.items()}
    (output,) = call(rl_triton.compute_gae, wide | {"time_dim": time_dim})
    output = output.T if time_dim == 0 else output
    for n in (0, shape[0] // 2, shape[0] - 1):
        assert_close((output[n],), (expected[0],))
