"""Errors a user can act on, and the reasons behind decisions."""

from __future__ import annotations

from dataclasses import dataclass


class FuseplanError(Exception):
    """Base of every error that fuseplan raises: what was expected, what came, and the
    remedy."""


class UnknownNameError(FuseplanError, ValueError):
    """A device, planner, workload or backend of that name is not known."""


class InvalidArgumentError(FuseplanError, TypeError):
    """An argument has the wrong type or value."""


class UnsupportedOperationError(FuseplanError, NotImplementedError):
    """An equation has no rule and ``strict=True`` asked for one."""


class InvalidPlanError(FuseplanError, ValueError):
    """A plan (read from a file, say) is illegal or does not belong to this function."""


class ConstraintError(FuseplanError, ValueError):
    """A constraint selects nothing, or cannot hold together with the rules or another one."""


class MismatchError(FuseplanError, AssertionError):
    """``FUSEPLAN_CHECK=1`` found that a fused result differs from JAX's own."""


class FuseplanWarning(UserWarning):
    """Something was left to XLA, or a limit was reached; the result is still right."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a group is refused: the rule it breaks, and the particulars.

    ``rule`` is one of ``producer-consumer``, ``cycle``, ``shapes``, ``side-effects``,
    ``on-chip``, ``opaque``, ``backend``, ``constraint``.
    """

    rule: str
    reason: str
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}"
