"""Random shapes, layouts, dtypes, flags and special floats, each against the float64 loop."""

import pytest
import torch
from cases import (
    COEFFICIENTS,
    EDGES,
    FLAG_DTYPES,
    FLAGS,
    FUNCTIONS,
    LAYOUTS,
    PER_ACTION,
    TOLERANCE,
    assert_close,
    call,
    choices,
    oracle,
    problem,
)  # fmt: skip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import rl_triton

INTERPRETED = not torch.cuda.is_available()
SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-30, 1.0)


@st.composite
def problems(draw, largest):
    """A function with its arguments: every axis of freedom that the signature leaves."""
    name = draw(st.sampled_from(FUNCTIONS))
    rank = draw(st.integers(1, 3))
    batch = tuple(draw(st.lists(st.integers(0, 4), min_size=rank - 1, max_size=rank - 1)))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    kwargs = problem(
        name,
        batch,
        draw(st.integers(0, largest)),
        draw(st.sampled_from(choices(name))),
        time_dim=draw(st.integers(-rank, rank - 1)),
        dtype=dtype,
        flag_dtype=draw(st.sampled_from(FLAG_DTYPES)),
        layout=draw(st.sampled_from([*LAYOUTS, "mixed"])),
        seed=draw(st.integers(0, 2**16)),
    )
    shape = next(x.shape for key, x in kwargs.items() if key in FLAGS | {"a"})
    for key in sorted(COEFFICIENTS & set(kwargs)):
        if draw(st.booleans()):
            size = [draw(st.sampled_from((1, n))) for n in shape]
            kwargs[key] = torch.rand(size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        else:
            kwargs[key] = draw(st.sampled_from((0.0, 0.5, 0.99, 1.0)))
    if name == "compute_episodic_prefix_sum":
        kwargs["boundary"] = draw(st.sampled_from(("ends_at", "starts_at")))
    if name == "affine_scan":
        kwargs["reverse"] = draw(st.booleans())
    tensors = [key for key, x in kwargs.items() if isinstance(x, Tensor) and key not in EDGES | COEFFICIENTS]
    narrow = draw(st.sampled_from([None, *tensors]))
    if narrow is not None and rank > 1:
        axis = draw(st.integers(0, rank - 1))
        kwargs[narrow] = kwargs[narrow].narrow(axis, 0, min(1, kwargs[narrow].shape[axis]))
    return name, kwargs


@st.composite
def spoiled(draw, largest):
    """The same with special floats in some of the slots that take numbers."""
    name, kwargs = draw(problems(largest))
    numbers = [
        key
        for key, x in kwargs.items()
        if isinstance(x, Tensor)
        and x.is_floating_point()
        and x.numel() > 0
        and key not in FLAGS | COEFFICIENTS | PER_ACTION | {"b", "action_probs_behavior"}
    ]
    for _ in range(draw(st.integers(1, 3)) if numbers else 0):
        key = draw(st.sampled_from(numbers))
        kwargs[key] = kwargs[key].clone()
        slot = tuple(draw(st.integers(0, size - 1)) for size in kwargs[key].shape)
        kwargs[key][slot] = draw(st.sampled_from(SPECIAL))
    return name, kwargs


def check(drawn, path, device):
    name, kwargs = drawn
    time_dim = kwargs["time_dim"]
    kwargs = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    assert_close(call(getattr(rl_triton, name), kwargs), oracle(name, kwargs), time_dim)


@pytest.mark.parametrize("strategy", [problems, spoiled])
def test_against_the_loop(path, device, strategy):
    slow = path == "kernel" and INTERPRETED

    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=30 if slow else 300,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(strategy(largest=5 if slow else 40))
    def examine(drawn):
        check(drawn, path, device)

    examine()
