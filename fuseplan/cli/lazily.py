"""Declare a command whose code is imported when it runs, so that ``--help`` imports no JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import typer

F = TypeVar("F", bound=Callable[..., None])


def command(group: typer.Typer, module: str) -> Callable[[F], F]:
    """Add a command to ``group``. The decorated function has its options and its help, and no code: the
    function of the same name in ``module``, with the same parameters, is called when the command runs."""

    def add(declared: F) -> F:
        @functools.wraps(declared)
        def run(**chosen: Any) -> None:
            getattr(import_module(module), declared.__name__)(**chosen)

        group.command()(run)
        return declared

    return add
