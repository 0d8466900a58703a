"""Count the instructions that a kernel spends per row, compiled for sm_90: `python tests/instructions.py`.

Of a loop over blocks its body counts, else the whole kernel. No GPU is needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from bench.report import table
from cases import call, problem
from offline_compile import Driver, compile_instead_of_launching
from triton.backends.compiler import GPUTarget

import rl_triton
from rl_triton.kernels import launch

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
GIVEN = ("truncateds", "bootstrap_values", "last_value", "next_action_probs_target")
WARP = 32


def instructions(cubin: bytes) -> Counter[str]:
    """Opcodes of the largest loop, or of all."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True)
    lines = [line.strip() for line in text.stdout.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_\w+:", line)}
    begin, end = 0, len(lines)
    for i, line in enumerate(lines):
        back = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        start = labels.get(back[1], i) if back else i
        if i - start > (end - begin if end < len(lines) else 0):
            begin, end = start, i + 1
    opcode = re.compile(r"/\*\w+\*/\s+(?:@!?\w+\s+)?(\w+)")
    found = (opcode.match(line) for line in lines[begin:end])
    return Counter(match[1] for match in found if match and match[1] != "NOP")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", nargs="+", default=["compute_gae", "compute_lambda_returns"])
    parser.add_argument("--shape", default="16384x512", metavar="NxT")
    parser.add_argument("--time-major", action="store_true")
    args = parser.parse_args()
    driver: Any = Driver(GPUTarget("cuda", 90, WARP))
    triton.runtime.driver.set_active(driver)
    geometries, kernels, tune = [], [], launch.tune
    launch.tune = lambda *sizes: geometries.append(tune(*sizes)) or geometries[-1]
    compile_instead_of_launching(kernels)

    N, T = map(int, args.shape.split("x"))
    lines = []
    for name in args.functions:
        given = tuple(key for key in GIVEN if key in rl_triton.__dict__[name].__annotations__)
        call(getattr(rl_triton, name), problem(name, (N,), T, given, time_dim=0 if args.time_major else -1))
        g, counted = geometries[-1], instructions(kernels[-1].asm["cubin"])
        rows = g.block_n * g.block_t * g.steps / (WARP * g.num_warps)
        total = sum(counted.values())
        lines.append((name, f"{total / rows:.0f}", *(f"{counted[op] / rows:.1f}" for op in ("SHFL", "BAR"))))
    print(table(("function", "instructions per row", "shuffles", "barriers"), lines))


if __name__ == "__main__":
    main()
