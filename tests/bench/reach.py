"""The targets of the project, each held against the measured rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import baselines
from .grid import (
    ALGORITHMS,
    BACKWARD,
    BANDWIDTH,
    BATCH_MAJOR,
    HEADLINE,
    LAYOUTS,
    LONG,
    MANY_ACTIONS,
    SHORT,
    TIME_MAJOR,
    TORCHRL,
    TRAILING,
)

Row = dict[str, Any]
TWO_OUTPUTS = ("gae", "vtrace", "retrace")


@dataclass(frozen=True)
class Check:
    """One target: `measured` at least or at most `target`, over a case or the worst of several."""

    what: str
    who: str
    target: float
    unit: str
    at_least: bool
    measured: float | None
    where: str = ""

    @property
    def ratio(self) -> float | None:
        """Above 1 is better than the target asks, below 1 short of it."""
        if self.measured is None:
            return None
        return self.measured / self.target if self.at_least else self.target / self.measured

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        return "met" if self.ratio >= 1 else "missed"


class Table:
    """The rows by what they measured; what a search leaves open is the plain call with truncations."""

    def __init__(self, rows: list[Row]):
        self._rows = {self._key(row): row for row in rows if not row.get("error")}

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        names = "algorithm num_envs seq_len truncations layout dtype actions variant"
        return tuple(row[name] for name in names.split())

    def find(self, algorithm: str, shape: tuple[int, int], **how: Any) -> Row | None:
        plain = {
            "truncations": True,
            "layout": BATCH_MAJOR,
            "dtype": "float32",
            "actions": 4 if algorithm == "retrace" else 0,
            "variant": "",
        }
        key = {"algorithm": algorithm, "num_envs": shape[0], "seq_len": shape[1], **plain, **how}
        return self._rows.get(self._key(key))


def checks(rows: list[Row]) -> list[Check]:
    return list(_checks(Table(rows)))


def _checks(table: Table) -> Iterator[Check]:
    find = table.find

    def worst(
        what: str,
        who: str,
        target: float,
        unit: str,
        at_least: bool,
        measured: Callable[[tuple[int, int]], float | None],
        shapes: tuple[tuple[int, int], ...],
    ) -> Check:
        """The shape that is furthest from the target; every shape must have been measured."""
        values = {shape: measured(shape) for shape in shapes}
        known = {shape: value for shape, value in values.items() if value is not None}
        if len(known) < len(values):
            return Check(what, who, target, unit, at_least, None)
        shape = (min if at_least else max)(known, key=lambda shape: known[shape])
        where = f"{shape[0]} x {shape[1]}"
        return Check(what, who, target, unit, at_least, known[shape], where)

    for name in ALGORITHMS:
        target = 2.0 if name in TWO_OUTPUTS else 1.6
        yield worst(
            "full-call", name, target, "x one op", False,
            lambda shape, name=name: _ratio(find(name, shape), "full_us", "one_op_us"), (HEADLINE,),
        )  # fmt: skip
    for baseline, targets in ((baselines.DOUBLING, (8, 4, 5)), (baselines.ASSOCIATIVE, (4, 2, 3))):
        for name in ALGORITHMS:
            kind = {"retrace": 1, "eligibility_traces": 2, "episodic_prefix_sum": 2}.get(name, 0)
            yield worst(
                f"full-call against {baseline}", name, targets[kind], "x faster", True,
                lambda shape, name=name, other=baseline: _speedup(find(name, shape), other), (HEADLINE,),
            )  # fmt: skip

    def copies(name: str, **how: Any) -> Callable[[tuple[int, int]], float | None]:
        return lambda shape: _ratio(find(name, shape, **how), "device_us", "copy_us")

    def percent(name: str, **how: Any) -> Callable[[tuple[int, int]], float | None]:
        return lambda shape: _value(find(name, shape, **how), "copy_percent")

    own_line = ("retrace", "vtrace")
    for name in ALGORITHMS:
        if name not in own_line:
            what = "device, at least 64 MB, T from 16 to 8192"
            yield worst(what, name, 93, "% of copy speed", True, percent(name), BANDWIDTH)
    for what, target, shapes in (
        ("device", 1.4, (HEADLINE,)),
        ("device, short horizon", 1.4, SHORT),
        ("device, long horizon", 1.8, LONG[:1]),
        ("device, long horizon, few rows", 3.0, LONG[1:]),
    ):
        for name in ALGORITHMS:
            yield worst(what, name, target, "x copy time", False, copies(name), shapes)
    for layout in (TIME_MAJOR, TRAILING):
        for name in ALGORITHMS:
            yield worst(
                f"device, {layout} against {BATCH_MAJOR}", name, 1.15, "x", False,
                lambda shape, name=name, layout=layout: _against_plain(find, name, shape, layout=layout),
                LAYOUTS,
            )  # fmt: skip
    bandwidth = tuple(shape for shape in BANDWIDTH if shape[1] >= 128)
    for actions, shapes in ((4, bandwidth), (18, MANY_ACTIONS)):
        what, who = "device, T from 128 to 8192", f"retrace, A = {actions}"
        yield worst(what, who, 80, "% of copy speed", True, percent("retrace", actions=actions), shapes)
    yield worst(
        "device per byte against GAE", "vtrace", 1.25, "x", False,
        lambda shape: _quotient(copies("vtrace")(shape), copies("gae")(shape)),
        (HEADLINE, *SHORT, *LONG, *BANDWIDTH),
    )  # fmt: skip
    for variant in BACKWARD:
        yield worst(
            f"device, forward and {variant} against forward", "gae", 5, "x", False,
            lambda shape, variant=variant: _against_plain(find, "gae", shape, variant=variant),
            (HEADLINE, (16384, 512)),
        )  # fmt: skip
    yield from _modules(find)


def _modules(find: Callable[..., Row | None]) -> Iterator[Check]:
    def module(variant: str, shape: tuple[int, int]) -> Row | None:
        return find(TORCHRL, shape, variant=variant, layout=TRAILING)

    vectorized = baselines.TORCHRL_VECTORIZED
    for variant, other, targets in (
        ("GAE", baselines.TORCHRL_MODULE, {(4096, 128): 30, (64, 512): 100, (8, 128): 50}),
        ("GAE", vectorized, {(4096, 128): 8, (64, 512): 6, (8, 128): 8}),
        ("VTrace", baselines.TORCHRL, {(4096, 128): 50, (64, 512): 120}),
    ):
        for shape, target in targets.items():
            where = f"{shape[0]} x {shape[1]}"
            speedup = _speedup(module(variant, shape), other)
            yield Check(
                f"module against {other}", f"TorchRL {variant}", target, "x faster", True, speedup, where
            )
    row = module("GAE single_pass", HEADLINE)
    limit = math.nan if row is None else 1.3 * row["yardsticks"][baselines.VALUE_FORWARD] + 150
    yield Check(
        "module, at most 1.3 x one value forward + 150 us", "TorchRL GAE(single_pass=True)", limit, "us",
        False, _value(row, "full_us"), f"{HEADLINE[0]} x {HEADLINE[1]}",
    )  # fmt: skip


def _value(row: Row | None, name: str) -> float | None:
    return None if row is None else row.get(name)


def _quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _ratio(row: Row | None, a: str, b: str) -> float | None:
    return _quotient(_value(row, a), _value(row, b))


def _against_plain(
    find: Callable[..., Row | None], algorithm: str, shape: tuple[int, int], **how: Any
) -> float | None:
    """Device time of a kind of call over that of the plain one."""
    plain = _value(find(algorithm, shape), "device_us")
    return _quotient(_value(find(algorithm, shape, **how), "device_us"), plain)


def _speedup(row: Row | None, baseline: str) -> float | None:
    if row is None:
        return None
    return _quotient(row["baselines"].get(baseline, {}).get("full_us"), row["full_us"])
