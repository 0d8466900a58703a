"""Time tiles against the tuning table's, on data outside the cache.

    python tests/sweep_tiles.py --algorithms gae vtrace --shapes 16384x512 --tiles 1,32,8,1,3 2,32,4,2,3

A tile is block_n,block_t,steps,num_warps,stages and, if programs split the time axis, the length of a chunk.
"""

from __future__ import annotations

import argparse
from functools import partial
from unittest import mock

import torch
from bench import grid, report, timing
from bench.workloads import ALGORITHMS, as_tuple, draw, least_bytes, repeated, to_layout
from tiles import Tile, only

from rl_triton import _ops
from rl_triton.kernels import launch

TIME_DIM = {grid.BATCH_MAJOR: -1, grid.TIME_MAJOR: 0}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", choices=grid.ALGORITHMS, default=["gae"], metavar="NAME")
    parser.add_argument("--shapes", nargs="+", default=["4096x128"], metavar="NxT")
    parser.add_argument("--tiles", nargs="+", required=True, metavar="TILE")
    parser.add_argument("--time-major", action="store_true")
    parser.add_argument("--actions", type=int, default=4, help="of Retrace")
    return parser.parse_args()


def times(case: grid.Case, tiles: list[Tile], device: torch.device) -> list[tuple[str, ...]]:
    """A line per tile, the tuning table's first: device time, and its ratio to a copy of the least bytes."""
    algorithm = ALGORITHMS[case.algorithm]
    block = repeated(draw(case, algorithm, device), case.num_envs)
    inputs = {name: to_layout(name, x, case) for name, x in block.items()}
    call = partial(algorithm.function, **algorithm.options, time_dim=TIME_DIM[case.layout])
    expected = as_tuple(call(**inputs))
    nbytes = least_bytes(block, len(expected))
    copy = timing.copy_time(nbytes).median
    lines = []
    for name, tune in [("table", launch.tune), *((format_of(t), only(t, launch.tune)) for t in tiles)]:
        with (
            mock.patch.object(launch, "tune", tune),
            mock.patch.object(_ops, "_plans", {}),
            mock.patch.object(_ops, "_latest", {}),
        ):
            try:
                for got, due in zip(as_tuple(call(**inputs)), expected, strict=True):
                    torch.testing.assert_close(got, due, rtol=1e-3, atol=1e-3)
                median = timing.device_time(call, inputs, nbytes).median
            except Exception as problem:
                # A tile may be too large for a multiprocessor.
                lines.append((case.label, name, type(problem).__name__, "-"))
                continue
        lines.append((case.label, name, f"{median:.2f}", f"{median / copy:.2f}"))
    return lines


def format_of(tile: Tile) -> str:
    return ",".join(str(size) for size in tile if size is not None)


def main() -> None:
    args = parse()
    tiles = [Tile(*map(int, tile.split(","))) for tile in args.tiles]
    layout = grid.TIME_MAJOR if args.time_major else grid.BATCH_MAJOR
    for shape in args.shapes:
        num_envs, seq_len = map(int, shape.split("x"))
        for name in args.algorithms:
            actions = args.actions if name == "retrace" else 0
            case = grid.Case("sweep", name, num_envs, seq_len, layout=layout, actions=actions)
            print(report.table(("case", "tile", "us", "x copy"), times(case, tiles, torch.device("cuda"))))


if __name__ == "__main__":
    main()
