"""What only a GPU shows: launches, synchronisation, streams, CUDA graphs, devices, and large shapes."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from cases import FULL, assert_close, call, choice_id, oracle, problem
from poison import floating
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import rl_triton

pytestmark = pytest.mark.gpu

every_function = pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
SEVEN = FULL[:3] + FULL[4:8]


@contextmanager
def no_synchronisation():
    """An error at every synchronisation of the host with the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels_of(function):
    """The names of the kernels that a call launches, copies and fills among them."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]


@pytest.mark.parametrize(("N", "T"), [(4096, 128), (1, 1), (7, 33), (512, 4096), (16, 2000)])
@pytest.mark.parametrize("time_dim", [-1, 0])
@every_function
def test_one_launch(device, name, given, N, T, time_dim):
    kwargs = problem(name, (N,), T, given, time_dim=time_dim, device=device)
    launched = kernels_of(lambda: call(getattr(rl_triton, name), kwargs))
    assert len(launched) == 1, launched


@pytest.mark.parametrize("layout", ["contiguous", "reversed", "expanded"])
@every_function
def test_views_are_read_where_they_lie(device, name, given, layout):
    kwargs = problem(name, (64,), 32, given, layout=layout, device=device)
    launched = kernels_of(lambda: call(getattr(rl_triton, name), kwargs))
    assert len(launched) == 1, launched


def test_more_launches_would_be_noticed(device):
    x = torch.ones(4, device=device)
    assert len(kernels_of(lambda: x + 1 + x)) == 2


@pytest.mark.parametrize("T", [64, 100_000])
@every_function
def test_no_synchronisation(device, name, given, T):
    kwargs = problem(name, (8,), T, given, device=device)
    coefficients = {k: torch.tensor(kwargs[k], device=device) for k in ("gamma", "lambda_") if k in kwargs}
    keys = floating(kwargs)
    asking = {k: x.clone().requires_grad_() if k in keys else x for k, x in kwargs.items()}
    function = getattr(rl_triton, name)
    with no_synchronisation():
        call(function, kwargs)
        call(function, kwargs | coefficients)
        outputs = call(function, asking)
        torch.autograd.grad(outputs, [asking[k] for k in keys], [torch.ones_like(y) for y in outputs])


def test_a_synchronisation_would_be_noticed(device):
    x = torch.ones(1, device=device)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        x.item()


@every_function
def test_cuda_graph(device, name, given):
    kwargs = problem(name, (65,), 33, given, device=device)
    function = getattr(rl_triton, name)
    call(function, kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(function, kwargs)
    fresh = problem(name, (65,), 33, given, device=device, seed=1)
    for key, x in fresh.items():
        if isinstance(x, Tensor):
            kwargs[key].copy_(x)
    graph.replay()
    assert all(map(torch.equal, outputs, call(function, fresh)))


CAPTURE_AT_ONCE = """
import torch, rl_triton
rewards, values = torch.randn(2, 4096, 128, device="cuda")
terminateds = torch.rand(4096, 128, device="cuda") < 0.01
last_value = torch.randn(4096, device="cuda")
{warmup}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    advantages = rl_triton.compute_gae(rewards, values, terminateds, last_value=last_value)
graph.replay()
expected = rl_triton.compute_gae(rewards, values, terminateds, last_value=last_value)
assert torch.equal(advantages, expected)
"""


@pytest.mark.parametrize(
    "warmup",
    [
        "rl_triton.warmup(rl_triton.compute_gae, rewards, values, terminateds, last_value=last_value)",
        "rl_triton.warmup((4096, 128), ['compute_gae'])",
    ],
)
def test_capture_right_after_warmup(warmup):
    """In a process of its own, where nothing has been compiled or loaded."""
    code = CAPTURE_AT_ONCE.format(warmup=warmup)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@every_function
def test_the_current_stream_is_used(device, name, given):
    """On a side stream that is still busy writing the inputs, and with the default stream idle."""
    final = problem(name, (512,), 128, given, device=device)
    kwargs = {k: torch.zeros_like(x) if isinstance(x, Tensor) else x for k, x in final.items()}
    function = getattr(rl_triton, name)
    expected = call(function, final)
    call(function, kwargs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for key, x in final.items():
            if isinstance(x, Tensor):
                kwargs[key].copy_(x)
        outputs = call(function, kwargs)
    stream.synchronize()
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize(("N", "T"), [(1, 2**20), (3, 200_003), (64, 8192), (4096, 128)])
@every_function
def test_runs_are_bit_identical(device, name, given, N, T):
    kwargs = problem(name, (N,), T, given, device=device)
    function = getattr(rl_triton, name)
    first = call(function, kwargs)
    for _ in range(5):
        assert all(map(torch.equal, first, call(function, kwargs)))


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize(("N", "T"), [(3, 200_003), (100_003, 1)])
@pytest.mark.parametrize(("name", "given"), SEVEN, ids=choice_id)
def test_large_shapes(device, name, given, N, T, time_dim):
    kwargs = problem(name, (N,), T, given, time_dim=time_dim, device=device)
    assert_close(call(getattr(rl_triton, name), kwargs), oracle(name, kwargs), time_dim)


@pytest.mark.parametrize(("name", "given"), SEVEN, ids=choice_id)
def test_a_million_steps_of_one_environment(device, name, given):
    kwargs = problem(name, (1,), 2**20, given, device=device)
    assert_close(call(getattr(rl_triton, name), kwargs), oracle(name, kwargs))


# PyTorch opens its pool of graphs with an empty one.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty:UserWarning")
@every_function
def test_compiled_with_cuda_graphs(device, name, given):
    function = getattr(rl_triton, name)

    def outputs(kwargs):
        result = function(**kwargs)
        return result if isinstance(result, tuple) else (result,)

    compiled = torch.compile(outputs, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        kwargs = problem(name, (65,), 33, given, device=device, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip(compiled(kwargs), call(function, kwargs), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_function
def test_low_precision_is_one_rounding_of_float32(device, name, given, dtype):
    kwargs = problem(name, (64,), 128, given, dtype=dtype, device=device)
    in_float32 = {k: x.float() if k in floating(kwargs) else x for k, x in kwargs.items()}
    function = getattr(rl_triton, name)
    in_float32 = tuple(y.double().cpu() for y in call(function, in_float32))
    assert_close(call(function, kwargs), in_float32)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.multi_gpu
@every_function
def test_tensors_on_another_device_than_the_current_one(name, given, current):
    kwargs = problem(name, given=given, device="cuda:1")
    with torch.cuda.device(current):
        outputs = call(getattr(rl_triton, name), kwargs)
        assert torch.cuda.current_device() == current
    assert all(y.device == torch.device("cuda:1") for y in outputs)
    assert_close(outputs, oracle(name, kwargs))


@pytest.mark.multi_gpu
def test_two_devices_in_turn():
    problems = [problem("compute_gae", (64,), 128, device=f"cuda:{index}") for index in (0, 1, 0, 1)]
    first, *others = [call(rl_triton.compute_gae, kwargs)[0].cpu() for kwargs in problems]
    assert all(torch.equal(first, other) for other in others)
