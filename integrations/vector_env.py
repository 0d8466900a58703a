"""GAE for Gymnasium vector environments, in each of their three autoreset modes."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from rl_triton import compute_gae

from . import cleanrl
from ._rollout import check_rollout, shift

MODES = ("NextStep", "SameStep", "Disabled")


def gae(
    rewards: Tensor,
    values: Tensor,
    terminateds: Tensor,
    truncateds: Tensor,
    next_value: Tensor,
    gamma: float | Tensor = 0.99,
    gae_lambda: float | Tensor = 0.95,
    *,
    autoreset_mode: str | Enum,
    prev_done: Tensor | None = None,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages and returns of a rollout, and which rows of it are transitions.

    `A[t] = r[t] + γ v' − v[t] + γ λ A[t+1]`, without `v'` where the episode terminated and without `A[t+1]`
    where it ended; `returns = A + v`. The flags say how the step at row t ended, as `step` returns them.

    Next-step: the row after a done row is a dummy, in which the environment resets whatever the action. It is
    invalid: advantage and return are 0 there. Its observation is the final one, so a truncated row takes
    `v' = values[t+1]` from it, or `next_value` in the last row. Mask dummy rows out of the loss with `valid`.

    Same-step and disabled: `values[t+1]` after a done row is `V` of the next episode's first observation, so
    a truncated row takes `v' = final_values[t]`. Every row is valid.

    Args:
        rewards, values: `[T, N]`; `values[t]` is `V` of the observation that `step` acted on in row t.
        terminateds, truncateds: `[T, N]`, any dtype; where both are set, termination wins.
        next_value: `[N]` or `[1, N]`, `V` of the observation after the last step.
        gamma, gae_lambda: numbers or tensors, as `rl_triton.compute_gae` takes them.
        autoreset_mode: `gymnasium.vector.AutoresetMode` or its value, `"NextStep"`, `"SameStep"` or
            `"Disabled"`; `envs.metadata["autoreset_mode"]` holds it.
        prev_done: `[N]` or `[1, N]`, the envs whose last step *before* the window ended an episode, so that
            row 0 is a dummy; `None`: none. Read in next-step mode alone.
        final_values: `[T, N]`, `V` of the final observation in truncated rows, read nowhere else. Required in
            same-step and disabled mode, not read in next-step mode.

    Returns:
        `(advantages, returns, valid)`, `[T, N]`; `valid` is bool.

    Raises:
        ValueError, TypeError: an argument is missing, or its shape, dtype or device is wrong.

    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2016.

    Examples:
        >>> advantages, returns, valid = gae(
        ...     rewards, values, terminateds, truncateds, next_value,
        ...     autoreset_mode=envs.metadata["autoreset_mode"], prev_done=prev_done,
        ... )
    """
    mode = autoreset_mode.value if isinstance(autoreset_mode, Enum) else autoreset_mode
    if mode not in MODES:
        raise ValueError(
            f"autoreset_mode must be gymnasium's AutoresetMode or one of {MODES}, got {autoreset_mode!r}"
        )

    if mode != "NextStep":
        if final_values is None:
            raise ValueError(
                f"final_values must be given with autoreset_mode={mode!r}: V of the final observation at "
                "truncated rows, which values[t+1] is not"
            )
        advantages, returns = cleanrl.gae(
            rewards,
            values,
            None,
            next_value,
            None,
            gamma,
            gae_lambda,
            terminateds=terminateds,
            truncateds=truncateds,
            final_values=final_values,
        )
        return advantages, returns, torch.ones_like(advantages, dtype=torch.bool)

    per_step = {"values": values, "terminateds": terminateds, "truncateds": truncateds}
    per_env = {"next_value": next_value} | ({} if prev_done is None else {"prev_done": prev_done})
    check_rollout(rewards, per_step, per_env, gae_lambda)
    ended = torch.logical_or(terminateds, truncateds)
    row = (1, *ended.shape[1:])
    opening = ended.new_zeros(row) if prev_done is None else prev_done.reshape(row) != 0
    valid = torch.cat([opening, ended[:-1]])[: ended.shape[0]].logical_not()
    advantages, returns = compute_gae(
        rewards,
        values,
        terminateds,
        truncateds,
        gamma,
        gae_lambda,
        next_values=shift(values, next_value),
        valid=valid,
        time_dim=0,
        return_targets=True,
    )
    return advantages, returns, valid
