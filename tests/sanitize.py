"""One call of every kernel at odd sizes, for compute-sanitizer (docs/contributing.md has the commands)."""

import torch

import rl_triton


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") < 0.2


def reals(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def run(shape: tuple[int, ...], time_dim: int, num_actions: int = 5) -> None:
    batch = list(shape)
    del batch[time_dim]
    edge, valid = reals(*batch), ~flags(*shape)
    terminateds, truncateds = flags(*shape), flags(*shape)
    where = {"valid": valid, "time_dim": time_dim}
    bootstrap = {"bootstrap_values": reals(*shape), "last_value": edge}
    rewards, values = reals(*shape), reals(*shape)
    rl_triton.compute_gae(rewards, values, terminateds, truncateds, **bootstrap, **where, return_targets=True)
    rl_triton.compute_gae(rewards, values, terminateds, next_values=reals(*shape), time_dim=time_dim)
    rl_triton.compute_vtrace(
        -rewards.abs(), -values.abs(), values, rewards, terminateds, truncateds, **bootstrap, **where
    )
    rl_triton.compute_lambda_returns(rewards, values, terminateds, truncateds, **bootstrap, **where)
    rl_triton.compute_discounted_returns(rewards, terminateds, truncateds, **bootstrap, **where)
    rl_triton.compute_retrace_from_log_probs(
        -rewards.abs(), -values.abs(), values, reals(*shape), rewards, terminateds, truncateds, **where
    )
    probs = torch.softmax(reals(*shape, num_actions), -1)
    rl_triton.compute_retrace(
        probs,
        torch.rand(shape, device="cuda") + 0.1,
        values,
        reals(*shape, num_actions),
        torch.randint(num_actions, shape, device="cuda"),
        rewards,
        terminateds,
        truncateds,
        next_action_probs_target=probs,
        **where,
    )
    rl_triton.compute_eligibility_traces(rewards, terminateds, 0.9, 0.8, edge, **where)
    rl_triton.compute_episodic_prefix_sum(rewards, terminateds, edge, **where)
    rl_triton.affine_scan(rewards, values, init=edge, reverse=True, time_dim=time_dim)


if __name__ == "__main__":
    run((5, 131), -1)
    run((37, 19), 0)
    run((3, 17, 5), 1)
    run((2, 4999), -1)
    torch.cuda.synchronize()
    print("done")
