"""Names for the estimators in TorchRL's registry, and a reversible replacement of the built-ins.

Nothing happens on import. `register()` adds names that `loss.make_value_estimator` then takes; `install()`
makes every loss of the process use these estimators in place of TorchRL's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchrl.objectives import LossModule, value
from torchrl.objectives.utils import (
    _VALUE_ESTIMATOR_REGISTRY,
    ValueEstimators,
    default_value_kwargs,
    get_value_estimator_entry,
    register_value_estimator,
)

from .advantages import GAE, MultiAgentGAE
from .returns import TD1Estimator, TDLambdaEstimator
from .vtrace import VTrace

_ESTIMATORS: dict[ValueEstimators, Any] = {
    ValueEstimators.GAE: GAE,
    ValueEstimators.MAGAE: MultiAgentGAE,
    ValueEstimators.TD1: TD1Estimator,
    ValueEstimators.TDLambda: TDLambdaEstimator,
    ValueEstimators.VTrace: VTrace,
}

# `triton_gae`, `triton_magae`, `triton_td1`, `triton_tdlambda`, `triton_vtrace`.
_NAMES = {f"triton_{member.name.lower()}": member for member in _ESTIMATORS}

# What `install` replaced: registry entry and class. Empty when nothing is installed.
_replaced: dict[ValueEstimators, tuple] = {}


def register() -> None:
    """Make the estimators reachable by name: `loss.make_value_estimator("triton_gae")`.

    The names are `triton_gae`, `triton_magae`, `triton_td1`, `triton_tdlambda` and `triton_vtrace`, each with
    the default hyperparameters of TorchRL's estimator. Every loss class that supports the built-in supports
    the name from now on; call again after defining one with its own `SUPPORTED_VALUE_ESTIMATORS`.
    `unregister` undoes it.
    """
    for name, member in _NAMES.items():
        register_value_estimator(name, default_kwargs=default_value_kwargs(member))(_ESTIMATORS[member])
    for loss in _loss_classes():
        supported = loss.SUPPORTED_VALUE_ESTIMATORS
        added = (name for name, member in _NAMES.items() if member in supported and name not in supported)
        loss.SUPPORTED_VALUE_ESTIMATORS = (*supported, *added)


def unregister() -> None:
    """Take back the names that `register` added."""
    for name in _NAMES:
        _VALUE_ESTIMATOR_REGISTRY.pop(name, None)
    for loss in _loss_classes():
        loss.SUPPORTED_VALUE_ESTIMATORS = tuple(
            supported for supported in loss.SUPPORTED_VALUE_ESTIMATORS if supported not in _NAMES
        )


def install() -> None:
    """Replace TorchRL's estimators for the whole process, in its registry and in `torchrl.objectives.value`.

    Losses then build these estimators by default and from `ValueEstimators.GAE`, `"gae"` and so on, and
    `from torchrl.objectives.value import GAE` yields them. A name that was imported before, and an estimator
    that a loss has already built, stay what they are. `uninstall` undoes it.
    """
    if _replaced:
        return
    for member, cls in _ESTIMATORS.items():
        entry = get_value_estimator_entry(member)
        _replaced[member] = entry, getattr(value, cls.__name__)
        register_value_estimator(member, default_kwargs=entry.default_kwargs)(cls)
        setattr(value, cls.__name__, cls)


def uninstall() -> None:
    """Put back what `install` replaced."""
    for member, (entry, cls) in _replaced.items():
        _VALUE_ESTIMATOR_REGISTRY[member] = entry
        setattr(value, _ESTIMATORS[member].__name__, cls)
    _replaced.clear()


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for the length of a `with` block; inside an installed process it changes nothing."""
    outermost = not _replaced
    install()
    try:
        yield
    finally:
        if outermost:
            uninstall()


def _loss_classes() -> Iterator[Any]:
    """Every loss class with estimators of its own, however deep it derives from `LossModule`."""
    pending = [LossModule]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if "SUPPORTED_VALUE_ESTIMATORS" in vars(cls):
            yield cls
