"""Which device and which path a test runs on."""

import importlib.util
import os

import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton decides at a kernel's definition, so this comes before any import of the library.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: more than the interpreter has time for")


def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if item.get_closest_marker("thorough") and interprets(item)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


def interprets(item):
    on_kernels = "kernels" in item.fixturenames or item.callspec.params.get("path") == "kernel"
    return on_kernels and not HAS_CUDA


@pytest.fixture
def device():
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _patch_the_language_once_per_launch():
    """The interpreter patches Triton's language anew in every device function, which is most of its time."""
    if HAS_CUDA or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, set()

    def once(function):
        # A launch patches for its kernel first and restores that scope last.
        launches = not patched
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        scope = patch_lang(function)
        if launches:
            restore = scope.restore

            def restore_and_forget():
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = once
    yield
    interpreter._patch_lang = patch_lang


def _serve(monkeypatch, kernels):
    monkeypatch.setattr("rl_triton._ops.kernel_serves", lambda device: kernels)


@pytest.fixture
def kernels(monkeypatch):
    """Run the test on the Triton kernels, interpreted where there is no GPU."""
    pytest.importorskip("triton")
    _serve(monkeypatch, True)
    # The interpreter computes with NumPy, which warns where a GPU is silent.
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(params=["torch", "kernel"])
def path(request, monkeypatch):
    """Run the test on vectorised PyTorch, then on the kernels."""
    if request.param == "kernel":
        request.getfixturevalue("kernels")
    else:
        _serve(monkeypatch, False)
    return request.param


@pytest.fixture(autouse=True)
def _interpret_on_request(request, monkeypatch):
    """Without a GPU only the tests that ask for it go through the interpreter."""
    if not HAS_CUDA and not {"path", "kernels"} & set(request.fixturenames):
        _serve(monkeypatch, False)
