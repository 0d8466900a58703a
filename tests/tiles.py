"""Tiles in place of the tuning table's, for tests and for the sweep that the table comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Tile(NamedTuple):
    """Sizes of a tile; `length` is the chunk of time that one program walks, by default all of it."""

    block_n: int
    block_t: int
    steps: int
    num_warps: int = 1
    stages: int = 2
    length: int | None = None


def only(tile: Tile, table: Callable[..., Any]) -> Callable[..., Any]:
    """The tuning table with one tile for every shape."""

    def tune(B: int, T: int, F: int, width: int, actions: int) -> Any:
        known = table(B, T, F, width, actions)
        groups = B * -(-F // tile.block_n) if known.axes == "features" else -(-B * F // tile.block_n)
        block = tile.block_t * tile.steps
        length = T if tile.length is None else -(-tile.length // block) * block
        tile_of = tile._replace(length=length, stages=min(tile.stages, -(-length // block)))
        return known._replace(**tile_of._asdict(), groups=groups, chunks=-(-T // length))

    return tune
