"""The command line of fuseplan.

``commands`` and ``bench_commands`` declare the commands with their options and help, which several share in
``arguments``. The code of a command is a function of the same name, imported when it runs: in ``planning``
for commands that plan, in ``plans`` for those on plans in files, in ``bench``, and in ``tools`` for the
others. ``inputs`` loads what the user brings. Open ``commands`` first.
"""

from __future__ import annotations

from fuseplan.cli.commands import app, main

__all__ = ["app", "main"]
