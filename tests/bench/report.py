"""What becomes of the rows: the staged candidate, the published report, the README's table."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import rl_triton

from . import baselines, reach
from .grid import ALGORITHMS, HEADLINE, SECTIONS, Case

ROOT = Path(__file__).resolve().parents[2]
STAGE = "unreleased"
VERSION = r"v\d+\.\d+\.\d+"
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
# A baseline within this factor is shown among the close ones.
CLOSE = 2.0

Row = dict[str, Any]


class ReportError(Exception):
    """Nothing was written, for the reason given."""


def environment(gpu: str, command: str) -> dict[str, str]:
    """What the numbers were measured with. All but the date and the command must agree within a report."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": gpu,
        "device_name": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "rl_triton": rl_triton.__version__,
        "source": source_digest(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": _version("triton"),
        "torchrl": _version("torchrl"),
        "tensordict": _version("tensordict"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def source_digest(root: Path = ROOT) -> str:
    """A fingerprint of the library's code, so that rows of two versions never meet in one report."""
    digest = hashlib.sha256()
    for folder in ("rl_triton", "integrations"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(module: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return "none"


class Candidate:
    """The staged rows, one per case, written after each: an interrupted run keeps what it finished."""

    def __init__(self, history: Path, about: dict[str, str]):
        self.history, self.about = history, about
        self.rows: dict[Case, Row] = {}
        staged = _read(history / f"{STAGE}.json")
        if staged and _identity(staged["environment"]) == _identity(about):
            self.rows = {case_of(row): row for row in staged["rows"]}

    def add(self, row: Row) -> None:
        self.rows[case_of(row)] = _rounded(row)
        self.write()

    def write(self) -> None:
        data = {"environment": self.about, "rows": list(self.rows.values())}
        self.history.mkdir(parents=True, exist_ok=True)
        _replace(self.history / f"{STAGE}.json", to_json(data))
        _replace(self.history / f"{STAGE}.md", to_markdown("Unreleased", data))

    def reload(self) -> None:
        """Take up what other processes have staged meanwhile."""
        self.rows = Candidate(self.history, self.about).rows


def case_of(row: Row) -> Case:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


def failed(case: Case, problem: Exception) -> Row:
    return {**asdict(case), "error": f"{type(problem).__name__}: {problem}".splitlines()[0], "baselines": {}}


def promote(version: str, root: Path = ROOT, history: Path | None = None) -> list[Path]:
    """Publish the staged candidate as `version` and clear the stage. Writes all of it or nothing."""
    from . import pictures

    history = history or root / "docs" / "benchmark-history"
    if not re.fullmatch(VERSION, version):
        raise ReportError(f"--version must look like v1.2.3, got {version!r}")
    candidate = _read(history / f"{STAGE}.json")
    if candidate is None:
        raise ReportError(f"no candidate is staged: {history / STAGE}.json does not exist")
    for suffix in (".md", ".json"):
        if (history / f"{version}{suffix}").exists():
            raise ReportError(f"version {version} exists: {history / version}{suffix}")
    wrong = [row for row in candidate["rows"] if row.get("error")]
    if wrong:
        raise ReportError(f"{len(wrong)} rows of the candidate failed, first {case_of(wrong[0]).label}")
    about = f"{summary(candidate)}\n\nAll numbers:"
    readme, page = root / "README.md", root / "docs" / "benchmarks.md"
    texts = {
        history / f"{version}.md": to_markdown(version, candidate),
        history / f"{version}.json": to_json(candidate),
        root / "benchmarks.md": to_markdown(version, candidate, pictures_at="docs/benchmark-history"),
        readme: with_block(readme, f"{about} [benchmarks.md](benchmarks.md)."),
        page: with_block(page, f"{about} [{version}](benchmark-history/{version}.md).\n\n{_site_pictures()}"),
    }
    images = {history / name: image for name, image in pictures.draw(candidate).items()}
    for path, text in texts.items():
        _replace(path, text)
    for path, image in images.items():
        _replace(path, image)
    for suffix in (".md", ".json"):
        (history / f"{STAGE}{suffix}").unlink(missing_ok=True)
    return [*texts, *images]


def recorded(history: Path, device_name: str) -> dict[Case, Row]:
    """The rows of the newest report on a GPU of this name; the staged candidate serves before the first."""
    versions = [path for path in history.glob("v*.json") if re.fullmatch(VERSION, path.stem)]
    versions.sort(key=lambda path: [int(part) for part in path.stem[1:].split(".")], reverse=True)
    for path in (*versions, history / f"{STAGE}.json"):
        data = _read(path)
        if data and data["environment"]["device_name"] == device_name:
            return {case_of(row): row for row in data["rows"] if not row.get("error")}
    return {}


def with_block(path: Path, content: str) -> str:
    """The file's text with `content` between its two markers."""
    text = path.read_text() if path.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ReportError(f"{path} lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def to_json(data: dict[str, Any]) -> str:
    """One row per line, so that reports can be compared line by line."""
    rows = ",\n".join(json.dumps(row) for row in data["rows"])
    return f'{{"environment": {json.dumps(data["environment"], indent=1)},\n"rows": [\n{rows}\n]}}\n'


def to_markdown(title: str, data: dict[str, Any], pictures_at: str | None = None) -> str:
    rows = data["rows"]
    parts = [f"# Benchmarks, {title}", _about(data["environment"]), LEGEND]
    if pictures_at:
        parts += [_picture(pictures_at, name, alt) for name, alt in PICTURES.items()]
    parts += ["## Reach", reach_table(rows)]
    close = close_table(rows)
    parts += ["## Where a baseline is close", close] if close else []
    for section, heading in SECTIONS.items():
        chosen = [row for row in rows if row["section"] == section]
        if chosen:
            parts += [f"## {heading}", rows_table(chosen)]
    compared = [row for row in rows if row["baselines"]]
    if compared:
        parts += ["## Baselines", baselines_table(compared)]
    return "\n\n".join(parts) + "\n"


PICTURES = {
    "roofline": "Bandwidth of every case against a copy of as many bytes",
    "full-call": "Full-call time of every algorithm and its baselines at 4096 x 128",
}


def _picture(folder: str, name: str, alt: str) -> str:
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.png">\n'
        f'  <img alt="{alt}" src="{folder}/{name}-light.png">\n</picture>'
    )


def _site_pictures() -> str:
    """The pictures as the site shows them: one of each pair, by its colour scheme."""
    return "\n\n".join(
        "\n".join(
            f"![{alt}](benchmark-history/{name}-{theme}.png#only-{theme})" for theme in ("light", "dark")
        )
        for name, alt in PICTURES.items()
    )


def _about(about: dict[str, str]) -> str:
    names = ("rl_triton", "torch", "cuda", "triton", "torchrl", "tensordict", "python")
    versions = ", ".join(f"{name} {about[name]}" for name in names)
    return (
        f"{about['gpu']} ({about['device_name']}), {about['date']}. {versions}; source {about['source']}.\n\n"
        f"```\n{about['command']}\n```"
    )


LEGEND = """\
Every row passed the float64 reference before it was timed. *Full-call* is what a caller pays: CUDA events
around one call after a synchronisation. *Device* is kernel time alone, from a CUDA graph that rotates among
copies of the inputs. *Copy* is a device-to-device copy that moves the call's least reads plus writes, timed
the same way; *one op* is the full-call time of `torch.add(x, y)` on the same shape. Times are medians in
microseconds, the 90th percentile in brackets."""


def reach_table(rows: list[Row], measured_only: bool = False) -> str:
    lines = [
        (
            check.what,
            check.who,
            f"{'>=' if check.at_least else '<='} {_number(check.target)} {check.unit}",
            "-" if check.measured is None else f"{_number(check.measured)} {check.unit}",
            check.where,
            "-" if check.ratio is None else f"{check.ratio:.2f}",
            check.verdict,
        )
        for check in reach.checks(rows)
        if check.measured is not None or not measured_only
    ]
    if not lines:
        return "No target was measured."
    head = ("what", "of", "target", "measured", "at (worst)", "ratio", "")
    return table(head, lines) + "\n\nA ratio of 1 is the target, above 1 is better."


def rows_table(rows: list[Row]) -> str:
    case = ("algorithm", "N x T", "layout", "dtype")
    times = ("full-call", "x one op", "device", "launches", "GB/s", "copy", "% of copy")
    return table((*case, *times), [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    names = (row["algorithm"], row["variant"], f"A = {row['actions']}" if row["actions"] else "")
    called = " ".join(name for name in names if name)
    case = (called, f"{row['num_envs']} x {row['seq_len']}", row["layout"], row["dtype"])
    if row.get("error"):
        return (*case, f"not timed: {row['error']}", *[""] * 6)
    return (
        *case,
        f"{_number(row['full_us'])} ({_number(row['full_p90_us'])})",
        f"{row['full_us'] / row['one_op_us']:.2f}",
        f"{_number(row['device_us'])} ({_number(row['device_p90_us'])})" if "device_us" in row else "-",
        _number(row.get("launches")),
        _number(row.get("gb_per_s")),
        _number(row.get("copy_us")),
        _number(row.get("copy_percent")),
    )


def baselines_table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        for name, other in row["baselines"].items():
            device = other.get("device_us")
            numbers = (
                (f"not timed: {other['error']}", "", "", "")
                if "error" in other
                else (
                    _number(other["full_us"]),
                    f"{other['full_us'] / row['full_us']:.1f}",
                    _number(device),
                    f"{device / row['device_us']:.1f}" if device else other.get("device_error", "-"),
                )
            )
            lines.append((*_cells(row)[:2], name, *numbers))
    return table(("algorithm", "N x T", "baseline", "full-call", "x ours", "device", "x ours"), lines)


def close_table(rows: list[Row]) -> str:
    """The baselines that come within a factor of `CLOSE` of the library, by either clock."""
    lines = []
    for row in rows:
        for name, other in row["baselines"].items():
            for clock in ("full_us", "device_us"):
                if clock in other and clock in row and other[clock] / row[clock] < CLOSE:
                    times = (_number(row[clock]), _number(other[clock]), f"{other[clock] / row[clock]:.2f}")
                    lines.append((*_cells(row)[:2], name, clock.split("_")[0], *times))
    if not any(row["baselines"] for row in rows):
        return ""
    if not lines:
        return f"No baseline came within a factor of {CLOSE:g}."
    return table(("algorithm", "N x T", "baseline", "clock", "ours", "baseline", "x ours"), lines)


def headline_table(data: dict[str, Any]) -> str:
    """The seven algorithms at one shape, for the README."""
    find = reach.Table(data["rows"]).find
    rows = [row for name in ALGORITHMS if (row := find(name, HEADLINE))]
    if not rows:
        raise ReportError(f"the candidate has no row at {HEADLINE[0]} x {HEADLINE[1]} to make a headline of")
    others = (baselines.DOUBLING, baselines.ASSOCIATIVE, baselines.LOOP, baselines.TORCHRL)
    lines = []
    for row in rows:
        times = [row["baselines"].get(name, {}).get("full_us") for name in others]
        lines.append(
            (
                row["algorithm"],
                f"{_number(row['full_us'])} us",
                f"{row['full_us'] / row['one_op_us']:.2f}",
                f"{_number(row['device_us'])} us" if "device_us" in row else "-",
                *(f"{time / row['full_us']:.1f}x" if time else "-" for time in times),
            )
        )
    return table(("", "full-call", "x one op", "device", *(f"vs {name}" for name in others)), lines)


def summary(data: dict[str, Any]) -> str:
    """What the README shows of a report: one shape, how it was measured, and where a baseline is close."""
    about = data["environment"]
    shape = f"{HEADLINE[0]} environments x {HEADLINE[1]} steps"
    note = (
        f"{shape}, fp32, terminations and truncations 5 % each, on one {about['gpu']}, {about['date']} "
        f"(torch {about['torch']}, triton {about['triton']}, `{about['command']}`). *x one op* is over one "
        "`torch.add`. What a ratio compares took turns; from row to row the host's clock differs."
    )
    close = "Where a baseline is close, by the clock of the call or of the device:"
    return "\n\n".join((headline_table(data), note, close, close_table(data["rows"])))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in cells)


def _number(x: float | None) -> str:
    if x is None or x != x:
        return "-"
    return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(x) for name, x in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _identity(about: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in about.items() if name not in ("date", "command")}


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _replace(path: Path, content: str | bytes) -> None:
    """Write beside the file, then take its place: a reader sees the old file or the new one."""
    data = content.encode() if isinstance(content, str) else content
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as beside:
        beside.write(data)
    Path(beside.name).chmod(0o644)
    Path(beside.name).replace(path)
