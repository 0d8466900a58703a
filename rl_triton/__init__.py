"""Credit assignment for reinforcement learning as Triton kernels."""

from .functional import (
    affine_scan,
    compute_discounted_returns,
    compute_eligibility_traces,
    compute_episodic_prefix_sum,
    compute_gae,
    compute_lambda_returns,
    compute_retrace,
    compute_retrace_from_log_probs,
    compute_vtrace,
)
from .warmup import warmup

__version__ = "0.1.2"

__all__ = [
    "affine_scan",
    "compute_discounted_returns",
    "compute_eligibility_traces",
    "compute_episodic_prefix_sum",
    "compute_gae",
    "compute_lambda_returns",
    "compute_retrace",
    "compute_retrace_from_log_probs",
    "compute_vtrace",
    "warmup",
]
