"""Drop-in replacements for TorchRL's value estimators: change the import, keep everything else.

    from rl_triton.integrations.torchrl import GAE  # in place of torchrl.objectives.value

Importing changes nothing in TorchRL; `register` and `install` do, and can be undone.
"""

from torchrl.objectives.value import TD0Estimator, ValueEstimatorBase

from .advantages import GAE, MultiAgentGAE
from .returns import TD1Estimator, TDLambdaEstimator

# Names that TorchRL deprecates.
TD0Estimate, TD1Estimate, TDLambdaEstimate = TD0Estimator, TD1Estimator, TDLambdaEstimator

__all__ = [
    "GAE",
    "MultiAgentGAE",
    "TD0Estimate",
    "TD0Estimator",
    "TD1Estimate",
    "TD1Estimator",
    "TDLambdaEstimate",
    "TDLambdaEstimator",
    "ValueEstimatorBase",
]
