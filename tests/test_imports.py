"""What importing the library pulls in, and that it works where Triton is missing."""

import os
import subprocess
import sys

import pytest


def run(code):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def imports_nothing_of(packages, code):
    return run(f"""
import sys
{code}
loaded = {{name.partition(".")[0] for name in sys.modules}} & {packages!r}
sys.exit(f"imported {{sorted(loaded)}}" if loaded else 0)
""")


OPTIONAL = {"tensordict", "torchrl", "gymnasium", "tyro", "matplotlib", "tensorboard"}


def test_the_core_imports_no_optional_package():
    result = imports_nothing_of(OPTIONAL, "import rl_triton, rl_triton.reference")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ["tensordict", "torchrl", "gymnasium"])
def test_an_import_of_an_optional_package_would_be_noticed(package):
    pytest.importorskip(package)
    result = imports_nothing_of(OPTIONAL, f"import rl_triton, {package}")
    assert result.returncode != 0 and package in result.stderr


@pytest.mark.parametrize(
    ("module", "package", "extra"), [("torchrl", "torchrl", "torchrl"), ("envs", "gymnasium", "examples")]
)
def test_a_missing_package_is_named_with_its_extra(module, package, extra):
    result = run(f"import sys; sys.modules[{package!r}] = None; import rl_triton.integrations.{module}")
    assert result.returncode != 0
    assert f"rl_triton.integrations.{module} needs {package}: install rl-triton with its extra [{extra}]" in (
        result.stderr
    )


WITHOUT_TRITON = """
import importlib.abc, sys

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
"""


def test_works_without_triton():
    result = run(
        WITHOUT_TRITON
        + """
import torch, rl_triton
rewards = torch.tensor([[1.0, 2.0, 3.0]])
done = torch.tensor([[0, 1, 0]])
advantages = rl_triton.compute_gae(rewards, torch.zeros(1, 3), done, gamma=0.5, lambda_=1.0)
assert advantages.tolist() == [[2.0, 2.0, 3.0]], advantages
rewards.requires_grad_()
rl_triton.compute_discounted_returns(rewards, torch.zeros(1, 3), gamma=0.5).sum().backward()
assert rewards.grad.tolist() == [[1.0, 1.5, 1.75]], rewards.grad
assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
"""
    )
    assert result.returncode == 0, result.stderr


def test_the_block_on_triton_holds():
    result = run(WITHOUT_TRITON + "import triton")
    assert result.returncode != 0 and "No module named 'triton'" in result.stderr


def test_everything_public_is_there():
    import rl_triton

    assert all(hasattr(rl_triton, name) for name in rl_triton.__all__)
    assert rl_triton.__version__
