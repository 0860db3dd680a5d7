"""Errors a user can act on, and the reasons behind decisions."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from fuseplan.support.work import Limit


class FuseplanError(Exception):
    """Base of every error that fuseplan raises: what was expected, what came, and the
    remedy."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def short_reason(error: BaseException) -> str:
    """An error in one line of at most 300 characters, as its message may be a page. The type is named unless
    it is fuseplan's own."""
    kind = "" if isinstance(error, FuseplanError) else f"{type(error).__name__}: "
    return textwrap.shorten(kind + str(error), 300, placeholder=" …")


class UnknownNameError(FuseplanError, ValueError):
    """A device, planner, workload or backend of that name is not known."""


class InvalidArgumentError(FuseplanError, TypeError):
    """An argument has the wrong type or value."""


class UnsupportedOperationError(FuseplanError, NotImplementedError):
    """An equation has no rule and ``strict=True`` asked for one."""


class ExtensionError(FuseplanError, ValueError):
    """A user's planner, rule or pricing failed, or gave an answer that it may not give."""


class InvalidPlanError(FuseplanError, ValueError):
    """A plan (read from a file, say) is illegal or does not belong to this function."""


class ConstraintError(FuseplanError, ValueError):
    """A constraint selects nothing, or cannot hold together with the rules or another one."""


class PatternError(FuseplanError, ValueError):
    """A pattern matches nothing, overlaps itself, or has a replacement with another result."""


class MismatchError(FuseplanError, AssertionError):
    """``FUSEPLAN_CHECK=1`` found that a fused result differs from JAX's own."""


class MemoryLimitError(FuseplanError, ValueError):
    """No plan was found whose temporaries fit in ``limit_bytes`` at once.

    ``smallest_bytes`` is the lowest peak of any plan that was found, ``least_bytes`` what every
    plan needs: the two are equal where the lowest is proven to be. ``bound_ps``, if there is one,
    is a bound on the time of every plan. ``ended_by`` is the limit that cut the search short, if one did.
    """

    def __init__(
        self,
        limit_bytes: int,
        smallest_bytes: int,
        least_bytes: int,
        bound_ps: int | None = None,
        ended_by: Limit | None = None,
    ) -> None:
        super().__init__(limit_bytes, smallest_bytes, least_bytes, bound_ps, ended_by)
        self.limit_bytes, self.smallest_bytes = limit_bytes, smallest_bytes
        self.least_bytes, self.bound_ps = least_bytes, bound_ps
        self.ended_by = ended_by

    def joined(self, other: MemoryLimitError) -> MemoryLimitError:
        """The error for the better of two graphs, either of which may be planned."""
        bounds = (self.bound_ps, other.bound_ps)
        return MemoryLimitError(
            self.limit_bytes,
            min(self.smallest_bytes, other.smallest_bytes),
            min(self.least_bytes, other.least_bytes),
            min(b for b in bounds if b is not None) if None not in bounds else None,
            self.ended_by or other.ended_by,
        )

    @property
    def proven(self) -> bool:
        """Whether no plan has a lower peak than ``smallest_bytes``."""
        return self.least_bytes >= self.smallest_bytes

    def __str__(self) -> str:
        if self.proven:
            known = f"the smallest possible peak is {self.smallest_bytes:,} bytes"
        else:
            known = f"the smallest peak found is {self.smallest_bytes:,} bytes"
            known += f", and none is below {self.least_bytes:,}" if self.least_bytes else ""
        found = "exists" if self.limit_bytes < self.least_bytes else "was found"
        cut = ""
        if self.ended_by is not None:
            cut = (
                f"; {self.ended_by.value} came before the search had ended: a longer deadline_s may find less"
            )
        return (
            f"no plan {found} whose temporaries need at most {self.limit_bytes:,} bytes at once: {known}. "
            f"Allow max_peak_bytes={self.smallest_bytes}, use a smaller batch, or recompute intermediates "
            f"(jax.checkpoint){cut}."
        )


class FuseplanWarning(UserWarning):
    """Something was left to XLA, or a limit was reached; the result is still right."""


class CompilerRefusalWarning(FuseplanWarning):
    """A device's compiler refused a fused kernel, or a program with kernels failed: another plan, or
    ``jax.jit``'s program, takes its place."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a group is refused: the rule that it breaks, the reason in words, and the operations at fault.

    ``rule`` is one of:

    - ``producer-consumer``: nothing connects the operations;
    - ``hub``: only a scalar that ties many operations together does;
    - ``cycle``: kernels would wait for each other, or one for itself;
    - ``shapes``: no tiling serves all of the operations;
    - ``side-effects``: an operation has side effects, and is a kernel of its own;
    - ``opaque``: XLA runs an operation as a step of its own;
    - ``backend``: kernels of the device's backend cannot contain the operations, or cannot exchange an array;
    - ``on-chip``: no tile fits on chip;
    - ``constraint``: the user's constraints forbid it;
    - ``nest``: the operations belong to loops that are faster than any other group;
    - ``guard``: the sizes are not those that the groups were decided for;
    - ``pattern``: a pattern's check refuses a match.

    Code compares rules, never reasons. A reason has no number of a node or value but in a user's own words:
    equal groups share it.
    """

    rule: str
    reason: str
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}"
