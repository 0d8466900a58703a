"""GAE for loops that keep `[T, N]` buffers and say which observation *opens* an episode, as CleanRL does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_triton import compute_gae

from ._rollout import check_rollout, shift


def gae(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor | None,
    next_value: Tensor,
    next_done: Tensor | None,
    gamma: float | Tensor = 0.99,
    gae_lambda: float | Tensor = 0.95,
    *,
    terminateds: Tensor | None = None,
    truncateds: Tensor | None = None,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a rollout, from the variables of a CleanRL loop as they stand.

    `A[t] = r[t] + γ v' − v[t] + γ λ A[t+1]`, without `v'` and `A[t+1]` where the step at row t ended an
    episode; `returns = A + v`.

    `dones[t]` says that observation t opens an episode, so the step at row t ended one where `dones[t+1]` is
    set, and in the last row where `next_done` is. `dones[0]` belongs to the window before. One flag for both
    ends treats a time limit as a death; `terminateds` and `truncateds` tell them apart and are not shifted:
    row t says how the step at row t ended. With them `dones` and `next_done` are not read and may be `None`.

    Args:
        rewards, values, dones: `[T, N]`; `values[t]` is `V` of observation t.
        next_value, next_done: `[N]` or `[1, N]`; `V` of the observation after the last step, and whether that
            observation opens an episode. Not read in envs whose last step ended one.
        gamma, gae_lambda: numbers or tensors, as `rl_triton.compute_gae` takes them.
        terminateds, truncateds: `[T, N]`, any dtype; where both are set, termination wins.
        final_values: `[T, N]`, required with `truncateds`: `V` of the final observation in truncated rows,
            read nowhere else.

    Returns:
        `(advantages, returns)`, `[T, N]`.

    Raises:
        ValueError, TypeError: an argument is missing, or its shape, dtype or device is wrong.

    Gymnasium's next-step autoreset puts a dummy row behind every episode, which these arguments cannot show:
    see `rl_triton.integrations.vector_env.gae`.

    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2016.

    Examples:
        >>> advantages, returns = gae(rewards, values, dones, next_value, next_done, gamma=0.99)
    """
    per_step: dict[str, Any] = {"values": values}
    per_env: dict[str, Any] = {"next_value": next_value}
    if terminateds is None:
        for name, value in (("truncateds", truncateds), ("final_values", final_values)):
            if value is not None:
                raise ValueError(f"{name} is read beside terminateds, which must be given too")
        if dones is None or next_done is None:
            missing = "dones" if dones is None else "next_done"
            raise TypeError(f"{missing} must be a torch.Tensor unless terminateds is given, got None")
        per_step["dones"], per_env["next_done"] = dones, next_done
        check_rollout(rewards, per_step, per_env, gae_lambda)
        terminateds = shift(dones, next_done)
    else:
        per_step["terminateds"] = terminateds
        if (truncateds is None) != (final_values is None):
            raise ValueError(
                "truncateds and final_values (V of the final observation) must be given together, "
                f"got {'final_values' if truncateds is None else 'truncateds'} alone"
            )
        if truncateds is not None:
            per_step["truncateds"], per_step["final_values"] = truncateds, final_values
        check_rollout(rewards, per_step, per_env, gae_lambda)

    advantages, returns = compute_gae(
        rewards,
        values,
        terminateds,
        truncateds,
        gamma,
        gae_lambda,
        bootstrap_values=final_values,
        last_value=next_value,
        time_dim=0,
        return_targets=True,
    )
    return advantages, returns
