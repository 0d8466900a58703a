"""What must not be read changes no bit; what is read stays visible, in its own episode alone."""

import inspect

import pytest
import torch
from cases import (
    ALL_CHOICES,
    BACKWARD,
    FLAGS,
    FULL,
    MAIN,
    assert_close,
    call,
    choice_id,
    oracle,
    problem,
    thorough,
)
from poison import fill, floating, garble_flags, poisonable, probes, shown, unread

import rl_triton

# One window: row 1 terminates, row 2 is truncated, row 4 stands before the invalid row 5, row 6 is open.
WINDOW = {
    "rewards": torch.arange(7.0),
    "values": torch.arange(7.0) + 1,
    "terminateds": torch.tensor([0, 1, 0, 0, 0, 0, 0]),
    "truncateds": torch.tensor([0, 0, 1, 0, 0, 0, 0]),
    "valid": torch.tensor([1, 1, 1, 1, 1, 0, 1]),
}
ROW = torch.ones(7)


@pytest.mark.parametrize(
    ("name", "extra", "key", "rows"),
    [
        ("compute_gae", {}, "rewards", [0, 1, 2, 3, 4, 6]),
        ("compute_gae", {}, "values", [0, 1, 2, 3, 4, 6]),
        ("compute_gae", {"next_values": ROW}, "next_values", [0, 2, 3, 4, 6]),
        ("compute_gae", {"bootstrap_values": ROW}, "bootstrap_values", [2, 4, 6]),
        (
            "compute_gae",
            {"bootstrap_values": ROW, "last_value": torch.tensor(1.0)},
            "bootstrap_values",
            [2, 4],
        ),
        ("compute_gae", {"gamma": 0.9 * ROW}, "gamma", [0, 2, 3, 4, 6]),
        ("compute_gae", {"lambda_": 0.9 * ROW}, "lambda_", [0, 3]),
    ],
)
def test_the_rows_that_gae_reads(name, extra, key, rows):
    kwargs = WINDOW | extra
    assert (~unread(name, kwargs)[key]).nonzero().flatten().tolist() == rows


@pytest.mark.parametrize("time_dim", thorough([-1, -2], quick=[-1]))
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("name", "given"), thorough(ALL_CHOICES, quick=MAIN), ids=choice_id)
def test_unread_slots_change_no_bit(path, device, name, given, zeros, time_dim):
    kwargs = poisonable(name, given, zeros=zeros, time_dim=time_dim, device=device)
    masks = unread(name, kwargs)
    function = getattr(rl_triton, name)
    clean = call(function, fill(kwargs, masks, 0.0))
    assert all(y.isfinite().all() for y in clean)
    for value in (torch.nan, torch.inf, -1e30):
        poisoned = call(function, garble_flags(fill(kwargs, masks, value)))
        assert all(map(torch.equal, clean, poisoned))


@pytest.mark.parametrize("value", thorough([torch.nan, torch.inf], quick=[torch.nan]))
@pytest.mark.parametrize("zeros", thorough([False, True], quick=[True]))
@pytest.mark.parametrize(("name", "given"), FULL, ids=choice_id)
def test_a_used_nan_or_inf_shows_where_the_loop_shows_it(path, device, name, given, zeros, value):
    kwargs = poisonable(name, given, zeros=zeros, batch=(1,), T=5, device=device)
    # An infinite weight meets zeros and infinities of either sign, in an order that is the scan's own.
    weights = {"gamma", "lambda_", "b"} if value == torch.inf else set()
    poisoned = probes(kwargs, [key for key in floating(kwargs) if key not in weights], value)
    assert_close(call(getattr(rl_triton, name), poisoned), oracle(name, poisoned))


ALWAYS_READ = {
    "compute_gae": "rewards",
    "compute_vtrace": "values",
    "compute_retrace": "q_values",
    "compute_retrace_from_log_probs": "log_pi_target",
    "compute_lambda_returns": "rewards",
    "compute_discounted_returns": "rewards",
    "compute_eligibility_traces": "gradients",
    "compute_episodic_prefix_sum": "inputs",
}


@pytest.mark.parametrize(("name", "given"), FULL[:-1], ids=choice_id)
def test_a_nan_stays_in_its_episode(path, device, name, given):
    """Independent of the loop: episodes are numbered from the flags, and a NaN shows in one of them."""
    kwargs = poisonable(name, given, batch=(2,), T=5, device=device)
    dones = [kwargs[key] for key in ("terminateds", "truncateds", "dones") if key in kwargs]
    done = torch.stack(dones).any(0)
    opens = torch.zeros_like(done)
    opens[:, 1:] = done[:, :-1] | ~kwargs["valid"][:, :-1]
    episode = opens.cumsum(-1) + 100 * torch.arange(len(done), device=device).unsqueeze(-1)
    where = shown(call(getattr(rl_triton, name), probes(kwargs, [ALWAYS_READ[name]], torch.nan)))
    assert not (where & (episode != episode.view(-1, 1, 1))).any()
    assert torch.equal(where.flatten(1).diagonal(), kwargs["valid"].flatten())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("name", "given", "key"),
    [
        (name, given, key)
        for name, given in FULL
        for key in ("gamma", "lambda_")
        if key in inspect.signature(getattr(rl_triton, name)).parameters
    ],
    ids=choice_id,
)
def test_one_number_for_all_rows_is_not_read_by_those_that_need_none(path, device, name, given, key, value):
    kwargs = problem(name, (2,), 5, given, device=device)
    function = getattr(rl_triton, name)
    ended = {"valid": torch.zeros_like}
    if name in BACKWARD:
        ended["terminateds"] = torch.ones_like
    for flag, like in ended.items():
        reading_none = kwargs | {flag: like(kwargs[flag])}
        expected = call(function, reading_none | {key: 0.5})
        for number in (value, torch.tensor(value), torch.tensor(value, device=device, requires_grad=True)):
            torch.testing.assert_close(call(function, reading_none | {key: number}), expected)


def test_a_nan_flag_is_true(path, device):
    kwargs = poisonable("compute_gae", ("truncateds",), device=device)
    as_nan = {k: torch.where(x, torch.nan, 0.0) if k in FLAGS else x for k, x in kwargs.items()}
    assert all(map(torch.equal, call(rl_triton.compute_gae, kwargs), call(rl_triton.compute_gae, as_nan)))
