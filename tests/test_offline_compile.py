"""Every kernel builds for GPUs of both vendors, on a machine without any."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("offline_compile.py")


@pytest.mark.parametrize(("backend", "arch"), [("cuda", "80"), ("cuda", "90"), ("hip", "gfx942")])
def test_kernels_build(backend, arch):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), backend, arch]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    built = re.search(r"(\d+) kernels", result.stdout)
    assert built is not None and int(built[1]) >= 15
