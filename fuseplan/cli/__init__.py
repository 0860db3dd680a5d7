"""The command ``fuseplan``: a file for each command."""

from __future__ import annotations

from fuseplan.cli.commands import app, main

__all__ = ["app", "main"]
