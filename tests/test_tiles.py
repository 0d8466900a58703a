"""The kernel under every tile: axes, several rows and segments per program, blocks in turn, chunks apart.

The tuning table picks tiles by size, so that small problems would meet a few of them; here it is replaced.
"""

import pytest
import torch
from cases import FULL, assert_close, call, choice_id, oracle, problem, thorough
from poison import floating, poisonable, probes
from tiles import Tile, only

import rl_triton

launch = pytest.importorskip("rl_triton.kernels.launch")

# BLOCK_N, BLOCK_T, STEPS, and after how many blocks another program takes over.
TILES = [
    (2, 1, 2, None),
    (1, 4, 1, None),
    (2, 2, 2, None),
    (4, 8, 4, None),
    (4, 1, 4, 1),
    (2, 2, 1, 2),
    (1, 2, 2, 1),
    (2, 2, 8, None),
    (1, 1, 8, 1),
]
AXES = {"time": ((3,), -1), "features": ((3,), 0), "mixed": ((2, 2), 1)}
# One per kind of kernel: outputs of the state, outputs that look ahead, an action axis, forward.
KINDS = [FULL[0], FULL[1], FULL[2], FULL[6]]


@pytest.fixture
def tile(request, kernels, monkeypatch):
    block_n, block_t, steps, blocks = request.param
    length = None if blocks is None else blocks * block_t * steps
    monkeypatch.setattr(launch, "tune", only(Tile(block_n, block_t, steps, length=length), launch.tune))


@pytest.mark.parametrize("tile", TILES, indirect=True)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(("name", "given"), thorough(FULL, quick=KINDS), ids=choice_id)
def test_numbers(device, name, given, axes, tile):
    batch, time_dim = AXES[axes]
    kwargs = problem(name, batch, 5, given, time_dim=time_dim, device=device)
    assert_close(call(getattr(rl_triton, name), kwargs), oracle(name, kwargs), time_dim)


@pytest.mark.parametrize("tile", [(1, 4, 1, None), (1, 1, 4, None), (1, 2, 1, 1)], indirect=True)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("name", "given"), thorough(FULL, quick=[FULL[6]]), ids=choice_id)
def test_special_floats(device, name, given, value, tile):
    """A NaN passes a cut neither inside a tile nor on the way to the next one."""
    kwargs = poisonable(name, given, batch=(1,), T=4, device=device)
    weights = {"gamma", "lambda_", "b"} if value == torch.inf else set()
    poisoned = probes(kwargs, [key for key in floating(kwargs) if key not in weights], value)
    assert_close(call(getattr(rl_triton, name), poisoned), oracle(name, poisoned))
