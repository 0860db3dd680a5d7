"""What checks of plans and proofs raise."""

from __future__ import annotations


class RefutedError(Exception):
    """The plan or its proof is wrong; the message names the fault."""


class NotCheckedError(Exception):
    """Something could not be checked; the message says why."""
