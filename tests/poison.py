"""Which slots of which inputs a function reads, found by poisoning them one at a time in the float64 loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cases import COEFFICIENTS, FLAGS, NUM_ACTIONS, oracle, problem
from torch import Tensor


def poisonable(name: str, given: tuple[str, ...], *, zeros: bool = False, **setting: Any) -> dict[str, Any]:
    """A random problem with per-step coefficients; with `zeros`, many coefficients are exactly zero."""
    kwargs = problem(name, given=given, **setting)
    generator = torch.Generator().manual_seed(1)

    def often(x: Tensor, value: float) -> Tensor:
        return torch.where((torch.rand(x.shape, generator=generator) < 0.3).to(x.device), value, x)

    shape = next(x.shape for key, x in kwargs.items() if key in FLAGS | {"a"})
    device = next(iter(kwargs.values())).device
    for key in COEFFICIENTS & set(kwargs):
        kwargs[key] = (0.7 + 0.3 * torch.rand(shape, generator=generator)).to(device)
    if zeros:
        for key in ("gamma", "lambda_", "b", "action_probs_target", "next_action_probs_target"):
            if key in kwargs:
                kwargs[key] = often(kwargs[key], 0.0)
        if "lambda_" in kwargs:
            kwargs["lambda_"] = often(kwargs["lambda_"], 1.0)
        if "log_pi_target" in kwargs:
            kwargs["log_pi_target"] = often(kwargs["log_pi_target"], -torch.inf)
    return kwargs


def floating(kwargs: dict[str, Any]) -> list[str]:
    return [
        key
        for key, x in kwargs.items()
        if isinstance(x, Tensor) and x.is_floating_point() and key not in FLAGS and x.numel() > 0
    ]


def probes(kwargs: dict[str, Any], keys: Sequence[str], value: float) -> dict[str, Any]:
    """The problem once per slot of the inputs named, on a new first axis, with `value` in that slot."""
    sizes = [kwargs[key].numel() for key in keys]
    total = sum(sizes)
    stacked = {k: x.expand(total, *x.shape) if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    start = 0
    for key, size in zip(keys, sizes, strict=True):
        stacked[key] = stacked[key].clone(memory_format=torch.contiguous_format)
        stacked[key].view(total, size)[start : start + size].fill_diagonal_(value)
        start += size
    return stacked


def shown(outputs: Sequence[Tensor]) -> Tensor:
    """Where any of the outputs is not finite."""
    return torch.stack([~y.isfinite() for y in outputs]).any(0)


def unread(name: str, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Per floating input, the slots where a NaN shows up in no output."""
    masks = {}
    for key in floating(kwargs):
        seen = shown(oracle(name, probes(kwargs, [key], torch.nan))).flatten(1).any(1)
        masks[key] = ~seen.view(kwargs[key].shape).to(kwargs[key].device)
    return masks


def fill(kwargs: dict[str, Any], masks: dict[str, Tensor], value: float) -> dict[str, Any]:
    return kwargs | {key: kwargs[key].masked_fill(mask, value) for key, mask in masks.items()}


def garble_flags(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Flip every flag, and spoil every action, that decides nothing."""
    kwargs = dict(kwargs)
    if "valid" in kwargs:
        for key in {"terminateds", "truncateds", "dones"} & set(kwargs):
            kwargs[key] = kwargs[key] ^ ~kwargs["valid"]
        if "actions" in kwargs:
            kwargs["actions"] = torch.where(kwargs["valid"], kwargs["actions"], 1000 * NUM_ACTIONS)
    if "truncateds" in kwargs:
        kwargs["truncateds"] = kwargs["truncateds"] ^ kwargs["terminateds"]
    return kwargs
