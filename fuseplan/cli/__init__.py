"""The command line of fuseplan.

``commands`` holds the application and its small commands, ``planning`` and ``bench`` the commands that plan
and measure, ``arguments`` the options that several commands share. Open ``commands`` first.
"""

from __future__ import annotations

from fuseplan.cli.commands import app, main

__all__ = ["app", "main"]
