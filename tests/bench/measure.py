"""One case from the gate to its row of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from . import baselines, timing
from .grid import Case, baselines_of
from .workloads import as_tuple, prepare

ONE_OP = "one op"
Row = dict[str, Any]


def measure(case: Case, device: torch.device, choice: str = "none") -> Row:
    """The row of a case. Raises `WrongNumbers` before anything is timed, `Skipped` where it cannot run."""
    workload = prepare(case, device)
    call = partial(workload.call, **workload.inputs)
    workload.check(call(), None)

    contenders: dict[str, Callable[[], Any]] = {
        "ours": call,
        ONE_OP: timing.one_op(case.shape, getattr(torch, case.dtype), device),
        **workload.yardsticks,
    }
    wanted = workload.baselines if case.section == "torchrl" or baselines_of(case, choice) else {}
    others: dict[str, Row] = {}
    # Fresh graphs for every case: nothing is left of another shape.
    torch.compiler.reset()
    for name, build in wanted.items():
        try:
            other = build()
            workload.check(_tensors(other(), device), baselines.TOLERANCE)
        except Exception as problem:
            # A peer that fails or errs is named in the report, and never timed.
            others[name] = {"error": f"{type(problem).__name__}: {problem}".splitlines()[0]}
            continue
        others[name] = {}
        contenders[name] = other

    on_host = contenders.pop(baselines.NUMPY, None)
    full = timing.full_call(contenders, device)
    if on_host is not None:
        full[baselines.NUMPY] = timing.full_call({"": on_host}, torch.device("cpu"))[""]
    row = {
        **asdict(case),
        "full_us": full["ours"].median,
        "full_p90_us": full["ours"].p90,
        "one_op_us": full[ONE_OP].median,
        "yardsticks": {name: full[name].median for name in workload.yardsticks},
        "bytes": workload.nbytes,
    }
    for name in others.keys() & full.keys():
        others[name] |= {"full_us": full[name].median, "full_p90_us": full[name].p90}
    if device.type == "cuda" and workload.inputs:
        row |= _on_device(workload.call, workload.inputs, workload.nbytes)
        for name in baselines.COMPILED:
            if name in contenders:
                others[name] |= _device_of_peer(contenders[name], workload.inputs, workload.nbytes or 0)
    return row | {"baselines": others}


def _on_device(call: Callable[..., Any], inputs: dict[str, torch.Tensor], nbytes: int | None) -> Row:
    ours = timing.device_time(call, inputs, nbytes or sum(x.nbytes for x in inputs.values()))
    row = {"device_us": ours.median, "device_p90_us": ours.p90, "launches": ours.launches}
    if nbytes is not None:
        copy = timing.copy_time(nbytes).median
        row |= {
            "copy_us": copy,
            "gb_per_s": nbytes / ours.median / 1e3,
            "copy_percent": 100 * copy / ours.median,
        }
    return row


def _device_of_peer(call: Callable[..., Any], inputs: dict[str, torch.Tensor], nbytes: int) -> Row:
    try:
        times = timing.device_time(call, inputs, nbytes)
    except RuntimeError as problem:
        # What cannot be captured has no device time, but still its full-call one.
        return {"device_error": str(problem).splitlines()[0]}
    return {"device_us": times.median, "launches": times.launches}


def _tensors(outputs: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.as_tensor(y, device=device) for y in as_tuple(outputs))


def describe(row: Row) -> str:
    """A printed line, and one per baseline."""
    line = f"{Case(**{k: row[k] for k in Case.__dataclass_fields__}).label:<64}"
    if row.get("error"):
        return f"{line} {row['error']}"
    line += f" full {row['full_us']:9.1f} us = {row['full_us'] / row['one_op_us']:5.2f} x one op"
    if "device_us" in row:
        line += f" | device {row['device_us']:8.2f} us"
    if "copy_us" in row:
        line += f" = {row['device_us'] / row['copy_us']:5.2f} x copy"
    if row.get("launches") is not None:
        line += f" | {row['launches']:g} launches"
    for name, other in row["baselines"].items():
        line += f"\n    {name}: " + (other.get("error") or f"{other['full_us'] / row['full_us']:.1f} x ours")
    return line
