"""All commands on one screen, and what they share: one line for an error or a warning, the version."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
import typer.core

from fuseplan.cli.bench import bench
from fuseplan.cli.cache import cache
from fuseplan.cli.calibrate import calibrate
from fuseplan.cli.compare import compare
from fuseplan.cli.demo import demo
from fuseplan.cli.devices import devices
from fuseplan.cli.plan import plan
from fuseplan.cli.report import report
from fuseplan.cli.verify import verify
from fuseplan.support.errors import FuseplanError, FuseplanWarning


class _Commands(typer.core.TyperGroup):
    """Commands whose ``FuseplanError`` is one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FuseplanError as error:
            print(f"fuseplan: {_one_line(error)}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decide which operations of a JAX function share a kernel, with a proof.",
)
for _command in (demo, compare, plan, verify, report, devices, calibrate, cache):
    app.command()(_command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    app()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FuseplanWarning):
        print(f"warning: {_one_line(message)}", file=sys.stderr)


def _show_version(asked: bool) -> None:
    if asked:
        try:
            print(f"fuseplan {version('fuseplan')}")
        except PackageNotFoundError:
            print("fuseplan 0+unknown (not installed)")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass
