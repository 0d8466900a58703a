"""Timed rows held against those recorded on the same kind of GPU, as ratios so that the host cancels out.

`pytest -m perf` runs one case per algorithm, `pytest -m slow` all of them.
"""

import pytest
import torch
from bench import grid, report
from bench.measure import describe, measure
from bench.workloads import Skipped

HISTORY = report.ROOT / "docs" / "benchmark-history"
# The host's clock is noisier than the device's.
SLACK = {"full-call over one op": 1.3, "device over copy": 1.2}

HEADLINE = [
    case
    for case in grid.cases(grid.ALGORITHMS)
    if case.section == "truncations" and case.shape == grid.HEADLINE
]


def ratios(row):
    pairs = {"full-call over one op": ("full_us", "one_op_us"), "device over copy": ("device_us", "copy_us")}
    return {name: row[a] / row[b] for name, (a, b) in pairs.items() if row.get(a) and row.get(b)}


def no_slower_than_recorded(case):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    gpu = torch.cuda.get_device_name()
    record = report.recorded(HISTORY, gpu).get(case)
    if record is None:
        pytest.skip(
            f"NOTHING RECORDED on {gpu} for {case.label}: run tests/bench_release.py --parent-sweep there"
        )
    try:
        row = measure(case, torch.device("cuda"))
    except Skipped as reason:
        pytest.skip(str(reason))
    print(describe(row))
    measured = ratios(row)
    for name, due in ratios(record).items():
        assert measured[name] <= due * SLACK[name], f"{name}: {measured[name]:.2f}, recorded {due:.2f}"


@pytest.mark.perf
@pytest.mark.parametrize("case", HEADLINE, ids=lambda case: case.algorithm)
def test_headline_is_no_slower_than_recorded(case):
    no_slower_than_recorded(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid.cases(), ids=lambda case: case.label)
def test_every_case_is_no_slower_than_recorded(case):
    no_slower_than_recorded(case)
