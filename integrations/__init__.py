"""What connects the library to others, each with packages of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def packages_of(extra: str, module: str) -> Iterator[None]:
    """Around a module's imports: one that is missing is named together with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        message = f"{module} needs {package}: install rl-triton with its extra [{extra}]"
        raise ModuleNotFoundError(message, name=error.name) from error
