"""The release benchmark: every algorithm over its shapes, gated on the reference, against its baselines.

    python tests/bench_release.py --gpu "NVIDIA H200" --parent-sweep    measure everything, stage a candidate
    python tests/bench_release.py --quick --no-update                   two minutes, print only
    python tests/bench_release.py --promote --version v1.2.3            publish the staged candidate

Rows are staged as they finish in docs/benchmark-history/unreleased.{md,json}; a later run with the same
library, GPU and versions adds to them. Only --promote writes benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from bench import grid, report
from bench.measure import describe, measure
from bench.workloads import Skipped
from tqdm import tqdm

# A dry run goes through every step on the CPU with shapes cut to this.
DRY_ENVS, DRY_STEPS = 8, 24


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", help="name of the GPU in the report; the driver's by default")
    parser.add_argument(
        "--parent-sweep", action="store_true", help="run each algorithm in a process of its own"
    )
    parser.add_argument("--quick", action="store_true", help="only what the reach table reads")
    parser.add_argument("--algorithms", nargs="+", choices=grid.NAMES, default=grid.NAMES, metavar="NAME")
    parser.add_argument("--section", nargs="+", choices=tuple(grid.SECTIONS), metavar="NAME")
    parser.add_argument(
        "--baselines",
        choices=("none", "reach", "all"),
        default="reach",
        help="where the baselines run: nowhere, at the headline shape, or at one shape of each regime",
    )
    parser.add_argument("--no-update", action="store_true", help="print, stage nothing")
    parser.add_argument("--history", type=Path, default=report.ROOT / "docs" / "benchmark-history")
    parser.add_argument("--promote", action="store_true", help="publish the staged candidate")
    parser.add_argument("--version", help="the version to publish as, vX.Y.Z")
    parser.add_argument("--host-profile", action="store_true", help="print where a call's host time goes")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to try the script")
    args = parser.parse_args(argv)
    if args.promote != (args.version is not None):
        parser.error("--promote and --version vX.Y.Z go together")
    if not (args.promote or args.dry_run or torch.cuda.is_available()):
        parser.error("needs a CUDA device; --dry-run tries the script on the CPU")
    return args


def select(args: argparse.Namespace) -> list[grid.Case]:
    cases = grid.cases(tuple(args.algorithms))
    if args.quick:
        cases = [case for case in cases if grid.is_quick(case)]
    if args.section:
        cases = [case for case in cases if case.section in args.section]
    return cases


def sweep(args: argparse.Namespace, candidate: report.Candidate) -> int:
    """Measure the cases in this process; the number of those that failed."""
    device = torch.device("cpu" if args.dry_run else "cuda")
    failures = 0
    cases = select(args)
    # Where nobody watches a bar the lines carry the count.
    with tqdm(cases, unit="case", disable=not sys.stderr.isatty()) as progress:
        for i, case in enumerate(progress, start=1):
            progress.set_description(case.algorithm)
            count = f"[{i}/{len(cases)}]"
            try:
                row = measure(_cut(case) if args.dry_run else case, device, args.baselines)
            except Skipped as reason:
                progress.write(f"{count} SKIPPED {case.label}: {reason}")
                continue
            except Exception as problem:
                # A wrong or broken case is a row of its own; the others go on.
                row = report.failed(case, problem)
                failures += 1
            candidate.add(row)
            progress.write(f"{count} {describe(row)}")
            if i == 1:
                # What the first case has loaded stays: collections between timings need not go through it.
                gc.freeze()
    return failures


def _cut(case: grid.Case) -> grid.Case:
    return replace(case, num_envs=min(case.num_envs, DRY_ENVS), seq_len=min(case.seq_len, DRY_STEPS))


def sweep_in_children(args: argparse.Namespace, candidate: report.Candidate) -> int:
    """One process per algorithm, one after the other; they stage their rows themselves."""
    failures = 0
    for name in args.algorithms:
        command = [sys.executable, __file__, "--algorithms", name, "--baselines", args.baselines]
        command += ["--history", str(args.history), "--gpu", candidate.about["gpu"]]
        command += ["--quick"] * args.quick + ["--dry-run"] * args.dry_run
        command += ["--section", *args.section] if args.section else []
        failures += subprocess.run(command, check=False).returncode != 0
        candidate.reload()
        candidate.write()
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.promote:
        try:
            written = report.promote(args.version, history=args.history)
        except report.ReportError as reason:
            print(f"not promoted: {reason}", file=sys.stderr)
            return 1
        print("\n".join(str(path) for path in written))
        return 0

    if args.host_profile:
        # Needs Triton, which the other commands reach through the library alone.
        from bench import host_profile

        names = [name for name in args.algorithms if name != grid.TORCHRL]
        lines = [host_profile.profile(name, torch.device("cuda")) for name in names]
        print(report.table(host_profile.HEAD, lines))
        return 0

    arguments = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "tests/bench_release.py", *arguments])
    gpu = args.gpu or ("dry run" if args.dry_run else torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() if args.no_update else nullcontext(args.history) as history:
        args.history = Path(history)
        candidate = report.Candidate(args.history, report.environment(gpu, command))
        failures = 0
        try:
            failures = (sweep_in_children if args.parent_sweep else sweep)(args, candidate)
        except KeyboardInterrupt:
            failures = 1
            candidate.reload()
            candidate.write()
            print("interrupted: the finished rows are kept", file=sys.stderr)
        rows = [row for case, row in candidate.rows.items() if case.algorithm in args.algorithms]
        for part in (report.close_table(rows), report.reach_table(rows, measured_only=True)):
            print("", part, sep="\n")
        if not args.no_update:
            print(f"\nstaged {len(candidate.rows)} rows in {args.history / report.STAGE}.md and .json")
    return int(failures > 0)


if __name__ == "__main__":
    # A run that is killed has said what it knew, also into a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main())
