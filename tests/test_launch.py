"""What reaches Triton's launchers, in each of the forms they have had: no GPU is needed to hand it over."""

import pytest
import torch
from cases import FULL, call, choice_id, problem
from torch import Tensor

import rl_triton
from rl_triton import _ops

launch = pytest.importorskip("rl_triton.kernels.launch")

STREAM = 7


class Compiled:
    """A kernel as far as launching goes: its signature says what it reads."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self, signature, run):
        self.src = Source(signature)
        self.run = run


class Source:
    def __init__(self, signature):
        self.signature = signature


class Launcher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, form, calls):
        self.form, self.calls = form, calls
        if form != "unknown":
            self.launch = self
        if form == "3.7":
            self.arg_annotations = self.kernel_signature = None

    def __call__(self, *arguments):
        before = {"3.6": 13, "3.7": 15, "unknown": 9}[self.form]
        grid, stream, function = arguments[:3], arguments[3], arguments[4]
        assert (stream, function) == (STREAM, Compiled.function)
        read = arguments[before] if self.form == "3.7" else arguments[before:]
        self.calls.append((grid, list(read)))


def kinds(argument):
    """A signature as Triton writes it: what is absent, 1 or no number is part of the kernel."""
    if isinstance(argument, tuple):
        return tuple(map(kinds, argument))
    if isinstance(argument, Tensor):
        return "*fp32"
    number = isinstance(argument, int | float) and not isinstance(argument, bool)
    return "i32" if number and argument != 1 else "constexpr"


@pytest.mark.parametrize("form", ["3.6", "3.7", "unknown"])
@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
@pytest.mark.parametrize("T", [7, 6000])
def test_a_launcher_gets_what_its_kernel_reads(monkeypatch, name, given, T, form):
    calls, expected = [], []

    def compiled(plan, values, constants):
        arguments = (*launch._filled(plan.arguments, values), *constants)
        signature = dict(enumerate(kinds(arguments)))
        read = zip(launch._flat(arguments), launch._flat(signature.values()), strict=True)
        due = [x.data_ptr() if isinstance(x, Tensor) else x for x, kind in read if kind != "constexpr"]
        expected.append((plan.grid, due))
        return Compiled(signature, Launcher(form, calls))

    monkeypatch.setattr(launch.Plan, "compile", compiled)
    monkeypatch.setattr(launch, "interpreted", False)
    monkeypatch.setattr(launch, "_empty", lambda shape, stride, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(_ops, "kernel_serves", lambda device: True)
    monkeypatch.setattr(_ops, "_plans", {})
    monkeypatch.setattr(_ops, "_latest", {})

    kwargs = problem(name, (2,), T, given)
    function = getattr(rl_triton, name)
    call(function, kwargs)
    assert len(calls) == (2 if T > 4096 else 1)
    assert calls == expected

    # The next call brings other tensors and numbers.
    calls.clear()
    fresh = {key: x.clone() if isinstance(x, Tensor) else x for key, x in kwargs.items()}
    if "gamma" in fresh:
        fresh["gamma"] = 0.5
    outputs = call(function, fresh)
    pointers = {x.data_ptr() for x in (*fresh.values(), *outputs) if isinstance(x, Tensor)}
    for _, read in calls:
        inputs = {x.data_ptr() for x in fresh.values() if isinstance(x, Tensor)}
        assert inputs <= set(read)
        assert not {x.data_ptr() for x in kwargs.values() if isinstance(x, Tensor)} & set(read)
        assert ("gamma" not in fresh) or 0.5 in read
    assert pointers <= {value for _, read in calls for value in read}
