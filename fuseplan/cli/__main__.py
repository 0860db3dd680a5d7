"""``python -m fuseplan.cli``."""

from fuseplan.cli.commands import main

main()
