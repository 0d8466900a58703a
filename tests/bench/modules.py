"""The TorchRL modules as a user calls them, against TorchRL's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_triton import reference

from . import baselines
from .grid import Case
from .workloads import ALGORITHMS, Outputs, Skipped, Workload, as_tuple, compare, draw, repeated, rounded

GAMMA, LAMBDA = 0.99, 0.95
OBSERVATION, WIDTH = 32, 256


def prepare(case: Case, device: torch.device) -> Workload:
    try:
        import torchrl  # noqa: F401
        from tensordict import TensorDict
    except ImportError as missing:
        raise Skipped(f"needs torchrl and tensordict ({missing})") from missing
    name = "vtrace" if case.variant == "VTrace" else "gae"
    inputs = repeated(draw(case, ALGORITHMS[name], device), case.num_envs)
    done = inputs["terminateds"] | inputs["truncateds"]
    inputs["next_values"] = baselines.value_of_next(
        inputs["values"], inputs.pop("last_value"), inputs["truncateds"], inputs.pop("bootstrap_values"), None
    )
    column = {key: x.unsqueeze(-1) for key, x in (inputs | {"done": done}).items()}
    data = TensorDict(
        {
            "state_value": column["values"],
            "next": {
                "state_value": column["next_values"],
                "reward": column["rewards"],
                "done": column["done"],
                "terminated": column["terminateds"],
                "truncated": column["truncateds"],
            },
        },
        batch_size=[case.num_envs, case.seq_len],
        device=device,
    )
    build = {"GAE": _gae, "GAE single_pass": _single_pass, "VTrace": _vtrace}[case.variant]
    return build(inputs, column, data)


def _workload(
    module: Callable[[Any], Any],
    data: Any,
    due: Callable[[], Outputs],
    others: dict[str, Callable[[], Callable[[], Any]]],
) -> Workload:
    """A module on its tensordict; `due` gives advantages and targets `[N, T]`."""
    expected: list[Outputs] = []

    def check(outputs: Outputs, tolerance: float | None) -> None:
        if not expected:
            expected.append(tuple(y.to(data.device) for y in due()))
        compare(
            tuple(y.reshape(data.batch_size) for y in outputs), expected[0], tolerance or baselines.TOLERANCE
        )

    return Workload({}, _reading(module, data), check, baselines=others)


def _gae(inputs: dict[str, Tensor], column: dict[str, Tensor], data: Any) -> Workload:
    from torchrl.objectives.value import GAE as TorchRLGAE

    from rl_triton.integrations.torchrl import GAE

    how = {"gamma": GAMMA, "lmbda": LAMBDA, "value_network": None}
    options = ALGORITHMS["gae"].options
    vectorized = baselines.TORCHRL_VECTORS["gae"]
    return _workload(
        GAE(**how),
        data,
        lambda: as_tuple(reference.compute_gae(**inputs, **rounded(options, torch.float32))),
        {
            baselines.TORCHRL_MODULE: lambda: _reading(TorchRLGAE(**how), data),
            baselines.TORCHRL_MODULE_VECTORIZED: lambda: _reading(TorchRLGAE(**how, vectorized=True), data),
            baselines.TORCHRL_VECTORIZED: lambda: baselines.torchrl("gae", vectorized, inputs, options),
        },
    )


def _vtrace(inputs: dict[str, Tensor], column: dict[str, Tensor], data: Any) -> Workload:
    from rl_triton.integrations.torchrl import VTrace

    module = VTrace(gamma=GAMMA, actor_network=None, value_network=None)
    keys = module.tensor_keys
    data.set("action", torch.zeros_like(column["rewards"]))
    data.set(keys.log_pi, inputs["log_pi_target"])
    data.set(keys.sample_log_prob, inputs["log_pi_behavior"])
    options = ALGORITHMS["vtrace"].options
    loop = baselines.TORCHRL_LOOPS["vtrace"]
    return _workload(
        module,
        data,
        lambda: reference.compute_vtrace(**inputs, **rounded(options, torch.float32))[::-1],
        {baselines.TORCHRL: lambda: _swapped(baselines.torchrl("vtrace", loop, inputs, options))},
    )


def _single_pass(inputs: dict[str, Tensor], column: dict[str, Tensor], data: Any) -> Workload:
    from tensordict.nn import TensorDictModule
    from torchrl.objectives.value import GAE as TorchRLGAE

    from rl_triton.integrations.torchrl import GAE

    num_envs, seq_len = data.batch_size
    generator = torch.Generator(data.device).manual_seed(1)
    # The observation reached is the next row's, except where the episode or the window ends.
    observations = torch.randn(num_envs, seq_len + 1, OBSERVATION, generator=generator, device=data.device)
    reached = torch.where(column["done"], observations[:, 1:].flip(0), observations[:, 1:])
    data.set("observation", observations[:, :-1].contiguous())
    data.set(("next", "observation"), reached)
    del data["state_value"], data["next", "state_value"]
    net = nn.Sequential(
        nn.Linear(OBSERVATION, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    ).to(data.device)
    value_network = TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])
    how = {"gamma": GAMMA, "lmbda": LAMBDA, "value_network": value_network}

    def due() -> Outputs:
        with torch.no_grad():
            values, v_next = (net(data[key])[..., 0] for key in ("observation", ("next", "observation")))
        known = {**inputs, "values": values, "next_values": v_next}
        options = rounded(ALGORITHMS["gae"].options, torch.float32)
        return as_tuple(reference.compute_gae(**known, **options))

    root = data.select("observation")

    def forward() -> None:
        with torch.no_grad():
            value_network(root)

    others = {baselines.TORCHRL_MODULE: lambda: _reading(TorchRLGAE(**how), data)}
    workload = _workload(GAE(**how, single_pass=True), data, due, others)
    workload.yardsticks[baselines.VALUE_FORWARD] = forward
    return workload


def _reading(module: Callable[[Any], Any], data: Any) -> Callable[[], Outputs]:
    """The module's call, advantages and targets taken from the tensordict it returns."""

    def call() -> Outputs:
        out = module(data)
        return out["advantage"], out["value_target"]

    return call


def _swapped(call: Callable[[], Outputs]) -> Callable[[], Outputs]:
    return lambda: call()[::-1]
