"""Relations that hold between the functions, whatever any one of them computes."""

import pytest
import torch
from cases import BACKWARD, EDGES, FORWARD, FULL, assert_close, call, choice_id, problem
from torch import Tensor

import rl_triton
from rl_triton import (
    compute_discounted_returns,
    compute_eligibility_traces,
    compute_episodic_prefix_sum,
    compute_gae,
    compute_lambda_returns,
    compute_retrace,
    compute_retrace_from_log_probs,
    compute_vtrace,
)

ENDS = ("truncateds", "bootstrap_values", "last_value", "valid")


def close(actual, expected):
    assert_close((actual,), (expected.double().cpu(),))


def on_policy(name, kwargs):
    """The same window for a function that also takes log-probabilities, both policies being the same."""
    log_pi = torch.full_like(kwargs["rewards"], -0.7)
    return call(getattr(rl_triton, name), {"log_pi_target": log_pi, "log_pi_behavior": log_pi} | kwargs)


@pytest.fixture
def window(path, device):
    return problem("compute_gae", (4,), 19, ENDS, device=device, lambda_=1.0)


def test_gae_telescopes_to_the_discounted_return(window):
    _, targets = compute_gae(**window, return_targets=True)
    returns = dict(window)
    del returns["values"], returns["lambda_"]
    close(targets, compute_discounted_returns(**returns))


def test_vtrace_on_policy_is_gae(window):
    for lambda_ in (1.0, 0.8):
        window["lambda_"] = lambda_
        targets, _ = on_policy("compute_vtrace", window)
        close(targets, compute_gae(**window, return_targets=True)[1])


def shifted_values(window):
    """`V(s'_t)` at every row, as the window's own sources give it."""
    shifted = torch.cat([window["values"][:, 1:], window["last_value"].unsqueeze(-1)], -1)
    cut = window["truncateds"].clone()
    cut[:, :-1] |= ~window["valid"][:, 1:]
    return torch.where(cut, window["bootstrap_values"], shifted)


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_gae_target_is_the_lambda_return(window, lambda_):
    window["lambda_"] = lambda_
    _, targets = compute_gae(**window, return_targets=True)
    ends = {key: window[key] for key in ("terminateds", "truncateds", "valid", "gamma", "lambda_")}
    next_values = shifted_values(window)
    close(targets, compute_lambda_returns(window["rewards"], next_values, **ends))
    close(
        targets,
        compute_gae(
            window["rewards"], window["values"], next_values=next_values, return_targets=True, **ends
        )[1],
    )


def test_retrace_on_policy_is_the_return(window):
    next_values = shifted_values(window)
    ends = {key: window[key] for key in ("terminateds", "truncateds", "valid", "gamma")}
    q = {"q_values": window["values"], "expected_next_q_values": next_values, "rewards": window["rewards"]}
    targets, _ = on_policy("compute_retrace_from_log_probs", q | ends)
    close(targets, compute_lambda_returns(window["rewards"], next_values, lambda_=1.0, **ends))


def test_retrace_from_probabilities_is_retrace_from_their_logs(path, device):
    kwargs = problem(
        "compute_retrace", T=17, given=("truncateds", "next_action_probs_target", "valid"), device=device
    )
    outputs = compute_retrace(**kwargs)
    pi, actions = kwargs.pop("action_probs_target"), kwargs.pop("actions")
    next_q, next_pi = kwargs.pop("next_q_values_all"), kwargs.pop("next_action_probs_target")
    expected = compute_retrace_from_log_probs(
        pi.gather(-1, actions.unsqueeze(-1)).squeeze(-1).log(),
        kwargs.pop("action_probs_behavior").log(),
        expected_next_q_values=(next_pi * next_q).sum(-1),
        **kwargs,
    )
    assert_close(outputs, tuple(y.double().cpu() for y in expected))


def test_retrace_without_next_policies_takes_the_next_row_or_its_own(path, device):
    given = ("truncateds", "valid")
    kwargs = problem("compute_retrace", T=17, given=given, device=device)
    pi, valid = kwargs["action_probs_target"], kwargs["valid"]
    cut = kwargs["terminateds"] | kwargs["truncateds"]
    cut[:, :-1] |= ~valid[:, 1:]
    cut[:, -1] = True
    next_pi = torch.where(cut.unsqueeze(-1), pi, pi.roll(-1, 1))
    explicit = compute_retrace(**kwargs, next_action_probs_target=next_pi)
    assert_close(call(compute_retrace, kwargs), tuple(y.double().cpu() for y in explicit))


def test_discounted_return_is_the_lambda_return_with_lambda_one(path, device):
    kwargs = problem("compute_discounted_returns", T=17, given=ENDS, device=device)
    unused = torch.zeros_like(kwargs["rewards"])
    close(
        compute_discounted_returns(**kwargs),
        compute_lambda_returns(next_values=unused, lambda_=1.0, **kwargs),
    )


def test_sum_of_ones_counts_the_steps_of_an_episode(path, device):
    kwargs = problem("compute_episodic_prefix_sum", (4,), 33, device=device)
    kwargs["inputs"] = torch.ones_like(kwargs["inputs"])
    for boundary in ("ends_at", "starts_at"):
        steps = []
        for row in kwargs["dones"].tolist():
            count, counts = 0, []
            for t, done in enumerate(row):
                opens = done if boundary == "starts_at" else t > 0 and row[t - 1]
                count = 1 if opens else count + 1
                counts.append(float(count))
            steps.append(counts)
        assert compute_episodic_prefix_sum(**kwargs, boundary=boundary).tolist() == steps


def test_prefix_sum_is_a_trace_without_decay(path, device):
    kwargs = problem("compute_episodic_prefix_sum", T=17, given=("seed_values", "valid"), device=device)
    sums = compute_episodic_prefix_sum(**kwargs)
    close(sums, compute_eligibility_traces(kwargs.pop("inputs"), gamma=1.0, lambda_=1.0, **kwargs))


def test_reverse_scan_is_the_flipped_forward_scan(path, device):
    kwargs = problem("affine_scan", T=17, given=("init",), device=device)
    flipped = kwargs | {"a": kwargs["a"].flip(-1), "b": kwargs["b"].flip(-1)}
    close(rl_triton.affine_scan(**kwargs, reverse=True), rl_triton.affine_scan(**flipped).flip(-1))


def rows(kwargs, start, stop, edge_to):
    """The part of a `[N, T]` problem between two rows; the value at an edge goes to one of the parts."""
    part = {k: x[:, start:stop] if isinstance(x, Tensor) and k not in EDGES else x for k, x in kwargs.items()}
    return {k: x for k, x in part.items() if k not in EDGES or edge_to}


@pytest.mark.parametrize(("name", "given"), FULL[:-1], ids=choice_id)
def test_concatenation_is_separate_calls_at_a_done_row(path, device, name, given):
    kwargs = problem(name, (4,), 17, given, device=device)
    done_at = 6
    key = "dones" if "dones" in kwargs else "truncateds"
    kwargs[key][:, done_at] = True
    function = getattr(rl_triton, name)
    first = call(function, rows(kwargs, 0, done_at + 1, edge_to=name in FORWARD))
    second = call(function, rows(kwargs, done_at + 1, None, edge_to=name in BACKWARD))
    parts = tuple(torch.cat(pair, -1).double().cpu() for pair in zip(first, second, strict=True))
    assert_close(call(function, kwargs), parts)


@pytest.mark.parametrize("name", FORWARD)
def test_forward_scans_continue_from_their_last_output(path, device, name):
    kwargs = problem(name, (4,), 17, ("seed_values",), device=device)
    function = getattr(rl_triton, name)
    whole = function(**kwargs)
    for split in (1, 6, 16):
        first = function(**rows(kwargs, 0, split, edge_to=True))
        carry = torch.where(kwargs["dones"][:, split - 1], 0, first[:, -1])
        second = function(**rows(kwargs, split, None, edge_to=False), seed_values=carry)
        close(whole, torch.cat([first, second], -1))


@pytest.mark.parametrize(("name", "given"), FULL[:6], ids=choice_id)
def test_rows_behind_a_done_row_change_nothing_before_it(path, device, name, given):
    kwargs = problem(name, (4,), 17, given, device=device)
    kwargs["terminateds"][:, 8] = True
    longer = call(getattr(rl_triton, name), kwargs)
    shorter = call(getattr(rl_triton, name), rows(kwargs, 0, 9, edge_to=False))
    assert_close(tuple(y[:, :9] for y in longer), tuple(y.double().cpu() for y in shorter))


@pytest.mark.parametrize(("name", "given"), FULL[:6], ids=choice_id)
def test_padding_equals_a_shorter_call(path, device, name, given):
    # The next value at an open end comes from other sources than the one before padding: leave those out.
    apart = {"last_value", "bootstrap_values" if name == "compute_lambda_returns" else ""}
    given = tuple(key for key in given if key not in apart)
    kwargs = problem(name, (4,), 17, given, device=device)
    kwargs["valid"][:] = torch.arange(17, device=device) < 9
    padded = call(getattr(rl_triton, name), kwargs)
    alone = call(getattr(rl_triton, name), rows(kwargs, 0, 9, edge_to=False))
    assert_close(tuple(y[:, :9] for y in padded), tuple(y.double().cpu() for y in alone))
    assert all((y[:, 9:] == 0).all() for y in padded)


def test_the_reward_may_carry_the_bootstrap(window):
    """`r + γ V(s')` on a row called terminated is the same as bootstrapping a truncated one."""
    cut = window["truncateds"] & ~window["terminateds"]
    augmented = window | {
        "rewards": window["rewards"] + torch.where(cut, window["gamma"] * window["bootstrap_values"], 0),
        "terminateds": window["terminateds"] | cut,
    }
    close(call(compute_gae, window)[0], call(compute_gae, augmented)[0])


def test_vtrace_of_one_row(path, device):
    """The target moves by ρ times the TD error, and the advantage is that step."""
    kwargs = problem("compute_vtrace", (5,), 1, ("last_value",), device=device)
    kwargs["terminateds"] = torch.zeros_like(kwargs["terminateds"])
    ratio = (kwargs["log_pi_target"] - kwargs["log_pi_behavior"]).exp().clamp(max=1.0)
    delta = kwargs["rewards"] + kwargs["gamma"] * kwargs["last_value"].unsqueeze(-1) - kwargs["values"]
    targets, advantages = compute_vtrace(**kwargs)
    close(targets, kwargs["values"] + ratio * delta)
    close(advantages, ratio * delta)
