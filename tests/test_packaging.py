"""The wheel and the sdist: what they hold, one version, and that an installed copy works."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import rl_triton

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """`(wheel, sdist)` of a copy of the tree; the wheel is made from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("rl_triton", "integrations", "examples", "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(archives):
    with zipfile.ZipFile(archives[0]) as file:
        return {name: file.read(name) for name in file.namelist()}


def package():
    """The library's files under the names that they are imported by."""
    core = [path for path in (ROOT / "rl_triton").rglob("*.py") if "integrations" not in path.parts]
    names = {str(path.relative_to(ROOT)) for path in core}
    names |= {f"rl_triton/{path.relative_to(ROOT)}" for path in (ROOT / "integrations").rglob("*.py")}
    return names | {"rl_triton/py.typed"}


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    assert {name for name in wheel if ".dist-info/" not in name} == package()
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)


def test_the_sdist_holds_the_library(archives):
    with tarfile.open(archives[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert package() | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not any(name.startswith(("integrations/", "examples/")) for name in names)


def test_one_version(archives, wheel):
    about = message_from_bytes(next(text for name, text in wheel.items() if name.endswith("/METADATA")))
    assert about["Version"] == rl_triton.__version__
    assert all(rl_triton.__version__ in archive.name for archive in archives)
    assigned = re.compile(r"^(__version__|version) = [\"']", re.M)
    for path in (ROOT / "pyproject.toml", ROOT / "rl_triton" / "__init__.py"):
        assert bool(assigned.search(path.read_text())) == (path.suffix == ".py")
    assert {"torchrl", "examples", "dev", "docs"} == set(about.get_all("Provides-Extra", []))


def test_an_installed_wheel_works(archives, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet"]
    subprocess.run([*install, "--target", str(target), str(archives[0])], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(target)

    def run(*arguments):
        """Away from the checkout; the target comes before what is installed otherwise."""
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    imports = "import rl_triton; from rl_triton.integrations import cleanrl"
    files = run("-c", f"{imports}; print(rl_triton.__file__, cleanrl.__file__)")
    assert files.stdout.count(str(target)) == 2, files.stdout + files.stderr
    assert "No module named 'integrations'" in run("-c", "import integrations").stderr
    doctor = run("-m", "rl_triton.doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
