"""Compile the kernels for a GPU that this machine need not have: `python offline_compile.py cuda 90`."""

import sys
from typing import Any

import torch
import triton
from cases import FULL, call, problem
from triton.backends.compiler import GPUTarget

import rl_triton
from rl_triton import _ops
from rl_triton.kernels import launch

# Every tile: time innermost, batch innermost, both, a time axis that is split over programs, and pipelines.
SHAPES = {
    "time": {"batch": (64,), "T": 128},
    "features": {"batch": (64,), "T": 128, "time_dim": 0},
    "mixed": {"batch": (8, 3), "T": 20, "time_dim": 1},
    "split": {"batch": (1,), "T": 8192},
    "blocks in flight, time": {"batch": (2048,), "T": 512},
    "blocks in flight, features": {"batch": (8192,), "T": 64, "time_dim": 0},
    "many blocks in flight, time": {"batch": (512,), "T": 4096},
    "many blocks in flight, features": {"batch": (64,), "T": 2048, "time_dim": 0},
}
# Bytes of shared memory that a program has on the most frugal GPUs: compute capability 8.6 and 8.9; gfx942.
LEAST_SHARED = {"cuda": 99 * 1024, "hip": 64 * 1024}


class Driver:
    """As much of a Triton driver as compiling takes."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_instead_of_launching(kernels):
    def compile_only(self, x, scalars):
        allocated = tuple(torch.empty(shape, dtype=dtype) for shape, _, dtype in self.allocations)
        values = self.values((*self.tensors(x), *allocated), x, scalars)
        kernels.extend(self.compile(values, constants) for constants in self.phases)
        return allocated[: self.outputs]

    launch.Plan.__call__ = compile_only
    _ops.kernel_serves = lambda device: True


def main(backend, arch):
    cuda = backend == "cuda"
    target = GPUTarget(backend, int(arch) if cuda else arch, 32 if cuda else 64)
    driver: Any = Driver(target)
    triton.runtime.driver.set_active(driver)
    kernels = []
    compile_instead_of_launching(kernels)
    problems: list[Any] = [(name, given, SHAPES["time"]) for name, given in FULL]
    problems += [("compute_vtrace", ("valid",), shape) for shape in SHAPES.values()]
    # The most inputs in the largest tile.
    largest = SHAPES["many blocks in flight, features"]
    problems.append(("compute_retrace_from_log_probs", ("truncateds", "valid"), largest))
    problems += [
        ("compute_gae", (), SHAPES["time"] | {"dtype": dtype}) for dtype in (torch.bfloat16, torch.float64)
    ]
    for name, given, shape in problems:
        call(getattr(rl_triton, name), problem(name, given=given, **shape))
    binary = "cubin" if cuda else "hsaco"
    assert all(kernel.asm[binary] for kernel in kernels)
    assert all(kernel.metadata.shared <= LEAST_SHARED[backend] for kernel in kernels)
    print(f"{len(kernels)} kernels for {backend} {arch}")


if __name__ == "__main__":
    main(*sys.argv[1:])
