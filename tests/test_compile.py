"""torch.compile without graph breaks or recompiles, and functorch's transforms."""

import shutil
from typing import Any

import pytest
import torch
from cases import FULL, as_tuple, call, choice_id, problem
from poison import floating
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import rl_triton

every_function = pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(name: str, backend: Any = "aot_eager", **options: Any) -> Any:
    function = getattr(rl_triton, name)

    def outputs(kwargs):
        return as_tuple(function(**kwargs))

    return torch.compile(outputs, backend=backend, fullgraph=True, **options)


def same(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dynamic", [False, True])
@every_function
def test_one_graph(path, device, name, given, dynamic):
    kwargs = problem(name, given=given, device=device)
    same(compiled(name, dynamic=dynamic)(kwargs), call(getattr(rl_triton, name), kwargs))


@pytest.mark.parametrize("time_dim", [-1, 0])
@every_function
def test_no_recompile_as_sizes_change(device, name, given, time_dim):
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(name, counter, dynamic=True)
    counts = []
    # Sizes that are equal at first are taken to be equal ever after, so that all of them differ here.
    for N, T in ((5, 7), (6, 9), (16, 32), (33, 17)):
        kwargs = problem(name, (N,), T, given, time_dim=time_dim, device=device)
        same(function(kwargs), call(getattr(rl_triton, name), kwargs))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@every_function
def test_gradients_through_a_compiled_call(device, name, given, dynamic):
    kwargs = problem(name, given=given, device=device)
    keys = floating(kwargs)

    def gradients(function):
        inputs = {key: kwargs[key].clone().requires_grad_() for key in keys}
        loss = torch.stack([y.square().sum() for y in function(kwargs | inputs)]).sum()
        return torch.autograd.grad(loss, list(inputs.values()))

    same(
        gradients(compiled(name, dynamic=dynamic)),
        gradients(lambda kwargs: call(getattr(rl_triton, name), kwargs)),
    )


@pytest.mark.parametrize("key", ["gamma", "lambda_"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["compute_lambda_returns", "compute_vtrace", "compute_eligibility_traces"])
def test_numbers_that_change(device, name, graph, key):
    kwargs = problem(name, device=device)
    for x in (kwargs[k] for k in floating(kwargs)):
        x.requires_grad_(graph)
    function = compiled(name)
    for number in (0.9, 0.95, 0.99, 0.0, 1.0):
        same(function(kwargs | {key: number}), call(getattr(rl_triton, name), kwargs | {key: number}))


def test_a_tensor_gamma_is_no_reason_to_recompile(path, device):
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled("compute_gae", counter, dynamic=True)
    counts = []
    for gamma in (0.9, 0.95, 0.99):
        kwargs = problem("compute_gae", device=device, gamma=torch.tensor(gamma, device=device))
        same(function(kwargs), call(rl_triton.compute_gae, kwargs))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler backend needs a C++ compiler")
def test_fused_with_its_surroundings(device):
    """What a training step does around the call, in one graph of the default backend."""
    kwargs = problem("compute_gae", given=("truncateds", "last_value"), device=device)

    def step(kwargs):
        advantages, targets = rl_triton.compute_gae(**kwargs, return_targets=True)
        return (advantages - advantages.mean()) / advantages.std(), targets.flatten()

    same(torch.compile(step, fullgraph=True)(kwargs), step(kwargs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler backend needs a C++ compiler")
def test_gradients_of_odd_shapes(device):
    """The default backend counts on the place and the order of what an operator returns."""
    kwargs = problem("compute_gae", (3,), 31, time_dim=0, device=device)
    kwargs["values"].requires_grad_()
    function: Any = rl_triton.compute_gae

    def loss(kwargs):
        return function(**kwargs).square().sum()

    (expected,) = torch.autograd.grad(loss(kwargs), kwargs["values"])
    torch.compile(loss, fullgraph=True)(kwargs).backward()
    torch.testing.assert_close(kwargs["values"].grad, expected)


@every_function
def test_vmap_over_a_leading_axis(path, device, name, given):
    stacked = problem(name, (4, 3), 7, given, device=device)
    tensors = {k: x for k, x in stacked.items() if isinstance(x, Tensor)}
    others = {k: x for k, x in stacked.items() if k not in tensors}
    function = getattr(rl_triton, name)
    mapped = torch.func.vmap(lambda tensors: call(function, tensors | others))(tensors)
    same(mapped, call(function, stacked))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("transform", "compiler"),
    [("grad", "outside"), ("jvp", "outside"), ("vmap of grad", "outside"), ("vmap of grad", "inside")],
)
@every_function
def test_transforms_and_the_compiler(device, name, given, transform, compiler):
    """A wrapped tensor does not say that it is one, least of all to a compiler."""
    kwargs = problem(name, (2,), 5, given, dtype=torch.float64, device=device)
    keys = floating(kwargs)
    values = tuple(kwargs[key] for key in keys)
    function = getattr(rl_triton, name)

    def outputs(*values):
        return as_tuple(function(**kwargs | dict(zip(keys, values, strict=True))))

    def loss(*values):
        return torch.stack([y.square().sum() for y in outputs(*values)]).sum()

    def transformed(outputs, loss):
        gradients = torch.func.grad(loss, argnums=tuple(range(len(keys))))
        if transform == "grad":
            return gradients(*values)
        if transform == "jvp":
            return torch.func.jvp(outputs, values, tuple(map(torch.ones_like, values)))[1]
        return torch.func.vmap(gradients)(*[torch.stack([x, 2 * x]) for x in values])

    expected = transformed(outputs, loss)
    if compiler == "inside":
        got = transformed(*[torch.compile(f, backend="aot_eager") for f in (outputs, loss)])
    else:
        got = torch.compile(transformed, backend="aot_eager", fullgraph=True)(outputs, loss)
    same(got, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_a_graph_made_for_gradients_is_not_taken_for_tangents(device):
    kwargs = problem("compute_gae", dtype=torch.float64, device=device)
    function = compiled("compute_gae", "eager")
    rewards, tangent = kwargs["rewards"].requires_grad_(), torch.ones_like(kwargs["rewards"])
    function(kwargs)[0].sum().backward()
    with forward_ad.dual_level():
        (dual,) = function(kwargs | {"rewards": forward_ad.make_dual(rewards, tangent)})
        got = forward_ad.unpack_dual(dual).tangent

    def eager(rewards):
        return rl_triton.compute_gae(**kwargs | {"rewards": rewards})

    torch.testing.assert_close(got, torch.func.jvp(eager, (rewards,), (tangent,))[1])
