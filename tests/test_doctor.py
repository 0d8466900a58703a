"""The doctor's report and its exit status, in health and with each fault that it can find."""

import subprocess
import sys
from importlib import metadata

import pytest
import torch
from test_imports import WITHOUT_TRITON

import rl_triton
from rl_triton import doctor

FUNCTIONS = [name for name in rl_triton.__all__ if name.startswith("compute_")]


def test_health(path, capsys):
    assert doctor.main() == 0
    report = capsys.readouterr().out
    for name in ("GPU", "driver", "torch", "triton", "torchrl", *FUNCTIONS):
        assert name in report
    assert torch.__version__ in report and metadata.version("torchrl") in report
    assert ("Triton kernels" in report) == (path == "kernel")
    assert "because" in report and "OFF" not in report


def _without_triton(code):
    return subprocess.run([sys.executable, "-c", WITHOUT_TRITON + code], capture_output=True, text=True)


def test_without_triton():
    result = _without_triton("import runpy; runpy.run_module('rl_triton.doctor', run_name='__main__')")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Triton is not installed" in result.stdout


def test_without_the_other_packages(monkeypatch, capsys):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert doctor.main() == 0
    assert "torchrl     not installed" in capsys.readouterr().out


def test_every_function_is_checked():
    assert set(doctor.problems()) == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_numbers(monkeypatch, capsys, name):
    original = getattr(rl_triton, name)

    def off(**kwargs):
        outputs = original(**kwargs)
        return tuple(y + 1e-3 for y in outputs) if isinstance(outputs, tuple) else outputs + 1e-3

    monkeypatch.setattr(rl_triton, name, off)
    assert doctor.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "OFF" in line] == [name]


def test_nan_is_off(monkeypatch, capsys):
    monkeypatch.setattr(
        rl_triton, "compute_discounted_returns", lambda rewards, **_: torch.full_like(rewards, torch.nan)
    )
    assert doctor.main() == 1
    assert "error inf" in capsys.readouterr().out


def test_an_exception_is_off(monkeypatch, capsys):
    def broken(**kwargs):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(rl_triton, "compute_gae", broken)
    assert doctor.main() == 1
    assert "RuntimeError: no kernel image" in capsys.readouterr().out


def test_an_installed_triton_without_kernels_is_off(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "triton_fault", lambda: "cannot import name 'knobs'")
    assert doctor.main() == 1
    assert "the kernels do not load (cannot import name 'knobs')" in capsys.readouterr().out


def test_a_triton_that_cannot_be_imported_is_a_fault(monkeypatch):
    assert doctor.triton_fault() is None
    monkeypatch.setitem(sys.modules, "rl_triton.kernels.launch", None)
    fault = doctor.triton_fault()
    assert fault is not None and "rl_triton.kernels.launch" in fault


def test_the_driver_is_that_of_its_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    tool.chmod(0o755)
    assert doctor.driver() == "570.86.15"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert doctor.driver() is None
