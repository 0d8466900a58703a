"""The two pictures of a report, each for light and dark pages, drawn from its JSON alone."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from . import baselines, reach
from .grid import ALGORITHMS, BATCH_MAJOR, HEADLINE

Row = dict[str, Any]

THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "grid": "#d8dee4", "limit": "#57606a"},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "grid": "#30363d", "limit": "#8b949e"},
}
# Okabe and Ito's colours, which stay apart for colour-blind readers, on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7ae6")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
CONTENDERS = (
    ("rl_triton", "#0072b2"),
    ("one op", "#8b949e"),
    (baselines.DOUBLING, "#e69f00"),
    (baselines.ASSOCIATIVE, "#d55e00"),
    (baselines.LOOP, "#cc79a7"),
)


def draw(data: dict[str, Any]) -> dict[str, bytes]:
    """File name to PNG."""
    pictures = {}
    for theme, colours in THEMES.items():
        style: dict[Any, Any] = {
            "figure.facecolor": colours["paper"],
            "axes.facecolor": colours["paper"],
            "axes.edgecolor": colours["grid"],
            "axes.labelcolor": colours["ink"],
            "axes.titlecolor": colours["ink"],
            "text.color": colours["ink"],
            "xtick.color": colours["ink"],
            "ytick.color": colours["ink"],
            "grid.color": colours["grid"],
            "legend.frameon": False,
            "font.size": 10,
        }
        with matplotlib.rc_context(style):
            pictures[f"roofline-{theme}.png"] = _png(_roofline(data, colours["limit"]))
            pictures[f"full-call-{theme}.png"] = _png(_full_call(data))
    return pictures


def _roofline(data: dict[str, Any], limit: str) -> Figure:
    """Bytes against bandwidth: a point per case, and the copy as the roof over them."""
    rows = [
        row
        for row in data["rows"]
        if row.get("copy_us") and row["layout"] == BATCH_MAJOR and row["dtype"] == "float32"
    ]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    roof = sorted({(row["bytes"], row["copy_us"]) for row in rows})
    axes.plot(
        [nbytes / 1e6 for nbytes, _ in roof],
        [nbytes / us / 1e6 for nbytes, us in roof],
        color=limit, linewidth=1.5, label="device-to-device copy", zorder=1,
    )  # fmt: skip
    for name, colour, marker in zip(ALGORITHMS, COLOURS, MARKERS, strict=True):
        points = [(row["bytes"] / 1e6, row["gb_per_s"] / 1e3) for row in rows if row["algorithm"] == name]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=28, color=colour, marker=marker, label=name.replace("_", " "), zorder=2)
    scale = "log" if roof else "linear"
    axes.set(xscale=scale, yscale=scale, xlabel="least bytes of a call, MB", ylabel="TB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(f"Bandwidth of the kernels, {data['environment']['gpu']}", loc="left")
    axes.grid(True, which="major", linewidth=0.5)
    axes.legend(loc="lower right", fontsize=9)
    return figure


def _full_call(data: dict[str, Any]) -> Figure:
    """What a caller pays at the headline shape, every algorithm beside one addition and its baselines."""
    find = reach.Table(data["rows"]).find
    rows = [row for name in ALGORITHMS if (row := find(name, HEADLINE))]
    figure = Figure(figsize=(8, 1 + 0.75 * max(1, len(rows))), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(CONTENDERS)
    for i, (name, colour) in enumerate(CONTENDERS):
        places = [place + (i - (len(CONTENDERS) - 1) / 2) * height for place in range(len(rows))]
        bars = axes.barh(places, [_time(row, name) for row in rows], height, color=colour, label=name)
        axes.bar_label(bars, [_label(_time(row, name)) for row in rows], padding=3, fontsize=7)
    axes.set_yticks(range(len(rows)), [row["algorithm"].replace("_", " ") for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="full-call time, us")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.08)
    axes.set_xlim(left=1)
    axes.set_title(f"One call at {HEADLINE[0]} x {HEADLINE[1]}, {data['environment']['gpu']}", loc="left")
    axes.grid(True, axis="x", which="major", linewidth=0.5)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(CONTENDERS), fontsize=8)
    return figure


def _time(row: Row, contender: str) -> float:
    """Microseconds, or NaN where it was not timed."""
    if contender == "rl_triton":
        return row["full_us"]
    if contender == "one op":
        return row["one_op_us"]
    return row["baselines"].get(contender, {}).get("full_us", float("nan"))


def _label(time: float) -> str:
    return f"{time:.0f}" if time == time else ""


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    # Without its version in the file, the same numbers give the same bytes.
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()
