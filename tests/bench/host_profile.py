"""Where the host's microseconds go, from the public function down to the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from rl_triton.kernels.launch import Plan

from . import timing
from .grid import HEADLINE, Case
from .workloads import as_tuple, prepare

HEAD = ("algorithm", "call", "checks, key, lookup", "outputs", "arguments, launch", "one op")


def profile(algorithm: str, device: torch.device, shape: tuple[int, int] = HEADLINE) -> tuple[str, ...]:
    """The parts of a call in microseconds of host time."""
    case = Case("profile", algorithm, *shape, actions=4 if algorithm == "retrace" else 0)
    workload = prepare(case, device)
    call = partial(workload.call, **workload.inputs)
    outputs = as_tuple(call())
    whole = timing.host_time(call)
    planned = timing.host_time(_planned(call))
    allocated = timing.host_time(lambda: [torch.empty_like(y) for y in outputs])
    one_op = timing.host_time(timing.one_op(shape, torch.float32, device))
    parts = (whole, whole - planned, allocated, planned - allocated, one_op)
    return (algorithm, *(f"{part:.1f}" for part in parts))


def _planned(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call from its looked-up plan on."""
    seen: list[Callable[[], Any]] = []
    run = Plan.__call__

    def recording(self: Plan, *arguments: Any) -> Any:
        seen.append(partial(run, self, *arguments))
        return run(self, *arguments)

    with mock.patch.object(Plan, "__call__", recording):
        call()
    return seen[0]
