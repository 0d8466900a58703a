"""What the library runs on here, and whether its numbers are right: `python -m rl_triton.doctor`.

Prints GPU, driver and versions, the path that every function takes and why, and the error of each function on
a tiny problem against a float64 loop. Exits 1 if a function fails or is off, or if an installed Triton does
not run the kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

import rl_triton
from rl_triton import _ops, kernels, reference

PACKAGES = ("torch", "triton", "torchrl", "tensordict")
TOLERANCE = 1e-5


def main() -> int:
    """Print the report; the exit status."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, version in versions().items():
        print(f"{name:<12}{version}")
    fault = triton_fault()
    path, reason = path_on(device, fault)
    print()
    healthy = fault is None
    for name, result in self_check(device):
        right = isinstance(result, float) and result <= TOLERANCE
        healthy &= right
        outcome = f"error {result:.0e}" if isinstance(result, float) else result
        print(f"{name:<32}{path:<30}{'ok' if right else 'OFF':<5}{outcome}")
    print(f"\n{path} on {device}, because {reason}.")
    print("With gradients: PyTorch formulas around one scan, which takes the same path.")
    print("Everything is in order." if healthy else "Something is off.")
    return 0 if healthy else 1


def versions() -> dict[str, str]:
    """GPUs, driver, and the versions of the library and the packages around it."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = {"GPU": ", ".join(gpus) or "none", "driver": driver() or "none"}
    found |= {"python": sys.version.split()[0], "rl_triton": rl_triton.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def driver() -> str | None:
    """The NVIDIA driver's version, where its tool is at hand."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0].strip() if lines else None


def triton_fault() -> str | None:
    """Why an installed Triton does not run the kernels; None where it does, and where there is none."""
    try:
        if importlib.util.find_spec("triton") is None:
            return None
    except ImportError:
        return None
    try:
        importlib.import_module("rl_triton.kernels.launch")
    except ImportError as error:
        return str(error)
    return None


def path_on(device: torch.device, fault: str | None) -> tuple[str, str]:
    """The path of tensors on `device`, and the reason for it."""
    if _ops.kernel_serves(device):
        if kernels.interpreted:
            return "Triton kernels, interpreted", "TRITON_INTERPRET is set"
        return "Triton kernels", f"Triton serves {device.type} tensors"
    if fault is not None:
        return "vectorised PyTorch", f"the kernels do not load ({fault})"
    if kernels.Plan is None:
        return "vectorised PyTorch", "Triton is not installed"
    if torch.version.cuda is None and torch.version.hip is None:
        return "vectorised PyTorch", "this build of PyTorch serves no GPU"
    return "vectorised PyTorch", "there is no GPU that PyTorch could use"


def self_check(device: torch.device) -> Iterator[tuple[str, float | str]]:
    """Every function with its largest error relative to `max(1, |y|)`, or with the exception it raised."""
    for name, arguments in problems().items():
        try:
            got = getattr(rl_triton, name)(**_on(device, arguments))
            want = getattr(reference, name)(**arguments)
            errors = [_error(a, b) for a, b in zip(_tuple(got), _tuple(want))]
            yield name, max(errors)
        except Exception as exception:
            yield name, f"{type(exception).__name__}: {exception}"


def problems() -> dict[str, dict[str, Any]]:
    """Arguments of every function: three environments with a terminal, a truncated and an invalid row."""
    shape, actions = (3, 6), 2
    generator = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    terminateds, truncateds, invalid = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
    terminateds[0, 1] = truncateds[1, 3] = invalid[2, 2] = True
    ends = {"terminateds": terminateds, "truncateds": truncateds, "valid": ~invalid, "gamma": 0.9}
    rewards = {"rewards": numbers(*shape), **ends}
    window = {"bootstrap_values": numbers(*shape), "last_value": numbers(shape[0])}
    values, q_values = {"values": numbers(*shape)}, {"q_values": numbers(*shape)}
    policies = {"log_pi_target": numbers(*shape), "log_pi_behavior": numbers(*shape)}
    forward = {"dones": terminateds | truncateds, "valid": ~invalid, "seed_values": numbers(shape[0])}
    return {
        "compute_gae": {**rewards, **values, **window, "lambda_": 0.8, "return_targets": True},
        "compute_vtrace": {**policies, **rewards, **values, **window},
        "compute_retrace": {
            "action_probs_target": numbers(*shape, actions).softmax(-1),
            "action_probs_behavior": numbers(*shape).sigmoid(),
            "next_q_values_all": numbers(*shape, actions),
            "actions": torch.arange(shape[0] * shape[1]).view(shape) % actions,
            "next_action_probs_target": numbers(*shape, actions).softmax(-1),
            **q_values,
            **rewards,
        },
        "compute_retrace_from_log_probs": {
            **policies,
            **q_values,
            **rewards,
            "expected_next_q_values": numbers(*shape),
        },
        "compute_lambda_returns": {**rewards, **window, "next_values": numbers(*shape), "lambda_": 0.8},
        "compute_discounted_returns": {**rewards, **window},
        "compute_eligibility_traces": {"gradients": numbers(*shape), **forward, "gamma": 0.9, "lambda_": 0.8},
        "compute_episodic_prefix_sum": {"inputs": numbers(*shape), **forward},
    }


def _on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}


def _tuple(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.cpu().double() - want).abs() / want.abs().clamp_min(1)
    # A comparison with NaN is false, and must not pass for a small error.
    return float(difference.nan_to_num(torch.inf).max())


if __name__ == "__main__":
    sys.exit(main())
