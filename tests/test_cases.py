"""The worked numbers of `cases.json`, with every variant that their hints name."""

import pytest
from cases import call, load_cases

import rl_triton
from rl_triton import reference

CASES = [case for case in load_cases() if not case.function.startswith("integrations.")]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_library(case, path, device):
    kwargs = case.kwargs(device)
    outputs = call(getattr(rl_triton, case.function), kwargs)
    case.check(outputs)
    assert all(output.dtype == case.dtype for output in outputs)


@every_case
def test_oracle(case):
    case.check(getattr(reference, case.function)(**case.kwargs()))


def test_a_wrong_number_is_noticed():
    case = CASES[0]
    with pytest.raises(AssertionError):
        case.check(tuple(x + 1e-3 for x in reference.compute_gae(**case.kwargs())))
