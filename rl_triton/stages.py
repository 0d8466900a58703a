"""The formulas in plain PyTorch: what goes into the scan and what is made of its result.

Each stage takes the inputs with time on axis 0 and returns a `Scan`: the coefficients `a` and `b` of
`y[t] = a[t] + b[t] * y[t +- 1]` and a function from `y` to the outputs. This is the path of the CPU
and of gradients. Whatever must not be read is replaced before any arithmetic, so that neither its value
nor its gradient can carry a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._layout import COEFFICIENTS, EDGES, FLAGS, PER_ACTION
from .scan import hidden, join, transformed


class Scan(NamedTuple):
    a: Tensor
    b: Tensor
    outputs: Callable[[Tensor], tuple[Tensor, ...]]
    init: Tensor | None = None
    reverse: bool = True


class Rows(NamedTuple):
    """What the flags make of each row; an invalid row counts as terminated and cut."""

    terminated: Tensor
    truncated: Tensor
    cut: Tensor


def keep_valid(x: Any) -> Any:
    """The inputs with a neutral value in every slot of an invalid row."""
    if x.valid is None:
        return x
    masked = {}
    for name, value in x._asdict().items():
        if value is None or name in FLAGS | EDGES | COEFFICIENTS:
            continue
        valid = x.valid.unsqueeze(-1) if name in PER_ACTION else x.valid
        # A behaviour probability divides, so that its neutral value is 1.
        masked[name] = torch.where(valid, value, 1 if name == "action_probs_behavior" else 0)
    return x._replace(**masked)


def rows(x: Any) -> Rows:
    terminated = x.terminateds
    truncated = torch.zeros_like(terminated) if x.truncateds is None else x.truncateds
    cut = terminated | truncated
    if x.valid is not None:
        invalid = ~x.valid
        terminated = terminated | invalid
        cut = cut | invalid | _next(invalid)
    last = torch.ones_like(cut[:1])
    return Rows(terminated, truncated, join(cut, [cut[:-1], last]))


def readable(x: Any, *coefficients: Tensor | float) -> Any:
    """`x` as a product with these coefficients reads it: where one is 0, an infinity or a NaN is not read."""
    if not isinstance(x, Tensor):
        return x
    for c in coefficients:
        if isinstance(c, Tensor) and (c.requires_grad or transformed()):
            # What is finite stays, for the sake of the coefficient's own derivative.
            x = hidden(c, x)
        elif isinstance(c, Tensor):
            x = torch.where(c == 0, 0, x)
        elif c == 0:
            x = torch.where(torch.ones_like(x, dtype=torch.bool), 0, x)
    return x


def scale(c: Tensor | float, x: Tensor) -> Tensor:
    """`c * x` where a zero coefficient selects."""
    return c * readable(x, c)


def where_kept(mask: Tensor, c: Tensor | float) -> Tensor | float:
    """A coefficient with 0 on the rows that do not read it; a number that is finite does no harm there."""
    # `math.isfinite` takes no number of a compiler's.
    return torch.where(mask, c, 0) if isinstance(c, Tensor) or c - c != 0 else c


def discount(x: Any, at: Rows) -> Tensor | float:
    """gamma where a next value counts."""
    return where_kept(~at.terminated, x.gamma)


def decay(x: Any, kept: Tensor, like: Tensor) -> Tensor:
    """gamma * lambda on the rows kept, 0 elsewhere, each of them rounded before they are multiplied."""
    gamma = torch.where(kept, x.gamma, torch.zeros((), dtype=like.dtype, device=like.device))
    return gamma * where_kept(kept, x.lambda_)


def next_value(x: Any, at: Rows) -> Tensor:
    """The value of `s'_t` for each row by the contract's table, 0 on terminated rows."""
    edge, bootstrap, given = x.last_value, x.bootstrap_values, x.next_values
    if given is not None and bootstrap is None and edge is None:
        return torch.where(at.terminated, 0, given)
    if bootstrap is not None:
        at_cut = bootstrap
    else:
        at_cut = torch.zeros_like(x.rewards) if given is None else given
    last = at_cut[-1]
    if edge is not None:
        last = edge if bootstrap is None else torch.where(at.truncated[-1], last, edge)
    elif given is not None:
        last = torch.where(at.truncated[-1], last, given[-1])
    at_cut = join(at_cut, [at_cut[:-1], last.unsqueeze(0)])
    if given is None:
        given = 0 if x.values is None else _next(x.values)
    return torch.where(at.terminated, 0, torch.where(at.cut, at_cut, given))


def gae(x: Any, scalars: tuple[float, ...], options: tuple[Any, ...]) -> Scan:
    (return_targets,) = options
    x = keep_valid(x)
    at = rows(x)
    a = x.rewards + scale(discount(x, at), next_value(x, at)) - x.values
    b = decay(x, ~at.cut, a)
    return Scan(a, b, lambda y: (y, y + x.values) if return_targets else (y,))


def lambda_returns(x: Any, scalars: tuple[float, ...], options: tuple[Any, ...]) -> Scan:
    x = keep_valid(x)
    at = rows(x)
    one = torch.ones((), dtype=x.rewards.dtype, device=x.rewards.device)
    bootstrapped = torch.where(at.cut, one, one - x.lambda_)
    a = x.rewards + scale(discount(x, at) * bootstrapped, next_value(x, at))
    return Scan(a, decay(x, ~at.cut, a), lambda y: (y,))


def vtrace(x: Any, scalars: tuple[float, ...], options: tuple[Any, ...]) -> Scan:
    rho_bar, c_bar, rho_pg_bar = scalars
    x = keep_valid(x)
    at = rows(x)
    log_ratio = x.log_pi_target - x.log_pi_behavior
    rho = _clipped_exp(log_ratio, rho_bar)
    c = _clipped_exp(log_ratio, c_bar)
    rho_pg = rho if rho_pg_bar == rho_bar else _clipped_exp(log_ratio, rho_pg_bar)
    v_next = next_value(x, at)
    a = _weighted_error(x, at, rho, v_next, x.values)
    b = scale(decay(x, ~at.cut, a), torch.where(at.cut, 0, c))
    return Scan(a, b, lambda y: _corrected(x, at, y, x.values, v_next, rho_pg))


def retrace(x: Any, scalars: tuple[float, ...], options: tuple[Any, ...]) -> Scan:
    """From action probabilities: the expectation over the next actions first, then the ratio form."""
    c_bar, rho_bar = scalars
    x = keep_valid(x)
    at = rows(x)
    pi, actions = x.action_probs_target, x.actions.unsqueeze(-1)
    cut, terminated = at.cut.unsqueeze(-1), at.terminated.unsqueeze(-1)
    pi_next = x.next_action_probs_target
    if pi_next is None:
        pi_next = torch.where(cut, pi, _next(pi))
    g = discount(x, at)
    g = g.unsqueeze(-1) if isinstance(g, Tensor) else g
    pi_next = readable(torch.where(terminated, 0, pi_next), g)
    q_next = readable(torch.where(terminated, 0, x.next_q_values_all), g)
    products = scale(pi_next, q_next)
    # Along the innermost axis a sum does not depend on where its row stands.
    expected = (products if products.stride(-1) == 1 else products.contiguous()).sum(-1)
    pi_taken = pi.gather(-1, actions).squeeze(-1)
    mu = x.action_probs_behavior
    return _retrace(
        x, at, expected, _clipped_ratio(pi_taken, mu, c_bar), _clipped_ratio(pi_taken, mu, rho_bar)
    )


def retrace_from_log_probs(x: Any, scalars: tuple[float, ...], options: tuple[Any, ...]) -> Scan:
    c_bar, rho_bar = scalars
    x = keep_valid(x)
    at = rows(x)
    expected = torch.where(at.terminated, 0, x.expected_next_q_values)
    log_ratio = x.log_pi_target - x.log_pi_behavior
    return _retrace(x, at, expected, _clipped_exp(log_ratio, c_bar), _clipped_exp(log_ratio, rho_bar))


def traces(x: Any, scalars: tuple[float, ...], options: tuple[Any, ...]) -> Scan:
    """Forward: row t takes row t-1's decay unless a boundary lies between them."""
    (starts_at,) = options
    x = keep_valid(x)
    step = x[0]
    cut = x.dones if starts_at else _previous(x.dones, x.seed_values is None)
    if starts_at and x.seed_values is None:
        cut = join(cut, [torch.ones_like(cut[:1]), cut[1:]])
    if x.valid is not None:
        cut = cut | ~x.valid | ~_previous(x.valid, True)
    x = x._replace(gamma=_previous_coefficient(x.gamma), lambda_=_previous_coefficient(x.lambda_))
    return Scan(step, decay(x, ~cut, step), lambda y: (y,), init=x.seed_values, reverse=False)


def affine(x: Any, scalars: tuple[float, ...], options: tuple[Any, ...]) -> Scan:
    (reverse,) = options
    b = x.b
    if x.init is None:
        # Nothing enters the first row.
        b = join(b, [b[:-1], torch.zeros_like(b[:1])] if reverse else [torch.zeros_like(b[:1]), b[1:]])
    return Scan(x.a, b, lambda y: (y,), init=x.init, reverse=reverse)


def _retrace(x: Any, at: Rows, expected: Tensor, c: Tensor, rho: Tensor) -> Scan:
    a = x.rewards + scale(discount(x, at), expected) - x.q_values
    b = scale(decay(x, ~at.cut, a), torch.where(at.cut, 0, _next(c)))
    return Scan(a, b, lambda y: _corrected(x, at, y, x.q_values, expected, rho))


def _corrected(
    x: Any, at: Rows, y: Tensor, baseline: Tensor, v_next: Tensor, rho: Tensor
) -> tuple[Tensor, ...]:
    """Targets, and advantages that look one step ahead to the next row's target."""
    target = y + baseline
    ahead = torch.where(at.cut, v_next, _next(target))
    return target, _weighted_error(x, at, rho, ahead, baseline)


def _weighted_error(x: Any, at: Rows, rho: Tensor, v_next: Tensor, baseline: Tensor) -> Tensor:
    """`rho * (r + gamma v' - v)`."""
    g = readable(discount(x, at), rho)
    error = readable(x.rewards, rho) + g * readable(v_next, rho, g) - readable(baseline, rho)
    return scale(rho, error)


def _clipped_exp(log_ratio: Tensor, bound: float) -> Tensor:
    """min(bound, exp(log_ratio)), clipped before the exponential so that no infinity appears; NaN stays."""
    return torch.exp(torch.clamp(log_ratio, max=math.log(bound) if bound > 0 else -math.inf))


def _clipped_ratio(pi: Tensor, mu: Tensor, bound: float) -> Tensor:
    """min(bound, pi / mu); 0 / 0 stays NaN."""
    over = pi > bound * mu
    return torch.where(over, bound, pi / torch.where(over, 1, mu))


def _next(x: Tensor) -> Tensor:
    """Row t+1 at row t; the last row, which is always cut, repeats itself."""
    return join(x, [x[1:], x[-1:]])


def _previous(x: Tensor, first: bool) -> Tensor:
    return join(x, [torch.full_like(x[:1], first), x[:-1]])


def _previous_coefficient(c: Tensor | float) -> Tensor | float:
    if not isinstance(c, Tensor) or c.dim() == 0:
        return c
    return join(c, [c[:1], c[:-1]])
