"""Compile ahead of time what a rollout will call."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import functional


def warmup(what: Callable[..., Any] | Sequence[int], *args: Any, **kwargs: Any) -> None:
    """Compile the kernels of calls to come, so that a CUDA graph can be captured at once.

    `warmup(compute_gae, rewards, values, ...)` warms up one call, given as it will be made.
    `warmup((4096, 128), ...)` warms up the usual calls on a rollout shape, by running them on dummy data:
    with and without truncations; next values from `next_values`, from `last_value`, and from
    `bootstrap_values` with `last_value`; `gamma` and `lambda_` as numbers.

    Args:
        what: A public function, followed by its arguments; or the shape of the per-step inputs, followed by
            functions: Names of public functions; all by default.
            time_dim: The time axis of the shape, -1 by default.
            num_actions: Size of the action axis of `compute_retrace`, which is left out without it.
            dtype: Dtype of the floating inputs, float32 by default.
            flag_dtype: Dtype of the flags, bool by default.
            device: The device of the rollout, `"cuda"` by default.

    Raises:
        ValueError: A name is no public function, or `compute_retrace` is asked for without `num_actions`.

    Examples:
        Without `device` for the GPU; on the CPU there is nothing to compile.

        >>> warmup((4096, 128), ["compute_gae"], device="cpu")
    """
    if callable(what):
        with torch.no_grad():
            what(*args, **kwargs)
    else:
        _warmup_shape(what, *args, **kwargs)


def _warmup_shape(
    shape: Sequence[int],
    functions: Iterable[str] | None = None,
    *,
    time_dim: int = -1,
    num_actions: int | None = None,
    dtype: torch.dtype = torch.float32,
    flag_dtype: torch.dtype = torch.bool,
    device: torch.device | str = "cuda",
) -> None:
    shape = tuple(shape)
    batch = list(shape)
    del batch[time_dim]
    step = torch.zeros(shape, dtype=dtype, device=device)
    edge = torch.zeros(batch, dtype=dtype, device=device)
    flag = torch.zeros(shape, dtype=flag_dtype, device=device)
    sources: list[dict[str, Any]] = [{"last_value": edge}, {"last_value": edge, "bootstrap_values": step}]
    calls: dict[str, list[dict[str, Any]]] = {
        "compute_gae": [
            {"rewards": step, "values": step, "return_targets": targets} | source
            for targets in (False, True)
            for source in [{"next_values": step}, *sources]
        ],
        "compute_vtrace": [
            {"log_pi_target": step, "log_pi_behavior": step, "values": step, "rewards": step} | source
            for source in [{"next_values": step}, *sources]
        ],
        "compute_retrace_from_log_probs": [
            {
                "log_pi_target": step,
                "log_pi_behavior": step,
                "q_values": step,
                "expected_next_q_values": step,
                "rewards": step,
            }
        ],
        "compute_lambda_returns": [
            {"rewards": step, "next_values": step} | source for source in [{}, *sources]
        ],
        "compute_discounted_returns": [{"rewards": step} | source for source in [{}, *sources]],
        "compute_eligibility_traces": [
            {"gradients": step, "gamma": 0.99, "lambda_": 0.95} | seed for seed in ({}, {"seed_values": edge})
        ],
        "compute_episodic_prefix_sum": [{"inputs": step} | seed for seed in ({}, {"seed_values": edge})],
        "affine_scan": [{"a": step, "b": step, "reverse": reverse} for reverse in (False, True)],
    }
    if num_actions is not None:
        per_action = torch.zeros((*shape, num_actions), dtype=dtype, device=device)
        retrace = {
            "action_probs_target": per_action,
            "action_probs_behavior": step,
            "q_values": step,
            "next_q_values_all": per_action,
            "actions": torch.zeros(shape, dtype=torch.int64, device=device),
            "rewards": step,
        }
        calls["compute_retrace"] = [retrace, retrace | {"next_action_probs_target": per_action}]
    for name in calls if functions is None else functions:
        if name == "compute_retrace" and num_actions is None:
            raise ValueError("num_actions must be given to warm up compute_retrace, got None")
        if name not in calls:
            raise ValueError(f"functions must be among {sorted([*calls, 'compute_retrace'])}, got {name!r}")
        flags: list[dict[str, Any]] = [{"terminateds": flag}, {"terminateds": flag, "truncateds": flag}]
        if name in ("compute_eligibility_traces", "compute_episodic_prefix_sum"):
            flags = [{"dones": flag}]
        elif name == "affine_scan":
            flags = [{}]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for inputs, marks in itertools.product(calls[name], flags):
                getattr(functional, name)(**inputs, **marks, time_dim=time_dim)
