"""Gradients of every function to every floating input."""

import functools

import pytest
import torch
from cases import ALL_CHOICES, FULL, MAIN, call, choice_id, oracle, problem, thorough
from poison import fill, floating, poisonable, unread
from torch.autograd import forward_ad

import rl_triton


def with_gradients(kwargs, keys):
    return kwargs | {key: kwargs[key].detach().clone().requires_grad_() for key in keys}


def gradients(outputs, kwargs, keys):
    """The gradient of a fixed random combination of the outputs."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    return torch.autograd.grad(outputs, [kwargs[key] for key in keys], weights)


@pytest.mark.parametrize(("name", "given"), ALL_CHOICES, ids=choice_id)
def test_gradcheck(device, name, given):
    kwargs = poisonable(name, given, batch=(2,), T=4, dtype=torch.float64, device=device)
    keys = floating(kwargs)
    kwargs = with_gradients({k: x.double() if k in keys else x for k, x in kwargs.items()}, keys)

    def function(*inputs):
        return call(getattr(rl_triton, name), kwargs | dict(zip(keys, inputs, strict=True)))

    assert torch.autograd.gradcheck(function, [kwargs[key] for key in keys], fast_mode=True)


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_gradients_are_those_of_the_loop(path, device, name, given, time_dim):
    kwargs = poisonable(name, given, T=17, time_dim=time_dim, device=device)
    keys = floating(kwargs)
    kwargs = with_gradients(kwargs, keys)
    expected = gradients(oracle(name, kwargs), kwargs, keys)
    actual = gradients(call(getattr(rl_triton, name), kwargs), kwargs, keys)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_large_rollouts_keep_their_memory_order(path, device, name, given, monkeypatch):
    monkeypatch.setattr("rl_triton.scan._SMALL", 0)
    test_gradients_are_those_of_the_loop(path, device, name, given, time_dim=-1)


@pytest.mark.parametrize("form", [(), (3, 1), (1, 9), (3, 9)], ids=["0-d", "per env", "per step", "full"])
def test_gradients_to_every_form_of_gamma(path, device, form):
    kwargs = problem("compute_gae", T=9, device=device)
    generator = torch.Generator().manual_seed(0)
    for key in ("gamma", "lambda_"):
        kwargs[key] = (0.5 + 0.5 * torch.rand(form, generator=generator)).to(device)
    keys = ("gamma", "lambda_")
    kwargs = with_gradients(kwargs, keys)
    expected = gradients(oracle("compute_gae", kwargs), kwargs, keys)
    actual = gradients(call(rl_triton.compute_gae, kwargs), kwargs, keys)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == form
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("name", "given"), thorough(ALL_CHOICES, quick=MAIN), ids=choice_id)
def test_unread_slots_get_exactly_zero(path, device, name, given, zeros):
    kwargs = poisonable(name, given, zeros=zeros, device=device)
    masks = unread(name, kwargs)
    keys = floating(kwargs)
    for value in (torch.nan, torch.inf):
        filled = with_gradients(fill(kwargs, masks, value), keys)
        actual = gradients(call(getattr(rl_triton, name), filled), filled, keys)
        for key, gradient in zip(keys, actual, strict=True):
            assert (gradient[masks[key]] == 0).all(), key
            assert gradient.isfinite().all(), key


@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_one_input_alone(device, name, given):
    """A gradient to one input is the same whether or not the others ask for theirs."""
    kwargs = poisonable(name, given, device=device)
    keys = floating(kwargs)
    together = with_gradients(kwargs, keys)
    expected = gradients(call(getattr(rl_triton, name), together), together, keys)
    for key, want in zip(keys, expected, strict=True):
        alone = with_gradients(kwargs, [key])
        torch.testing.assert_close(gradients(call(getattr(rl_triton, name), alone), alone, [key])[0], want)


@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_no_graph_unless_it_is_asked_for(path, device, name, given):
    kwargs = poisonable(name, given, device=device)
    asking = with_gradients(kwargs, floating(kwargs))
    function = getattr(rl_triton, name)
    assert all(y.requires_grad for y in call(function, asking))
    assert not any(y.requires_grad for y in call(function, kwargs))
    with torch.no_grad():
        assert not any(y.requires_grad for y in call(function, asking))
    with torch.inference_mode():
        assert all(y.is_inference() for y in call(function, asking))


@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_outputs_with_and_without_a_graph_agree(path, device, name, given):
    kwargs = poisonable(name, given, T=17, device=device)
    function = getattr(rl_triton, name)
    with_graph = call(function, with_gradients(kwargs, floating(kwargs)))
    for got, want in zip(with_graph, call(function, kwargs), strict=True):
        torch.testing.assert_close(got.detach(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_have_the_dtype_of_their_input(path, device, dtype):
    kwargs = problem("compute_gae", dtype=dtype, device=device)
    kwargs = with_gradients(kwargs, ("rewards", "values"))
    assert all(
        g.dtype == dtype
        for g in gradients(call(rl_triton.compute_gae, kwargs), kwargs, ("rewards", "values"))
    )


@pytest.mark.parametrize(("batch", "T"), [((3,), 0), ((0,), 4)])
def test_empty_gradients(path, device, batch, T):
    kwargs = with_gradients(problem("compute_gae", batch, T, device=device), ("rewards", "values"))
    for gradient in gradients(call(rl_triton.compute_gae, kwargs), kwargs, ("rewards", "values")):
        assert gradient.shape == (*batch, T)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_init", [False, True])
def test_transforms_of_the_scan(path, device, reverse, with_init):
    generator = torch.Generator().manual_seed(0)
    a, b, da, db = torch.rand(4, 3, 9, generator=generator, dtype=torch.float64).to(device)
    inputs, tangents = [a, b], [da, db]
    if with_init:
        inputs.append(a[:, 0])
        tangents.append(da[:, 0])

    def function(a, b, init=None):
        return rl_triton.affine_scan(a, b, init=init, reverse=reverse)

    tangent = torch.func.jvp(function, tuple(inputs), tuple(tangents))[1]
    step = 1e-6
    pairs = list(zip(inputs, tangents, strict=True))
    ahead = function(*[x + step * dx for x, dx in pairs])
    behind = function(*[x - step * dx for x, dx in pairs])
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)
    for number in range(len(inputs)):
        by_rows = torch.func.jacrev(function, argnums=number)(*inputs)
        torch.testing.assert_close(torch.func.jacfwd(function, argnums=number)(*inputs), by_rows)


AT_ZERO = pytest.mark.parametrize(
    ("name", "given", "key", "value"),
    [
        *[(name, given, "gamma", 0.0) for name, given in FULL[:-2]],
        *[(name, given, "lambda_", 1.0) for name, given in FULL if name == "compute_lambda_returns"],
        *[
            (name, given, "next_action_probs_target", 0.0)
            for name, given in FULL
            if name == "compute_retrace"
        ],
        *[(name, given, "b", 0.0) for name, given in FULL if name == "affine_scan"],
    ],
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@AT_ZERO
def test_derivatives_through_a_zero_coefficient(path, device, name, given, key, value):
    """At an exact zero a product reads nothing, and changes with the coefficient all the same."""
    kwargs = problem(name, (2,), 5, given, dtype=torch.float64, device=device)
    whole = torch.ones_like(kwargs[key]) if isinstance(kwargs.get(key), torch.Tensor) else 1.0

    def of(number):
        return torch.stack(call(getattr(rl_triton, name), kwargs | {key: number * whole}))

    at, step = torch.tensor(value, dtype=torch.float64, device=device), 1e-6
    expected = (of(at + step) - of(at - step)) / (2 * step)
    assert expected.any()
    asking = at.clone().requires_grad_()
    (total,) = torch.autograd.grad(of(asking).sum(), asking)
    batch = torch.stack([at, at]).requires_grad_()
    (per_environment,) = torch.autograd.grad(torch.func.vmap(of)(batch).sum(), batch)
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    close(total, expected.sum())
    close(per_environment, expected.sum().expand(2))
    for derivative in (torch.func.jacfwd(of), torch.func.jacrev(of)):
        close(derivative(at), expected)
        close(torch.func.vmap(derivative)(batch.detach())[1], expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@AT_ZERO
def test_second_derivatives_at_a_zero_coefficient(path, device, name, given, key, value):
    """Of the coefficient, and mixed with a factor of every other input; each mode over each."""
    kwargs = problem(name, (2,), 5, given, dtype=torch.float64, device=device)
    whole = torch.ones_like(kwargs[key]) if isinstance(kwargs.get(key), torch.Tensor) else 1.0
    others = [k for k in floating(kwargs) if k != key]

    def of(numbers):
        scaled = {k: kwargs[k] * factor for k, factor in zip(others, numbers[1:], strict=True)}
        outputs = call(getattr(rl_triton, name), kwargs | scaled | {key: numbers[0] * whole})
        return torch.stack(outputs).square().sum()

    at = torch.ones(1 + len(others), dtype=torch.float64, device=device)
    at[0] = value
    forward, backward, step = torch.func.jacfwd, torch.func.jacrev, 1e-6
    first = backward(of)
    steps = step * torch.eye(len(at), dtype=torch.float64, device=device)
    expected = torch.stack([(first(at + dx) - first(at - dx)) / (2 * step) for dx in steps])
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    for outer in (forward, backward):
        for inner in (forward, backward):
            close(outer(inner(of))(at), expected)
    close(torch.autograd.functional.hessian(of, at), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("mode", ["forward-mode", "reverse-mode"])
def test_jacobians_of_many_tangents_at_once(path, device, mode, time_dim):
    kwargs = problem("compute_gae", (2,), 4, time_dim=time_dim, dtype=torch.float64, device=device)

    def of(rewards):
        return call(rl_triton.compute_gae, kwargs | {"rewards": rewards})[0]

    jacobian = torch.autograd.functional.jacobian(of, kwargs["rewards"], vectorize=True, strategy=mode)
    torch.testing.assert_close(jacobian, torch.func.jacrev(of)(kwargs["rewards"]))


def test_a_zero_ratio_hides_an_error_that_overflows(path, device):
    large, steps = torch.tensor([[3e38, 1.0]], device=device), torch.zeros(1, 2, device=device)
    never = torch.tensor([[-torch.inf, -0.1]], device=device)
    for log_pi in (never, never.clone().requires_grad_()):
        targets, advantages = rl_triton.compute_vtrace(log_pi, steps, -large, large, steps)
        assert targets[0, 0] == -large[0, 0]
        assert advantages[0, 0] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_tangents_outside_torch_func(path, device, name, given):
    """Dual numbers give what `torch.func.jvp` gives, and leave nothing behind for the calls that follow."""
    kwargs = problem(name, (2,), 5, given, dtype=torch.float64, device=device)
    keys = floating(kwargs)
    function = getattr(rl_triton, name)
    plain = call(function, kwargs)
    tangents = [torch.ones_like(kwargs[key]) for key in keys]

    def of(*values):
        return call(function, kwargs | dict(zip(keys, values, strict=True)))

    expected = torch.func.jvp(of, tuple(kwargs[key] for key in keys), tuple(tangents))[1]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(kwargs[key], tangent) for key, tangent in zip(keys, tangents)]
        got = [forward_ad.unpack_dual(y).tangent for y in of(*duals)]
    for y, due in zip(got, expected, strict=True):
        torch.testing.assert_close(y, due)
    assert all(map(torch.equal, call(function, kwargs), plain))


def test_gradients_per_environment(path, device):
    kwargs = problem("compute_gae", T=8, device=device)
    keys = ("rewards", "values", "terminateds")

    def loss(*inputs):
        (advantages,) = call(rl_triton.compute_gae, kwargs | dict(zip(keys, inputs, strict=True)))
        return advantages.square().sum()

    asking = with_gradients(kwargs, ["rewards"])
    (expected,) = torch.autograd.grad(loss(*(asking[key] for key in keys)), asking["rewards"])
    inputs = [kwargs[key] for key in keys]
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(*inputs), expected)
