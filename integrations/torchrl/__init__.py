"""Drop-in replacements for TorchRL's value estimators: change the import, keep everything else.

    from rl_triton.integrations.torchrl import GAE  # in place of torchrl.objectives.value

Importing changes nothing in TorchRL; `register` and `install` do, and can be undone.
"""

from .. import packages_of

with packages_of("torchrl", __name__):
    from torchrl.objectives.value import TD0Estimator, ValueEstimatorBase

from . import functional
from .advantages import GAE, MultiAgentGAE
from .modules import DiscountedReturn, EligibilityTrace, EpisodicPrefixSum, Retrace
from .registry import install, installed, register, uninstall, unregister
from .returns import TD1Estimator, TDLambdaEstimator
from .vtrace import VTrace

# TorchRL's deprecated names; its own classes behind them can no longer be constructed.
TD0Estimate, TD1Estimate, TDLambdaEstimate = TD0Estimator, TD1Estimator, TDLambdaEstimator

__all__ = [
    "GAE",
    "DiscountedReturn",
    "EligibilityTrace",
    "EpisodicPrefixSum",
    "MultiAgentGAE",
    "Retrace",
    "TD0Estimate",
    "TD0Estimator",
    "TD1Estimate",
    "TD1Estimator",
    "TDLambdaEstimate",
    "TDLambdaEstimator",
    "VTrace",
    "ValueEstimatorBase",
    "functional",
    "install",
    "installed",
    "register",
    "uninstall",
    "unregister",
]
