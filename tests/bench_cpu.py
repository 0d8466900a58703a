"""The CPU path of GAE against TorchRL's, on precomputed values: `python tests/bench_cpu.py`.

Like against like: the function against TorchRL's functions, the module against TorchRL's module, each in its
default form (a loop over time) and in its vectorized one. Everything passes the reference before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from bench import baselines, report, timing
from bench.grid import BATCH_MAJOR, TORCHRL, TRAILING, Case
from bench.workloads import prepare

SHAPES = ((8, 128), (1, 2048), (1, 128), (16, 32), (64, 128), (32, 512), (1024, 16), (1024, 128))
# How many times faster than the default form; than the vectorized one it is never to be slower.
TARGETS = {(8, 128): 5.0, (1, 2048): 10.0}
KINDS = {
    "function": (("gae", "next_values", BATCH_MAJOR), baselines.TORCHRL, baselines.TORCHRL_VECTORIZED),
    "module": ((TORCHRL, "GAE", TRAILING), baselines.TORCHRL_MODULE, baselines.TORCHRL_MODULE_VECTORIZED),
}


def times(kind: str, shape: tuple[int, int]) -> tuple[float, float, float]:
    """Medians in microseconds: ours, TorchRL's default, TorchRL's vectorized form."""
    (algorithm, variant, layout), default, vectorized = KINDS[kind]
    device = torch.device("cpu")
    workload = prepare(Case("cpu", algorithm, *shape, layout=layout, variant=variant), device)
    calls = {
        "ours": partial(workload.call, **workload.inputs),
        "default": workload.baselines[default](),
        "vectorized": workload.baselines[vectorized](),
    }
    for call in calls.values():
        workload.check(call(), baselines.TOLERANCE)
    full = timing.full_call(calls, device)
    return full["ours"].median, full["default"].median, full["vectorized"].median


def line(kind: str, shape: tuple[int, int]) -> tuple[str, ...]:
    ours, default, vectorized = times(kind, shape)
    wanted = TARGETS.get(shape, 0.0)
    met = default / ours >= wanted and vectorized / ours >= 1
    target = f">= {wanted:g} and >= 1" if wanted else ">= 1"
    return (
        kind,
        f"{shape[0]} x {shape[1]}",
        *(f"{us:.0f}" for us in (ours, default, vectorized)),
        f"{default / ours:.1f}",
        f"{vectorized / ours:.2f}",
        target,
        "met" if met else "missed",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("N", "T"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    shapes = tuple((n, t) for n, t in args.shape) if args.shape else SHAPES
    lines = [line(kind, shape) for kind in KINDS for shape in shapes]
    print(f"torch {torch.__version__}, {args.threads} threads, microseconds per call")
    head = ("GAE", "N x T", "ours", "default", "vectorized", "x default", "x vectorized", "target", "")
    print(report.table(head, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
