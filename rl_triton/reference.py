"""The public functions as sequential loops in float64, straight from their definitions.

The oracle of the tests and benchmarks: it shares no code with the library, checks nothing, and computes on
the CPU whatever device the inputs are on. Signatures are those of the public functions; the result is always
float64. `gamma` and `lambda_` are used as given, so a caller who compares with fp32 rounds them first.

Inside, time is axis 0, everything is broadcast to the output's shape, and flags are bool.
"""

from __future__ import annotations

import torch
from torch import Tensor

Coefficient = float | Tensor


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: Coefficient = 0.99,
    lambda_: Coefficient = 0.95,
    bootstrap_values: Tensor | None = None,
    last_value: Tensor | None = None,
    *,
    next_values: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
    return_targets: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`A[t] = r + m γ v' − v + n γ λ A[t+1]`, and `A + v` with `return_targets`."""
    per_step = (rewards, values, terminateds, truncateds, bootstrap_values, next_values, valid)
    w = _Window(time_dim, per_step, terminateds, truncateds, valid, gamma, lambda_)
    v = w.numbers(values)
    v_next = w.next_values(v, next_values, bootstrap_values, last_value)
    delta = w.numbers(rewards) + _times(w.m_gamma, v_next) - v
    advantages = _recurrence(delta, w.n_gamma_lambda, reverse=True)
    return w.outputs(advantages, advantages + v) if return_targets else w.output(advantages)


def compute_vtrace(
    log_pi_target: Tensor,
    log_pi_behavior: Tensor,
    values: Tensor,
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: Coefficient = 0.99,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap_values: Tensor | None = None,
    last_value: Tensor | None = None,
    *,
    lambda_: Coefficient = 1.0,
    rho_pg_bar: float | None = None,
    next_values: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> tuple[Tensor, Tensor]:
    """`y[t] = ρ (r + m γ v' − v) + n γ λ c y[t+1]`; targets `y + v`, advantages `ρ_pg (r + m γ x − v)`."""
    per_step = (log_pi_target, log_pi_behavior, values, rewards, terminateds, truncateds)
    per_step += (bootstrap_values, next_values, valid)
    w = _Window(time_dim, per_step, terminateds, truncateds, valid, gamma, lambda_)
    r, v = w.numbers(rewards), w.numbers(values)
    v_next = w.next_values(v, next_values, bootstrap_values, last_value)
    ratio = torch.exp(w.numbers(log_pi_target) - w.numbers(log_pi_behavior))
    rho, c = _clip(ratio, rho_bar), _clip(ratio, c_bar)
    rho_pg = rho if rho_pg_bar is None else _clip(ratio, rho_pg_bar)

    delta = r + _times(w.m_gamma, v_next) - v
    targets = _recurrence(_times(rho, delta), _times(w.n_gamma_lambda, c), reverse=True) + v
    x = torch.where(w.cut, v_next, _from_next_row(targets))
    return w.outputs(targets, _times(rho_pg, r + _times(w.m_gamma, x) - v))


def compute_retrace(
    action_probs_target: Tensor,
    action_probs_behavior: Tensor,
    q_values: Tensor,
    next_q_values_all: Tensor,
    actions: Tensor,
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: Coefficient = 0.99,
    lambda_: Coefficient = 1.0,
    c_bar: float = 1.0,
    rho_bar: float = 1.0,
    *,
    next_action_probs_target: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> tuple[Tensor, Tensor]:
    """Retrace with `E'[t] = Σ_a π(a|s') Q(s', a)` and the ratio `π(a)/μ(a)` of the action taken."""
    per_step = (action_probs_behavior, q_values, actions, rewards, terminateds, truncateds, valid)
    per_step += tuple(
        x[..., 0] for x in (action_probs_target, next_q_values_all, next_action_probs_target) if x is not None
    )
    w = _Window(time_dim, per_step, terminateds, truncateds, valid, gamma, lambda_)
    pi = w.per_action(action_probs_target)
    if next_action_probs_target is None:
        pi_next = torch.where(w.cut.unsqueeze(-1), pi, _from_next_row(pi))
    else:
        pi_next = w.per_action(next_action_probs_target)
    expected_next_q = _times(pi_next, w.per_action(next_q_values_all)).sum(-1)

    # The action of an invalid row may be anything, also out of range.
    taken = torch.where(w.valid, w.rows(actions).long(), 0)
    ratio = pi.gather(-1, taken.unsqueeze(-1)).squeeze(-1) / w.numbers(action_probs_behavior)
    return _retrace(w, ratio, w.numbers(q_values), expected_next_q, w.numbers(rewards), c_bar, rho_bar)


def compute_retrace_from_log_probs(
    log_pi_target: Tensor,
    log_pi_behavior: Tensor,
    q_values: Tensor,
    expected_next_q_values: Tensor,
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: Coefficient = 0.99,
    lambda_: Coefficient = 1.0,
    c_bar: float = 1.0,
    rho_bar: float = 1.0,
    *,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> tuple[Tensor, Tensor]:
    """Retrace with `E'` given and the ratio `exp(log π − log μ)`."""
    per_step = (log_pi_target, log_pi_behavior, q_values, expected_next_q_values, rewards)
    per_step += (terminateds, truncateds, valid)
    w = _Window(time_dim, per_step, terminateds, truncateds, valid, gamma, lambda_)
    ratio = torch.exp(w.numbers(log_pi_target) - w.numbers(log_pi_behavior))
    expected_next_q = w.numbers(expected_next_q_values)
    return _retrace(w, ratio, w.numbers(q_values), expected_next_q, w.numbers(rewards), c_bar, rho_bar)


def _retrace(
    w: _Window, ratio: Tensor, q: Tensor, expected_next_q: Tensor, r: Tensor, c_bar: float, rho_bar: float
) -> tuple[Tensor, Tensor]:
    """`y[t] = r + m γ E' − q + n γ λ c[t+1] y[t+1]`; targets `y + q`, advantages `ρ (r + m γ x − q)`."""
    delta = r + _times(w.m_gamma, expected_next_q) - q
    c_next = _from_next_row(_clip(ratio, c_bar))
    targets = _recurrence(delta, _times(w.n_gamma_lambda, c_next), reverse=True) + q
    x = torch.where(w.cut, expected_next_q, _from_next_row(targets))
    return w.outputs(targets, _times(_clip(ratio, rho_bar), r + _times(w.m_gamma, x) - q))


def compute_lambda_returns(
    rewards: Tensor,
    next_values: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: Coefficient = 0.99,
    lambda_: Coefficient = 0.95,
    bootstrap_values: Tensor | None = None,
    *,
    last_value: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    """`G[t] = r + m γ ((1−λ) v' + λ G[t+1])`, and `r + m γ v'` on cut rows."""
    per_step = (rewards, next_values, terminateds, truncateds, bootstrap_values, valid)
    w = _Window(time_dim, per_step, terminateds, truncateds, valid, gamma, lambda_)
    given, bootstrap, last = w.numbers(next_values), w.optional(bootstrap_values), w.edge(last_value)
    v_next = w.pick(
        elsewhere=given,
        at_cut=_first(bootstrap, given),
        last_truncated=_first(_last_row(bootstrap), last, _last_row(given)),
        last_open=_first(last, _last_row(given)),
    )
    mixed = torch.where(w.cut, v_next, _times(1 - w.lambda_, v_next))
    returns = w.numbers(rewards) + _times(w.m_gamma, mixed)
    return w.output(_recurrence(returns, w.n_gamma_lambda, reverse=True))


def compute_discounted_returns(
    rewards: Tensor,
    terminateds: Tensor,
    truncateds: Tensor | None = None,
    gamma: Coefficient = 0.99,
    bootstrap_values: Tensor | None = None,
    *,
    last_value: Tensor | None = None,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    """`G[t] = r + γ G[t+1]`, and `r + m γ v'` on cut rows."""
    per_step = (rewards, terminateds, truncateds, bootstrap_values, valid)
    w = _Window(time_dim, per_step, terminateds, truncateds, valid, gamma, 1.0)
    r = w.numbers(rewards)
    v_next = w.next_values(torch.zeros_like(r), None, bootstrap_values, last_value)
    at_cut = torch.where(w.cut, v_next, 0.0)
    return w.output(_recurrence(r + _times(w.m_gamma, at_cut), w.n_gamma_lambda, reverse=True))


def compute_eligibility_traces(
    gradients: Tensor,
    dones: Tensor,
    gamma: Coefficient,
    lambda_: Coefficient,
    seed_values: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    """`z[t] = x[t] + γ[t−1] λ[t−1] z[t−1]`, and `x[t]` after a done row; row 0 weighs the seed."""
    w = _Window(time_dim, (gradients, dones, valid), dones, None, valid, gamma, lambda_)
    decay = w.gamma * w.lambda_
    return w.forward(gradients, _from_previous_row(w.done), _from_previous_row(decay, decay), seed_values)


def compute_episodic_prefix_sum(
    inputs: Tensor,
    dones: Tensor,
    seed_values: Tensor | None = None,
    boundary: str = "ends_at",
    *,
    valid: Tensor | None = None,
    time_dim: int = -1,
) -> Tensor:
    """`y[t] = x[t] + y[t−1]` within an episode; a done row ends its episode, or starts it (`starts_at`)."""
    w = _Window(time_dim, (inputs, dones, valid), dones, None, valid, 1.0, 1.0)
    opens = w.done if boundary == "starts_at" else _from_previous_row(w.done)
    return w.forward(inputs, opens, w.gamma, seed_values)


def affine_scan(
    a: Tensor, b: Tensor, *, init: Tensor | None = None, reverse: bool = False, time_dim: int = -1
) -> Tensor:
    """`y[t] = a[t] + b[t] y[t−1]`, or `y[t+1]` with `reverse`; `init` is the `y` before the first row."""
    frame = _Frame(time_dim, (a, b))
    start = frame.edge(init)
    y = _recurrence(frame.numbers(a), frame.numbers(b), None if start is None else start[0], reverse=reverse)
    return frame.to_layout(y)


def _times(coefficient: Tensor, x: Tensor) -> Tensor:
    """`coefficient * x`, where a zero coefficient does not read `x`."""
    return coefficient * torch.where(coefficient == 0, 0.0, x)


def _clip(ratio: Tensor, bar: float) -> Tensor:
    """`min(bar, ratio)`, where NaN stays NaN."""
    return torch.where(ratio > bar, bar, ratio)


def _recurrence(a: Tensor, b: Tensor, carry: Tensor | None = None, *, reverse: bool = False) -> Tensor:
    """`y[t] = a[t] + b[t] · carry`, row after row; a first row that nothing is carried into is `a`."""
    rows = list(zip(a.unbind(), b.unbind(), strict=True))
    y = []
    for a_t, b_t in reversed(rows) if reverse else rows:
        carry = a_t if carry is None else a_t + _times(b_t, carry)
        y.append(carry)
    if not y:
        return a
    return torch.stack(y[::-1] if reverse else y)


def _from_next_row(x: Tensor) -> Tensor:
    """Row t holds `x[t+1]`; the last row, where there is none, holds zero."""
    return torch.cat([x[1:], torch.zeros_like(x[-1:])])


def _from_previous_row(x: Tensor, first: Tensor | None = None) -> Tensor:
    """Row t holds `x[t−1]`; row 0 holds that of `first`, or zero."""
    return torch.cat([torch.zeros_like(x[:1]) if first is None else first[:1], x[:-1]])


def _last_row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[-1:]


def _first(*options: Tensor | None) -> Tensor:
    """The first source that was given."""
    return next(x for x in options if x is not None)


class _Frame:
    """The broadcast shape of the per-step inputs and where time lies in it."""

    def __init__(self, time_dim: int, per_step: tuple[Tensor | None, ...]):
        self.shape = torch.broadcast_shapes(*(x.shape for x in per_step if x is not None))
        self.time_dim = time_dim % len(self.shape)

    def rows(self, x: Tensor | float) -> Tensor:
        return torch.as_tensor(x).cpu().expand(self.shape).movedim(self.time_dim, 0)

    def numbers(self, x: Tensor | float) -> Tensor:
        # A Python float must not pass through float32 on its way.
        x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
        return self.rows(x.double())

    def optional(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.numbers(x)

    def per_action(self, x: Tensor) -> Tensor:
        return x.double().cpu().expand(*self.shape, x.shape[-1]).movedim(self.time_dim, 0)

    def edge(self, x: Tensor | None) -> Tensor | None:
        """A value per batch entry, given with or without a time axis of size 1, as a single row."""
        if x is None:
            return None
        x = x.double().cpu()
        if x.ndim < len(self.shape):
            x = x.unsqueeze(self.time_dim)
        return x.movedim(self.time_dim, 0)

    def to_layout(self, y: Tensor) -> Tensor:
        return y.movedim(0, self.time_dim).contiguous()


class _Window(_Frame):
    """A frame with its episode boundaries and coefficients."""

    def __init__(
        self,
        time_dim: int,
        per_step: tuple[Tensor | None, ...],
        terminateds: Tensor,
        truncateds: Tensor | None,
        valid: Tensor | None,
        gamma: Coefficient,
        lambda_: Coefficient,
    ):
        super().__init__(time_dim, per_step)
        self.terminated = self.rows(terminateds) != 0
        self.truncated = self.rows(False if truncateds is None else truncateds) != 0
        self.valid = self.rows(True if valid is None else valid) != 0
        self.done = self.terminated | self.truncated
        self.before_invalid = _from_next_row(~self.valid)
        self.last = torch.zeros_like(self.done)
        self.last[-1:] = True
        self.cut = self.done | self.last | self.before_invalid
        self.gamma, self.lambda_ = self.numbers(gamma), self.numbers(lambda_)
        self.m_gamma = torch.where(self.terminated, 0.0, self.gamma)
        self.n_gamma_lambda = torch.where(self.cut, 0.0, self.gamma * self.lambda_)

    def pick(self, *, elsewhere: Tensor, at_cut: Tensor, last_truncated: Tensor, last_open: Tensor) -> Tensor:
        """The next value of every row, from the source that its kind of row names."""
        inner = torch.where(self.truncated | self.before_invalid, at_cut, elsewhere)
        return torch.cat([inner[:-1], torch.where(self.truncated[-1:], last_truncated, last_open)])

    def next_values(
        self,
        values: Tensor,
        next_values: Tensor | None,
        bootstrap_values: Tensor | None,
        last_value: Tensor | None,
    ) -> Tensor:
        if next_values is not None:
            return self.numbers(next_values)
        nothing = torch.zeros_like(values)
        bootstrap, last = self.optional(bootstrap_values), self.edge(last_value)
        return self.pick(
            elsewhere=_from_next_row(values),
            at_cut=_first(bootstrap, nothing),
            last_truncated=_first(_last_row(bootstrap), last, _last_row(nothing)),
            last_open=_first(last, _last_row(bootstrap), _last_row(nothing)),
        )

    def forward(self, inputs: Tensor, opens: Tensor, decay: Tensor, seed_values: Tensor | None) -> Tensor:
        """Accumulate forward; a row that `opens` an episode or stands behind an invalid one starts anew."""
        anew = opens | ~_from_previous_row(self.valid, torch.ones_like(self.valid))
        seed = self.edge(seed_values)
        weight = torch.where(anew, 0.0, decay)
        return self.output(_recurrence(self.numbers(inputs), weight, None if seed is None else seed[0]))

    def output(self, y: Tensor) -> Tensor:
        return self.to_layout(torch.where(self.valid, y, 0.0))

    def outputs(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.output(first), self.output(second)
