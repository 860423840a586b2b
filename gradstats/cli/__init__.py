"""The ``gradstats`` command, one module per group of commands.

Commands import what they need when they run, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gradstats.cli.advise import advise
from gradstats.cli.compare import agreement, compare
from gradstats.cli.data import explore, import_, info, report
from gradstats.cli.formats import delta, wire
from gradstats.cli.plan import plan
from gradstats.cli.plot import plot
from gradstats.cli.statistics import compressibility, drift, fit, pot
from gradstats.cli.systems import compression
from gradstats.cli.thresholds import bench, quality
from gradstats.errors import GradstatsError, InputError
from gradstats.registry import entries, load, load_file
from gradstats.version import __version__

__all__ = ["app", "main"]


class _Flags:
    """Options that take nothing have no type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class _Command(_Flags, TyperCommand):
    """A command with such flags."""


class _Group(_Flags, TyperGroup):
    """The program itself."""


class _App(typer.Typer):
    """The program; its commands, and those that plugins add, have such flags."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": _Command, **options})


app = _App(
    name="gradstats",
    help="Statistical analysis of gradients: capture, model, threshold.",
    cls=_Group,
    invoke_without_command=True,
    # main prints errors, in one line
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Data": (info, import_, report, explore, plot),
    "Statistics": (fit, compressibility, pot, drift),
    "Runs and ranks": (compare, agreement),
    "Should I?": (advise, plan),
    "Thresholds": (quality, bench, compression),
    "Bits": (wire, delta),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        # `import` is a keyword: its function is called import_
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)

_UsageError: Any = typer.BadParameter.__bases__[0]  # click's, wherever this typer keeps it


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradstats {__version__}")
        raise typer.Exit


def _drop_color(wanted: bool) -> None:
    if wanted:
        os.environ["NO_COLOR"] = "1"  # for rich, and for the processes that a run starts


_START = """\
What do you have?

nothing yet        gradstats demo
                   trains twice in two minutes, and shows what there is to see

a training         from capture import Capture
                   capture = Capture("run.zarr", model, schedule=100)
                   capture.step(loss=loss)   # after backward(), each iteration
                   capture.close()           # DDP: docs/howto/ddp.md

a trace            gradstats advise {trace}    # should I compress?
                   gradstats report {trace} -o report.html
                   gradstats explore {trace} -o explore.html   # in a browser
                   gradstats fit {trace}       # which law, how far off
                   gradstats quality {trace}   # which rule hits k
                   gradstats plot tail {trace} -o tail.pdf

a folder of dumps  gradstats report FOLDER -o report.html
                   gradstats import FOLDER --out run.zarr   # a trace of them

a cluster          gradstats plan {trace} --link wan --workers 8 --compute 0.1

gradstats --help lists all commands, gradstats COMMAND --help what one takes."""


@app.callback()
def _root(
    context: typer.Context,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print results and errors only, no progress and no notes."
        ),
    ] = False,
    no_color: Annotated[
        bool,
        typer.Option(
            "--no-color",
            help="Print plain text, as with NO_COLOR.",
            # before other options are checked, so that help and errors are plain, too
            is_eager=True,
            callback=_drop_color,
        ),
    ] = False,
    load: Annotated[
        list[Path] | None,
        typer.Option(
            "--load",
            help="Import this Python file first: laws, threshold rules and compressors of your own (repeatable).",
            metavar="FILE.py",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    from gradstats.console import messages

    messages().quiet = quiet
    if context.invoked_subcommand is None:
        here = sorted(p.name for p in Path().glob("*.zarr"))  # what the reader has, if it is here
        typer.echo(_START.format(trace=here[0] if here and " " not in here[0] else "run.zarr"))


# once per process, in which main may run several times
@cache
def _load_plugins() -> None:
    for entry in entries("gradstats.commands"):
        load(entry)(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; by default those of the process.

    Raises
    ------
    SystemExit
        With 0; with 2 after one line on stderr about anything the user can mend; with 130 when interrupted, 143 when
        terminated.
    """
    command_line = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is None:
        # looking for cycles among all that the libraries made takes long, and a program that ends soon makes few
        gc.set_threshold(50_000)
    # names may hold letters that the terminal's encoding does not have
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")  # of a terminal without Greek letters
    try:
        _load_plugins()
        # after the plugins, so that a file may use what they bring
        command_line, files = _global_first(command_line)
        for file in files:  # now: what they bring may be a command
            load_file(file)
        # in standalone mode click would print errors itself and end the process
        code = app(command_line, prog_name="gradstats", standalone_mode=False) or 0
        # only as a program: a caller in Python keeps its signal handlers
        if code > 128 and arguments is None:
            _ignore_signals()
        # flushed here, where a full disk can still be reported in one line
        sys.stdout.flush()
    except OSError as error:  # a full disk; a pipe that was closed ends the program before
        _fail(
            f"gradstats: {error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        )
        code = 2
        if error.errno == errno.ENOSPC and error.filename is None:
            with suppress(OSError, ValueError):  # what is left would be tried again at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except GradstatsError as error:
        _fail(f"gradstats: {error}")
        code = 2
    except _UsageError as error:
        # without a message the help page has been printed instead
        if message := error.format_message():
            path = error.ctx.command_path if error.ctx else "gradstats"
            _fail(f"{path}: {message} ({path} --help)")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
        if arguments is None:
            _ignore_signals()
    if code > 128:
        _fail("gradstats: interrupted" if code == 130 else "gradstats: terminated")
    sys.exit(code)


def _global_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments with global options first, and the files to load.

    typer accepts a global option before the command only; people write it anywhere.
    """
    first, others, files = [], [], []
    each = iter(arguments)
    for argument in each:
        # what follows are no options, whatever they look like
        if argument == "--":
            others += [argument, *each]
            break
        name, _, file = argument.partition("=")
        # the value of another option is taken for one of these as well, unless = joins it to its name
        if argument in ("--quiet", "-q", "--no-color"):
            first.append(argument)
        elif name == "--load":
            files.append(file or next(each, ""))
            if not files[-1]:
                raise InputError("--load takes a file: --load FILE.py")
            # passed on for the root command, which declares it and does nothing with it
            first += ["--load", files[-1]]
        else:
            others.append(argument)
    return [*first, *others], files


def _ignore_signals() -> None:
    """Let a second signal spoil neither the line nor the code with which this process ends."""
    # one that comes just before the handler is replaced would be reported with a traceback
    with suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    # Python takes its handlers back before it has ended, and a signal would then kill it
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def _fail(message: str) -> None:
    from gradstats.tables import visible

    # one line, whatever the message quotes from a file or a name
    typer.echo(visible(" ".join(message.split())), err=True)
