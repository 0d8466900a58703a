"""What people run instead on the same inputs: one set of formulas under several scans, and TorchRL's own.

The formulas are written for `[N, T]` and for torch and NumPy alike. A baseline gets its inputs in the form it
wants before the clock starts, and is checked against the same reference as the library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch._higher_order_ops.associative_scan import associative_scan

from .grid import Case

LOOP, DOUBLING, ASSOCIATIVE = "Python loop", "compiled doubling scan", "compiled associative_scan"
NUMPY, TORCHRL, TORCHRL_VECTORIZED = "NumPy", "TorchRL functional", "TorchRL vectorized functional"
TORCHRL_MODULE, TORCHRL_MODULE_VECTORIZED = "TorchRL module", "TorchRL module, vectorized"
VALUE_FORWARD = "one value forward"
COMPILED = (DOUBLING, ASSOCIATIVE)

# Beyond these a baseline takes seconds per call, or minutes to compile.
LONGEST = {LOOP: 4096, DOUBLING: 65536, NUMPY: 65536, TORCHRL: 2048, TORCHRL_VECTORIZED: 4096}
# Other people's float32 code may sum in another order or drop small weights.
TOLERANCE = 1e-4

# A torch tensor or a NumPy array.
Array = Any
Scan = Callable[[Array, Array, bool], Array]


def of(
    case: Case, inputs: dict[str, Array], options: dict[str, Any], compiles: bool
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The baselines of a batch-major case: name to a function that readies one and returns its call."""
    device = next(iter(inputs.values())).device

    def compiled(scan: Scan) -> Callable[[], Any]:
        run = partial(composed, case.algorithm, scan)
        return partial(
            torch.compile(run, fullgraph=True, dynamic=False) if compiles else run, **inputs, **options
        )

    def numpy() -> Callable[[], Any]:
        arrays = {name: x.cpu().numpy() for name, x in inputs.items()}
        return partial(composed, case.algorithm, loop_scan, **arrays, **options)

    mode = "pointwise" if device.type == "cuda" else "generic"
    ready = {
        DOUBLING: partial(compiled, doubling_scan),
        ASSOCIATIVE: partial(compiled, partial(torch_scan, mode)),
        LOOP: lambda: partial(composed, case.algorithm, loop_scan, **inputs, **options),
        NUMPY: numpy,
    }
    for name, functions in ((TORCHRL, TORCHRL_LOOPS), (TORCHRL_VECTORIZED, TORCHRL_VECTORS)):
        if case.algorithm in functions:
            ready[name] = partial(torchrl, case.algorithm, functions[case.algorithm], inputs, options)
    return {name: build for name, build in ready.items() if case.seq_len <= LONGEST.get(name, case.seq_len)}


def composed(algorithm: str, scan: Scan, **arguments: Any) -> Any:
    """The algorithm's formulas around a scan."""
    return FORMULAS[algorithm](scan, **arguments)


def loop_scan(a: Array, b: Array, reverse: bool) -> Array:
    y = _module(a).empty_like(a)
    order = range(a.shape[1])
    carry = None
    for t in reversed(order) if reverse else order:
        carry = a[:, t] if carry is None else a[:, t] + b[:, t] * carry
        y[:, t] = carry
    return y


def doubling_scan(a: Array, b: Array, reverse: bool) -> Array:
    """Hillis and Steele: after step k every row holds the composition of 2^k rows."""
    pad = torch.nn.functional.pad
    step = 1
    while step < a.shape[1]:
        if reverse:
            a_far, b_far = pad(a[:, step:], (0, step)), pad(b[:, step:], (0, step))
        else:
            a_far, b_far = pad(a[:, :-step], (step, 0)), pad(b[:, :-step], (step, 0))
        a, b = a + b * a_far, b * b_far
        step *= 2
    return a


def torch_scan(mode: str, a: Array, b: Array, reverse: bool) -> Array:
    def combine(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[1] + second[0] * first[1]

    return associative_scan(combine, (b, a), dim=1, reverse=reverse, combine_mode=mode)[1]


def value_of_next(
    values: Array,
    last_value: Array | None,
    truncateds: Array | None,
    bootstrap_values: Array | None,
    next_values: Array | None,
) -> Array:
    """`V(s'_t)` on every row that reads it."""
    if next_values is not None:
        return next_values
    following = _next(values, last_value)
    return following if truncateds is None else _module(values).where(truncateds, bootstrap_values, following)


def _gae(
    scan: Scan,
    rewards: Array,
    values: Array,
    terminateds: Array,
    last_value: Array = None,
    truncateds: Array = None,
    bootstrap_values: Array = None,
    next_values: Array = None,
    *,
    gamma: float,
    lambda_: float,
    return_targets: bool,
) -> Any:
    v_next = value_of_next(values, last_value, truncateds, bootstrap_values, next_values)
    a = rewards + _unless(terminateds, gamma * v_next) - values
    y = scan(a, _unless(_done(terminateds, truncateds), gamma * lambda_), True)
    return (y, y + values) if return_targets else y


def _vtrace(
    scan: Scan,
    log_pi_target: Array,
    log_pi_behavior: Array,
    values: Array,
    rewards: Array,
    terminateds: Array,
    last_value: Array = None,
    truncateds: Array = None,
    bootstrap_values: Array = None,
    next_values: Array = None,
    *,
    gamma: float,
) -> tuple[Array, Array]:
    xp = _module(values)
    v_next = value_of_next(values, last_value, truncateds, bootstrap_values, next_values)
    rho = xp.clip(xp.exp(log_pi_target - log_pi_behavior), None, 1.0)
    done = _done(terminateds, truncateds)
    a = rho * (rewards + _unless(terminateds, gamma * v_next) - values)
    targets = scan(a, _unless(done, gamma * rho), True) + values
    ahead = xp.where(done, v_next, _next(targets, v_next[:, -1]))
    return targets, rho * (rewards + _unless(terminateds, gamma * ahead) - values)


def _retrace(
    scan: Scan,
    action_probs_target: Array,
    action_probs_behavior: Array,
    q_values: Array,
    next_q_values_all: Array,
    actions: Array,
    rewards: Array,
    terminateds: Array,
    next_action_probs_target: Array,
    truncateds: Array = None,
    *,
    gamma: float,
    lambda_: float,
) -> tuple[Array, Array]:
    xp = _module(rewards)
    take = np.take_along_axis if xp is np else torch.take_along_dim
    rho = xp.clip(
        take(action_probs_target, actions[..., None], -1)[..., 0] / action_probs_behavior, None, 1.0
    )
    expected = (next_action_probs_target * next_q_values_all).sum(-1)
    done = _done(terminateds, truncateds)
    a = rewards + _unless(terminateds, gamma * expected) - q_values
    targets = scan(a, _unless(done, gamma * lambda_ * _next(rho, rho[:, -1])), True) + q_values
    ahead = xp.where(done, expected, _next(targets, expected[:, -1]))
    return targets, rho * (rewards + _unless(terminateds, gamma * ahead) - q_values)


def _lambda_returns(
    scan: Scan,
    rewards: Array,
    next_values: Array,
    terminateds: Array,
    truncateds: Array = None,
    *,
    gamma: float,
    lambda_: float,
) -> Array:
    xp = _module(rewards)
    done = _done(terminateds, truncateds)
    cut = xp.concatenate([done[:, :-1], xp.ones_like(done[:, -1:])], 1)
    mixed = xp.where(cut, next_values, (1 - lambda_) * next_values)
    return scan(rewards + _unless(terminateds, gamma * mixed), _unless(done, gamma * lambda_), True)


def _discounted_returns(
    scan: Scan,
    rewards: Array,
    terminateds: Array,
    last_value: Array,
    truncateds: Array = None,
    bootstrap_values: Array = None,
    *,
    gamma: float,
) -> Array:
    at_cut = value_of_next(0.0 * rewards, last_value, truncateds, bootstrap_values, None)
    a = rewards + _unless(terminateds, gamma * at_cut)
    return scan(a, _unless(_done(terminateds, truncateds), gamma), True)


def _eligibility_traces(scan: Scan, gradients: Array, dones: Array, *, gamma: float, lambda_: float) -> Array:
    return scan(gradients, _unless(_previous(dones), gamma * lambda_), False)


def _episodic_prefix_sum(scan: Scan, inputs: Array, dones: Array) -> Array:
    return scan(inputs, _unless(_previous(dones), 1.0), False)


FORMULAS: dict[str, Callable[..., Any]] = {
    "gae": _gae,
    "vtrace": _vtrace,
    "retrace": _retrace,
    "lambda_returns": _lambda_returns,
    "discounted_returns": _discounted_returns,
    "eligibility_traces": _eligibility_traces,
    "episodic_prefix_sum": _episodic_prefix_sum,
}


def _module(x: Array) -> Any:
    return np if isinstance(x, np.ndarray) else torch


def _next(x: Array, last: Array) -> Array:
    """Row t holds `x[t+1]`, the last row holds `last`."""
    return _module(x).concatenate([x[:, 1:], last[:, None]], 1)


def _previous(flags: Array) -> Array:
    """Row t holds `flags[t−1]`, row 0 is false."""
    xp = _module(flags)
    return xp.concatenate([xp.zeros_like(flags[:, :1]), flags[:, :-1]], 1)


def _done(terminateds: Array, truncateds: Array | None) -> Array:
    return terminateds if truncateds is None else terminateds | truncateds


def _unless(flags: Array, x: Array | float) -> Array:
    """`x`, and 0 where a flag is set, in the precision of the inputs."""
    if isinstance(flags, np.ndarray):
        return np.where(flags, np.float32(0), np.float32(x))
    return torch.where(flags, 0.0, x)


TORCHRL_LOOPS = {
    "gae": "generalized_advantage_estimate",
    "vtrace": "vtrace_advantage_estimate",
    "lambda_returns": "td_lambda_return_estimate",
    "discounted_returns": "td1_return_estimate",
}
TORCHRL_VECTORS = {
    "gae": "vec_generalized_advantage_estimate",
    "lambda_returns": "vec_td_lambda_return_estimate",
    "discounted_returns": "vec_td1_return_estimate",
}


def torchrl(
    algorithm: str, function: str, inputs: dict[str, Array], options: dict[str, Any]
) -> Callable[[], Any]:
    """One of TorchRL's functions on `[N, T, 1]` views, next values and done flags made beforehand."""
    estimate = getattr(import_module("torchrl.objectives.value.functional"), function)
    values = inputs.get("values", torch.zeros_like(inputs["rewards"]))
    v_next = value_of_next(
        values,
        inputs.get("last_value"),
        inputs.get("truncateds"),
        inputs.get("bootstrap_values"),
        inputs.get("next_values"),
    )
    column = {
        "next_state_value": v_next,
        "reward": inputs["rewards"],
        "done": _done(inputs["terminateds"], inputs.get("truncateds")),
        "terminated": inputs["terminateds"],
    }
    if algorithm in ("gae", "vtrace"):
        column["state_value"] = values
    if algorithm == "vtrace":
        column |= {"log_pi": inputs["log_pi_target"], "log_mu": inputs["log_pi_behavior"]}
    arguments = {name: x.unsqueeze(-1) for name, x in column.items()} | {"gamma": options["gamma"]}
    if "lambda_" in options:
        arguments["lmbda"] = options["lambda_"]
    # V-trace returns the advantages first.
    order = -1 if algorithm == "vtrace" else 1

    def call() -> tuple[Array, ...]:
        outputs = estimate(**arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(y.squeeze(-1) for y in outputs)[::order]

    return call
