"""``python -m fuseplan``: the command line."""

from fuseplan.cli import main

main()
