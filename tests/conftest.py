"""Which device and which path a test runs on."""

import os

import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton decides at a kernel's definition, so this comes before any import of the library.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture
def device():
    return torch.device("cuda" if HAS_CUDA else "cpu")


def _serve(monkeypatch, kernels):
    monkeypatch.setattr("rl_triton._ops.kernel_serves", lambda device: kernels)


@pytest.fixture(params=["torch", "kernel"])
def path(request, monkeypatch):
    """Run the test on vectorised PyTorch, then on the Triton kernels (interpreted on the CPU)."""
    if request.param == "kernel":
        pytest.importorskip("triton")
    _serve(monkeypatch, request.param == "kernel")
    # The interpreter computes with NumPy, which warns where a GPU is silent.
    with np.errstate(all="ignore"):
        yield request.param


@pytest.fixture(autouse=True)
def _interpret_on_request(request, monkeypatch):
    """The interpreter is slow: without a GPU only the tests that take `path` go through it."""
    if not HAS_CUDA and "path" not in request.fixturenames:
        _serve(monkeypatch, False)
