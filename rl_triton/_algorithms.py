"""The table of algorithms: the inputs each one takes and the formulas it runs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import stages


class Algorithm(NamedTuple):
    """A name, the NamedTuple of its inputs, its formulas, and whether it returns targets and advantages.

    Field names carry the roles (`_layout`); the first field is a required per-step input that fixes the rank.
    """

    name: str
    inputs: Any
    stage: Callable[..., stages.Scan]
    two_outputs: bool

    def outputs(self, options: Sequence[Any]) -> int:
        """How many tensors a call returns; GAE's only option asks for targets."""
        return 2 if self.two_outputs or (self.name == "gae" and options[0]) else 1


def _algorithm(
    name: str, stage: Callable[..., stages.Scan], fields: str, two_outputs: bool = False
) -> Algorithm:
    return Algorithm(name, namedtuple(name, fields), stage, two_outputs)


_NEXT = "terminateds truncateds valid next_values values bootstrap_values last_value gamma lambda_"

GAE = _algorithm("gae", stages.gae, f"rewards {_NEXT}")
LAMBDA_RETURNS = _algorithm("lambda_returns", stages.lambda_returns, f"rewards {_NEXT}")
VTRACE = _algorithm("vtrace", stages.vtrace, f"rewards log_pi_target log_pi_behavior {_NEXT}", True)
RETRACE = _algorithm(
    "retrace",
    stages.retrace,
    "rewards action_probs_target action_probs_behavior q_values next_q_values_all actions "
    "next_action_probs_target terminateds truncateds valid gamma lambda_",
    two_outputs=True,
)
RETRACE_LOG = _algorithm(
    "retrace_log",
    stages.retrace_from_log_probs,
    "rewards log_pi_target log_pi_behavior q_values expected_next_q_values terminateds truncateds valid "
    "gamma lambda_",
    two_outputs=True,
)
TRACES = _algorithm("traces", stages.traces, "inputs dones valid seed_values gamma lambda_")
ELIGIBILITY = _algorithm("traces", stages.traces, "gradients dones valid seed_values gamma lambda_")
AFFINE = _algorithm("affine", stages.affine, "a b init")

ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (GAE, LAMBDA_RETURNS, VTRACE, RETRACE, RETRACE_LOG, TRACES, AFFINE)
}
