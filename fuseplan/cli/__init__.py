"""The command ``fuseplan``: a file for each command. What a command needs is imported when it runs."""

from __future__ import annotations

from fuseplan.cli.commands import app, main

__all__ = ["app", "main"]
