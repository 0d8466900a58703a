"""The worked cases of `cases.json`, random problems for every function, and how close is close enough."""

from __future__ import annotations

import inspect
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_triton import reference

FUNCTIONS = (
    "compute_gae",
    "compute_vtrace",
    "compute_retrace",
    "compute_retrace_from_log_probs",
    "compute_lambda_returns",
    "compute_discounted_returns",
    "compute_eligibility_traces",
    "compute_episodic_prefix_sum",
    "affine_scan",
)
FORWARD = ("compute_eligibility_traces", "compute_episodic_prefix_sum")
BACKWARD = FUNCTIONS[:6]

FLAGS = frozenset({"terminateds", "truncateds", "dones", "valid", "prev_done", "next_done"})
EDGES = frozenset({"last_value", "seed_values", "init"})
PER_ACTION = frozenset({"action_probs_target", "next_q_values_all", "next_action_probs_target"})
COEFFICIENTS = frozenset({"gamma", "lambda_"})
PER_STEP = PER_ACTION | {
    "rewards", "values", "next_values", "bootstrap_values", "q_values", "expected_next_q_values",
    "log_pi_target", "log_pi_behavior", "action_probs_behavior", "actions", "gradients", "inputs", "a", "b",
    "terminateds", "truncateds", "dones", "valid",
}  # fmt: skip

FLAG_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
FLAG_DTYPES += (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUM_ACTIONS = 3

# Per output dtype: error relative to the largest output of the row, and one rounding of the output itself.
TOLERANCE = {
    torch.float64: (1e-12, 0.0),
    torch.float32: (1e-5, 0.0),
    torch.bfloat16: (1e-5, 2**-8),
    torch.float16: (1e-5, 2**-11),
}


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def call(function: Any, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """All outputs as a tuple; the warning about Retrace's approximation has its own test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*next_action_probs_target")
        return as_tuple(function(**kwargs))


def oracle(name: str, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The float64 loop; its coefficients are rounded to float32 unless some input is float64."""
    inputs = [x for key, x in kwargs.items() if isinstance(x, Tensor) and key not in COEFFICIENTS | FLAGS]
    if not any(x.dtype == torch.float64 for x in inputs):
        rounded = {
            key: torch.as_tensor(kwargs[key]).float() if key in kwargs else _default(name, key)
            for key in COEFFICIENTS & set(inspect.signature(getattr(reference, name)).parameters)
        }
        kwargs = kwargs | rounded
    return as_tuple(getattr(reference, name)(**kwargs))


def _default(name: str, key: str) -> Tensor:
    return torch.tensor(inspect.signature(getattr(reference, name)).parameters[key].default).float()


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], time_dim: int = -1) -> None:
    """Within the tolerance of the dtype; NaN and infinities stand exactly where they are expected."""
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        absolute, relative = TOLERANCE[got.dtype]
        got, want = got.detach().double().cpu(), want.detach()
        finite = want.isfinite()
        torch.testing.assert_close(got[~finite], want[~finite], rtol=0, atol=0, equal_nan=True)
        size = torch.where(finite, want, 0).abs()
        scale = size.amax(time_dim, keepdim=True).clamp(min=1) if size.numel() else size
        error = torch.where(finite, got - want, 0).abs()
        # A NaN where a number is expected fails too.
        assert (error <= absolute * scale + relative * size).all(), (
            f"off by {error.max():.3g} at {error.argmax().item()}, scale {scale.max():.3g}"
        )


@dataclass(frozen=True)
class Case:
    """One worked case, or one of the variants its hints ask for."""

    name: str
    function: str
    arguments: dict[str, Any]
    expected: tuple[Any, ...]
    hints: dict[str, Any]
    tolerance: dict[str, float] | None
    dtype: torch.dtype = torch.float32
    reward_dtype: torch.dtype | None = None
    flag_dtype: torch.dtype = torch.bool

    def variants(self) -> Iterator[Case]:
        case = replace(self, dtype=getattr(torch, self.hints.get("dtype", "float32")))
        yield case
        for dtype in self.hints.get("flag_dtypes", ()):
            yield replace(case, name=f"{self.name}-{dtype}", flag_dtype=getattr(torch, dtype))
        if dtype := self.hints.get("reward_dtype"):
            yield replace(case, name=f"{self.name}-{dtype}", reward_dtype=getattr(torch, dtype))
        if steps := self.hints.get("steps_to_next_obs"):
            gamma = (self.hints["gamma_scalar"] ** torch.tensor(steps)).tolist()
            yield replace(case, name=f"{self.name}-steps", arguments=self.arguments | {"gamma": gamma})

    def kwargs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The arguments as a caller holds them."""

        def convert(key: str, value: Any) -> Any:
            if not isinstance(value, list):
                return value
            dtype = self.dtype
            if key in FLAGS:
                dtype = self.flag_dtype
            elif key == "actions":
                dtype = torch.int64
            elif key == "rewards":
                dtype = self.reward_dtype or self.dtype
            return torch.tensor(value, device=device).to(dtype)

        return {key: convert(key, value) for key, value in self.arguments.items()}

    def check(self, outputs: Tensor | tuple[Tensor, ...]) -> None:
        default = 1e-2 if self.dtype == torch.bfloat16 else 1e-5
        tolerance = self.tolerance or {"rtol": default, "atol": default}
        for got, want in zip(as_tuple(outputs), self.expected, strict=False):
            got = got.detach().double().cpu()
            asked = torch.tensor(_map(want, lambda x: x is not None))
            number = torch.tensor(_map(want, lambda x: 0.0 if x is None else float(x)), dtype=torch.float64)
            assert got.shape == number.shape
            rtol, atol = tolerance["rtol"], tolerance["atol"]
            torch.testing.assert_close(got[asked], number[asked], rtol=rtol, atol=atol, equal_nan=True)


def load_cases(prefix: str = "") -> list[Case]:
    """The cases whose function starts with `prefix`, each followed by its variants."""
    table = json.loads(Path(__file__).with_name("cases.json").read_text())
    cases = [
        Case(
            name=row["name"],
            function=row["call"],
            arguments={key: _numbers(value) for key, value in row["kwargs"].items()},
            expected=tuple(_numbers(value) for value in row["expected"].values()),
            hints=row.get("hints", {}),
            tolerance=row.get("tolerance"),
        )
        for row in table
        if row["call"].startswith(prefix)
    ]
    return [variant for case in cases for variant in case.variants()]


def _map(x: Any, f: Any) -> Any:
    return [_map(item, f) for item in x] if isinstance(x, list) else f(x)


def _numbers(x: Any) -> Any:
    return _map(x, lambda item: float(item) if item in ("NaN", "Infinity", "-Infinity") else item)


def tensor_arguments(name: str) -> tuple[list[str], list[str]]:
    """The required and the optional tensor inputs of a function."""
    parameters = inspect.signature(getattr(reference, name)).parameters
    tensors = [key for key in parameters if key in PER_STEP | EDGES]
    required = [key for key in tensors if parameters[key].default is inspect.Parameter.empty]
    return required, [key for key in tensors if key not in required]


def choices(name: str) -> list[tuple[str, ...]]:
    """Every set of optional inputs that may be given together."""
    _, optional = tensor_arguments(name)
    sets = itertools.chain.from_iterable(
        itertools.combinations(optional, size) for size in range(len(optional) + 1)
    )
    return [s for s in sets if "next_values" not in s or not {"bootstrap_values", "last_value"} & set(s)]


# Every function with each set of optional inputs.
ALL_CHOICES = [(name, given) for name in FUNCTIONS for given in choices(name)]
# Every function with as many inputs as it takes at once.
FULL = [(name, max((g for g in choices(name) if "next_values" not in g), key=len)) for name in FUNCTIONS]
# The same, and next values that are given or left to the function.
MAIN = [*FULL, *((name, g) for name, g in ALL_CHOICES if g in ((), ("next_values", "valid")))]


def thorough(values: Iterable[Any], quick: Iterable[Any] = ()) -> list[Any]:
    """Test parameters of which the interpreter takes the `quick` ones alone."""
    quick = list(quick)
    return [
        value if value in quick else pytest.param(*as_tuple(value), marks=pytest.mark.thorough)
        for value in values
    ]


def choice_id(value: Any) -> str | None:
    """A readable test id for a set of optional inputs."""
    return "+".join(value) or "none" if isinstance(value, tuple) else None


def problem(
    name: str,
    batch: tuple[int, ...] = (3,),
    T: int = 7,
    given: tuple[str, ...] = (),
    *,
    time_dim: int = -1,
    dtype: torch.dtype = torch.float32,
    flag_dtype: torch.dtype = torch.bool,
    layout: str = "contiguous",
    device: torch.device | str = "cpu",
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Random arguments: what is required, the optional ones `given`, and `settings` over the defaults."""
    generator = torch.Generator().manual_seed(seed)
    time_axis = time_dim % (len(batch) + 1)
    shape = [*batch[:time_axis], T, *batch[time_axis:]]
    required, _ = tensor_arguments(name)
    kwargs: dict[str, Any] = {}
    for index, key in enumerate([*required, *given]):
        value = _random(key, shape, time_axis, generator)
        if key in FLAGS:
            value = value.to(flag_dtype)
        elif key != "actions":
            value = value.to(dtype)
        kwargs[key] = lay_out(
            value.to(device), LAYOUTS[index % len(LAYOUTS)] if layout == "mixed" else layout
        )
    parameters = inspect.signature(getattr(reference, name)).parameters
    defaults = {"gamma": 0.97, "lambda_": 0.9, "time_dim": time_dim}
    kwargs |= {key: value for key, value in defaults.items() if key in parameters}
    return kwargs | settings


def _random(key: str, shape: list[int], time_axis: int, generator: torch.Generator) -> Tensor:
    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    if key == "valid":
        return uniform(*shape) < 0.8
    if key in FLAGS:
        return uniform(*shape) < 0.15
    if key in EDGES:
        return normal(*shape[:time_axis], *shape[time_axis + 1 :])
    if key == "actions":
        return (uniform(*shape) * NUM_ACTIONS).long()
    if key in ("action_probs_target", "next_action_probs_target"):
        return normal(*shape, NUM_ACTIONS).softmax(-1)
    if key == "next_q_values_all":
        return normal(*shape, NUM_ACTIONS)
    if key == "action_probs_behavior":
        return 0.2 + 0.6 * uniform(*shape)
    if key in ("log_pi_target", "log_pi_behavior"):
        return -2 * uniform(*shape)
    if key == "b":
        return 1.9 * uniform(*shape) - 0.95
    return normal(*shape)


LAYOUTS = ("contiguous", "reversed", "sliced", "expanded")


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same shape in other memory; `expanded` repeats its first entry, the others keep the numbers."""
    if layout == "reversed":
        order = list(range(x.ndim))[::-1]
        return x.permute(order).contiguous().permute(order)
    if layout == "sliced":
        # What lies between the elements must never be used.
        between = float("nan") if x.is_floating_point() else 1
        storage = torch.full([2 * size + 1 for size in x.shape], between, dtype=x.dtype, device=x.device)
        view = storage[tuple(slice(1, None, 2) for _ in x.shape)]
        return view.copy_(x)
    if layout == "expanded" and x.ndim > 0:
        return x[:1].expand(x.shape)
    return x.contiguous()
