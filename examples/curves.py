"""Learning curves of finished runs: a table of them, and pictures for light and for dark pages.

    python examples/curves.py runs/ppo-1 runs/ppo-2 runs/ppo-3 --target 475 --out ppo-cartpole

Mean returns are those of the log: over the last 20 episodes, or one per environment if these are more.
"""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import dropwhile
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro
from common import fail, plot_returns, read_progress, writing

PAPER = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#0d1117")
STYLES: dict[str, Any] = {"light": "default", "dark": ["dark_background", PAPER]}


@dataclasses.dataclass
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of finished runs in one environment."""
    target: float | None = None
    """Mean return to reach; a dashed line."""
    title: str | None = None
    """Title of the pictures; by default the environment."""
    out: Path = Path("curves")
    """Where the pictures go, less their endings -light.png and -dark.png."""


def load(run: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The summary of a run, and its rows since the end of the first episode."""
    summary = run / "summary.json"
    rows = [row for row in read_progress(run / "progress.csv") if math.isfinite(row["mean_return"])]
    if not rows or not summary.exists():
        fail(f"{run} is no finished run: it lacks summary.json, or finished episodes in progress.csv")
    return json.loads(summary.read_text()), rows


def describe(summary: dict[str, Any], rows: list[dict[str, float]], target: float | None) -> str:
    """A line of the table."""
    since = [] if target is None else list(dropwhile(lambda row: row["mean_return"] < target, rows))
    cells = [
        summary["seed"],
        f"{since[0]['steps']:,.0f}" if since else "-",
        f"{min(row['mean_return'] for row in since):.0f}" if since else "-",
        f"{rows[-1]['return_100']:.0f}",
        f"{summary['eval_return']:.0f}",
        f"{summary['sps']:,.0f}",
        f"{fmean(row['lag'] for row in rows):.2f}" if "lag" in rows[0] else "-",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    runs = [load(run) for run in options.runs]
    env_ids = sorted({summary["env_id"] for summary, _ in runs})
    if len(env_ids) != 1:
        fail(f"name runs of one environment, got {env_ids}")
    print("| seed | target reached at | lowest since | last 100 episodes | greedy | steps/s | mean lag |")
    print("|---|---|---|---|---|---|---|")
    for summary, rows in runs:
        print(describe(summary, rows, options.target))
    curves, title = [rows for _, rows in runs], options.title or env_ids[0]
    for theme, style in STYLES.items():
        path = Path(f"{options.out}-{theme}.png")
        with writing(path):
            print(plot_returns(curves, "steps", path, title, options.target, style))


if __name__ == "__main__":
    main()
