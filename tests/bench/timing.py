"""How a call is timed: what a caller pays, and what the device is busy with."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

SAMPLES = 100
ROUNDS = 4
# Seconds that the full-call samples of one contender may take.
BUDGET = 0.4
# A graph replay lasts about this long, so that launching the graph does not show.
REPLAY_US = 1000.0
REPLAYS = 50
MOST_CALLS = 200
MOST_SETS = 32
PAGE = 4096


class Times(NamedTuple):
    """Microseconds per call."""

    median: float
    p90: float


class DeviceTimes(NamedTuple):
    """Microseconds and launches per call; `launches` is None where they could not be counted."""

    median: float
    p90: float
    launches: float | None


def full_call(calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, Times]:
    """One call after a synchronisation, by CUDA events around it; on the CPU by the clock.

    The contenders take turns in rounds, so that a drift of the host meets all of them.
    """
    sample = _event_sample if device.type == "cuda" else _clock_sample
    per_round, samples = {}, {}
    for name, call in calls.items():
        sample(call)
        seconds = min(sample(call) for _ in range(2)) / 1e6
        per_round[name] = max(1, int(min(SAMPLES, BUDGET / max(seconds, 1e-9))) // ROUNDS)
        samples[name] = []
    with _no_garbage_collection():
        for _ in range(ROUNDS):
            for name, call in calls.items():
                for _ in range(min(3, per_round[name] - 1)):
                    sample(call)
                samples[name] += [sample(call) for _ in range(per_round[name])]
    return {name: Times(*_quantiles(values)) for name, values in samples.items()}


def device_time(call: Callable[..., Any], inputs: dict[str, Tensor], nbytes: int) -> DeviceTimes:
    """Kernel time alone: a CUDA graph of many calls, replayed.

    The calls rotate among copies of the inputs and hold on to their outputs until these take more than twice
    the L2 cache, so that a call finds neither there.
    """
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    count = max(1, min(MOST_SETS, -(-2 * cache // max(nbytes, 1))))
    sets = [inputs, *({name: x.clone() for name, x in inputs.items()} for _ in range(count - 1))]
    for each in sets:
        call(**each)
    first = _capture(call, sets, count)
    estimate = min(_replay(first) for _ in range(3)) / count
    calls = max(count, min(MOST_CALLS, int(REPLAY_US / estimate)))
    graph = _capture(call, sets, calls)
    _replay(graph)
    with _no_garbage_collection():
        samples = [_replay(graph) / calls for _ in range(REPLAYS)]
    nodes = _graph_nodes(graph)
    return DeviceTimes(*_quantiles(samples), None if nodes is None else nodes / calls)


def host_time(call: Callable[[], Any]) -> float:
    """Median microseconds until the call returns, the device left to itself."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for _ in range(10):
        call()
    with _no_garbage_collection():
        # Few enough launches not to fill the queue.
        return _quantiles([_clock_sample(call) for _ in range(SAMPLES)])[0]


@lru_cache
def copy_time(nbytes: int) -> Times:
    """A device-to-device copy that reads half of `nbytes` and writes the other half, timed like a call.

    Whole pages: on an H200 the driver copies other sizes at two thirds of the speed.
    """
    half = -(-nbytes // (2 * PAGE)) * PAGE
    buffers = {name: torch.empty(half, dtype=torch.uint8, device="cuda") for name in ("source", "target")}
    buffers["source"].random_()

    def copy(source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    return Times(*device_time(copy, buffers, nbytes)[:2])


def one_op(case_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """The yardstick of the host path: one addition of two tensors of the case's shape."""
    x, y = (torch.randn(case_shape, device=device).to(dtype) for _ in range(2))
    return partial(torch.add, x, y)


def _quantiles(samples: Sequence[float]) -> tuple[float, float]:
    values = torch.tensor(samples, dtype=torch.float64)
    return values.median().item(), values.quantile(0.9).item()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _capture(call: Callable[..., Any], sets: list[dict[str, Tensor]], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # Outputs that live at the same time cannot share memory.
    outputs: list[Any] = [None] * len(sets)
    with torch.cuda.graph(graph):
        for i in range(calls):
            outputs[i % len(sets)] = call(**sets[i % len(sets)])
    graph.instantiate()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    return _event_sample(graph.replay)


def _event_sample(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _clock_sample(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _graph_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """Kernels, copies and fills in a captured graph, as the driver counts them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_size_t()
    failed = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return None if failed else count.value
