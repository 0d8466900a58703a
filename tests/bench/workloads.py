"""What a case calls: its inputs, the library's call, the bytes it must move, and the gate on its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rl_triton
from rl_triton import reference

from . import baselines
from .grid import BACKWARD, BATCH_MAJOR, TIME_MAJOR, TORCHRL, TRAILING, Case

# The rows that the float64 loop walks; an input with more environments repeats them.
CHECKED_ROWS = 2**17
# Longer sequences are checked in windows, each walked from an episode's end.
WINDOW, OVERLAP = 1024, 256
SECTOR = 32
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class WrongNumbers(AssertionError):
    """Outputs that differ from the reference: a case that must not be timed."""


class Skipped(Exception):
    """A case that this machine cannot run."""


@dataclass(frozen=True)
class Algorithm:
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: tuple[str, ...]
    with_truncations: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    forward: bool = False


ALGORITHMS = {
    "gae": Algorithm(
        rl_triton.compute_gae,
        reference.compute_gae,
        ("rewards", "values", "terminateds", "last_value"),
        ("truncateds", "bootstrap_values"),
        {"gamma": 0.99, "lambda_": 0.95, "return_targets": True},
    ),
    "vtrace": Algorithm(
        rl_triton.compute_vtrace,
        reference.compute_vtrace,
        ("log_pi_target", "log_pi_behavior", "values", "rewards", "terminateds", "last_value"),
        ("truncateds", "bootstrap_values"),
        {"gamma": 0.99},
    ),
    "retrace": Algorithm(
        rl_triton.compute_retrace,
        reference.compute_retrace,
        (
            "action_probs_target",
            "action_probs_behavior",
            "q_values",
            "next_q_values_all",
            "actions",
            "rewards",
            "terminateds",
            "next_action_probs_target",
        ),
        ("truncateds",),
        {"gamma": 0.99, "lambda_": 0.95},
    ),
    "lambda_returns": Algorithm(
        rl_triton.compute_lambda_returns,
        reference.compute_lambda_returns,
        ("rewards", "next_values", "terminateds"),
        ("truncateds",),
        {"gamma": 0.99, "lambda_": 0.95},
    ),
    "discounted_returns": Algorithm(
        rl_triton.compute_discounted_returns,
        reference.compute_discounted_returns,
        ("rewards", "terminateds", "last_value"),
        ("truncateds", "bootstrap_values"),
        {"gamma": 0.99},
    ),
    "eligibility_traces": Algorithm(
        rl_triton.compute_eligibility_traces,
        reference.compute_eligibility_traces,
        ("gradients", "dones"),
        options={"gamma": 0.99, "lambda_": 0.95},
        forward=True,
    ),
    "episodic_prefix_sum": Algorithm(
        rl_triton.compute_episodic_prefix_sum,
        reference.compute_episodic_prefix_sum,
        ("inputs", "dones"),
        forward=True,
    ),
}

FLAGS = ("terminateds", "truncateds", "dones")
PER_ACTION = ("action_probs_target", "next_action_probs_target", "next_q_values_all")

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


@dataclass
class Workload:
    """A call ready to be checked and timed."""

    inputs: Inputs
    call: Callable[..., Any]
    # Raises WrongNumbers; the second argument replaces the tolerance of the outputs' dtype.
    check: Callable[[Any, float | None], None]
    # Least reads plus writes of one call; None where a call is more than one pass over memory.
    nbytes: int | None = None
    # A baseline is built only when its turn comes: it may compile, and its inputs take memory.
    baselines: dict[str, Callable[[], Callable[[], Any]]] = field(default_factory=dict)
    # Other full-call times to hold the call against.
    yardsticks: dict[str, Callable[[], Any]] = field(default_factory=dict)


def prepare(case: Case, device: torch.device) -> Workload:
    if case.algorithm == TORCHRL:
        from . import modules

        return modules.prepare(case, device)
    algorithm = ALGORITHMS[case.algorithm]
    block = draw(case, algorithm, device)
    options = algorithm.options
    expected = tuple(y.to(device) for y in expected_outputs(algorithm, block, options))
    inputs = {name: to_layout(name, x, case) for name, x in repeated(block, case.num_envs).items()}
    time_dim = {BATCH_MAJOR: -1, TIME_MAJOR: 0, TRAILING: -2}[case.layout]

    def check(outputs: Any, tolerance: float | None) -> None:
        outputs = as_tuple(outputs)
        compare(tuple(from_layout(y, case) for y in outputs), expected, tolerance)

    call = partial(algorithm.function, **options, time_dim=time_dim)
    if case.variant in BACKWARD:
        return _backward(case, inputs, options)
    others = baselines.of(case, inputs, options, compiles=device.type == "cuda")
    return Workload(inputs, call, check, least_bytes(inputs, len(expected)), others)


def draw(case: Case, algorithm: Algorithm, device: torch.device) -> Inputs:
    """Random inputs `[M, T]` for as many environments as are checked; M divides `num_envs`."""
    num_envs, seq_len = case.num_envs, case.seq_len
    limit = max(1, CHECKED_ROWS // seq_len)
    num_envs = next(n for n in range(min(num_envs, limit), 0, -1) if case.num_envs % n == 0)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def one(name: str) -> Tensor:
        shape = (num_envs, seq_len)
        if name in FLAGS:
            return uniform(*shape) < (0.1 if name == "dones" and case.truncations else 0.05)
        if name == "actions":
            return torch.randint(case.actions, shape, generator=generator, device=device)
        if name == "last_value":
            return normal(num_envs).to(dtype)
        if name in PER_ACTION:
            x = normal(*shape, case.actions)
            return (x if name == "next_q_values_all" else x.softmax(-1)).to(dtype)
        if name == "action_probs_behavior":
            return (0.1 + 0.8 * uniform(*shape)).to(dtype)
        x = normal(*shape)
        return (0.5 * x - 1 if name.startswith("log_pi") else x).to(dtype)

    names = algorithm.inputs + (algorithm.with_truncations if case.truncations else ())
    if case.variant == "next_values":
        names = (*(set(names) - {"last_value", "bootstrap_values"}), "next_values")
    return {name: one(name) for name in names}


def repeated(block: Inputs, num_envs: int) -> Inputs:
    """The block of environments as often as it takes to have `num_envs`."""
    return {name: x.repeat(num_envs // len(x), *[1] * (x.ndim - 1)) for name, x in block.items()}


def to_layout(name: str, x: Tensor, case: Case) -> Tensor:
    if case.layout == TRAILING:
        return x.unsqueeze(1 if name == "last_value" else 2)
    if case.layout == TIME_MAJOR and name != "last_value":
        return x.transpose(0, 1).contiguous()
    return x


def from_layout(y: Tensor, case: Case) -> Tensor:
    if case.layout == TRAILING:
        return y.squeeze(2)
    return y.transpose(0, 1) if case.layout == TIME_MAJOR else y


def rounded(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The options as a call in `dtype` uses them: `gamma` and `lambda_` in fp32 unless all is fp64."""
    if dtype == torch.float64:
        return options
    return {k: torch.tensor(v).item() if k in ("gamma", "lambda_") else v for k, v in options.items()}


def expected_outputs(algorithm: Algorithm, inputs: Inputs, options: dict[str, Any]) -> Outputs:
    """The reference's outputs `[M, T]` in float64; rows it did not walk hold NaN, and there are few."""
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())
    options = rounded(options, dtype)
    inputs = {name: x.cpu() for name, x in inputs.items()}
    flags = [inputs[name] for name in FLAGS if name in inputs]
    num_envs, seq_len = flags[0].shape
    if seq_len <= 4 * WINDOW:
        return as_tuple(algorithm.reference(**inputs, **options))

    rows = windows(torch.stack(flags).any(0), algorithm.forward)
    count, length = rows.shape[1:]

    def cut(name: str, x: Tensor) -> Tensor:
        if name == "last_value":
            return x.repeat_interleave(count)
        index = rows.clamp(0, seq_len - 1).view(num_envs, -1)
        picked = x[torch.arange(num_envs).unsqueeze(1), index]
        return picked.view(num_envs * count, length, *x.shape[2:])

    walked = as_tuple(algorithm.reference(**{name: cut(name, x) for name, x in inputs.items()}, **options))
    inside = (rows >= 0) & (rows < seq_len)
    env = torch.arange(num_envs).view(-1, 1, 1).expand_as(rows)
    outputs = []
    for y in walked:
        whole = torch.full((num_envs, seq_len), math.nan, dtype=y.dtype)
        whole[env[inside], rows[inside]] = y.view_as(rows)[inside]
        outputs.append(whole)
    return tuple(outputs)


def windows(done: Tensor, forward: bool) -> Tensor:
    """Rows of every window `[M, W, L]`, such that a loop over one window gives what a loop over all would.

    A window of a backward scan ends at a done row or at the last one, a forward scan's begins behind a done
    row or at row 0. The windows overlap, so that together they cover everything but a rare gap; rows outside
    the sequence are to be ignored.
    """
    if forward:
        # Mirrored in time, the row behind a done one is the row whose neighbour is done.
        opens = torch.cat([torch.ones_like(done[:, :1]), done[:, :-1]], 1)
        return done.shape[1] - 1 - windows(opens.flip(1), False).flip(2)
    seq_len = done.shape[1]
    time = torch.arange(seq_len)
    last_done = torch.where(done, time, -1).cummax(1).values
    last_done[:, -1] = seq_len - 1
    ends = last_done[:, torch.arange(-(-seq_len // WINDOW) - 1, -1, -1) * -WINDOW + seq_len - 1]
    return ends.unsqueeze(-1) - torch.arange(WINDOW + OVERLAP - 1, -1, -1)


def compare(outputs: Outputs, expected: Outputs, tolerance: float | None = None) -> None:
    """Every row against the block of environments that it repeats, by the row's own scale."""
    if len(outputs) != len(expected):
        raise WrongNumbers(f"{len(outputs)} outputs where {len(expected)} are due")
    for i, (y, due) in enumerate(zip(outputs, expected, strict=True)):
        if y.shape[0] % due.shape[0] or y.shape[1:] != due.shape[1:]:
            raise WrongNumbers(
                f"output {i} has shape {list(y.shape)}, due is a multiple of {list(due.shape)}"
            )
        scale = due.nan_to_num().abs().amax(1, keepdim=True).clamp(min=1)
        limit = (TOLERANCE[y.dtype] if tolerance is None else tolerance) * scale
        walked = ~due.isnan()
        if walked.double().mean() < 0.99:
            raise WrongNumbers(f"output {i}: the reference walked too few rows to judge it")
        for block in y.split(due.shape[0]):
            error = (block.double() - due).abs()
            # Negated, so that a NaN counts as wrong.
            wrong = ~(error <= limit) & walked
            if wrong.any():
                worst = torch.where(walked, (error / limit).nan_to_num(math.inf), 0).max().item()
                raise WrongNumbers(
                    f"output {i}: {int(wrong.sum())} of {wrong.numel()} numbers differ from the reference, "
                    f"the worst by {worst:.3g} times the tolerance"
                )


def least_bytes(inputs: Inputs, num_outputs: int) -> int:
    """Every input that is needed read once and every output written once.

    Where only some elements are read (bootstrap values of truncated rows, the probability of the action
    taken) the 32-byte sectors that hold them count, the smallest piece that memory moves.
    """
    total = 0
    for name, x in inputs.items():
        if name == "bootstrap_values":
            total += _sectors(inputs["truncateds"] & ~inputs["terminateds"], x.element_size())
        elif name == "action_probs_target":
            taken = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
            total += _sectors(taken.scatter_(-1, inputs["actions"].unsqueeze(-1), True), x.element_size())
        else:
            total += x.numel() * x.element_size()
    like = next(x for name, x in inputs.items() if name in ("rewards", "gradients", "inputs"))
    return total + num_outputs * like.numel() * like.element_size()


def _sectors(needed: Tensor, element_size: int) -> int:
    needed = needed.reshape(-1)
    elements = SECTOR // element_size
    needed = torch.nn.functional.pad(needed, (0, -needed.numel() % elements))
    return int(needed.view(-1, elements).any(1).sum()) * SECTOR


def _backward(case: Case, inputs: Inputs, options: dict[str, Any]) -> Workload:
    """Forward and backward of GAE, the gradients of every floating input against float64 autograd."""
    leaves = [name for name, x in inputs.items() if x.is_floating_point()]
    function = rl_triton.compute_gae
    if case.variant.startswith("compiled") and inputs["rewards"].is_cuda:
        function = torch.compile(function, fullgraph=True, dynamic=False)
    weights = [torch.randn_like(inputs["rewards"]) for _ in range(2)]

    def gradients(function: Callable[..., Any], inputs: Inputs) -> Outputs:
        inputs = {k: x.detach().requires_grad_(k in leaves) for k, x in inputs.items()}
        outputs = function(**inputs, **options)
        cotangents = [w.to(outputs[0].dtype) for w in weights]
        return torch.autograd.grad(outputs, [inputs[name] for name in leaves], cotangents)

    def check(outputs: Outputs, tolerance: float | None) -> None:
        wide = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
        due = gradients(partial(baselines.composed, case.algorithm, baselines.doubling_scan), wide)
        as_rows = [tuple(y.reshape(len(y), -1) for y in group) for group in (outputs, due)]
        compare(as_rows[0], as_rows[1], baselines.TOLERANCE)

    def call(**inputs: Tensor) -> Outputs:
        return gradients(function, inputs)

    return Workload(inputs, call, check)


def as_tuple(outputs: Any) -> Outputs:
    return outputs if isinstance(outputs, tuple) else (outputs,)
