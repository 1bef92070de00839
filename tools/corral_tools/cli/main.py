"""The entry point: parses, runs, and turns whatever happens into an exit status.

Only click is imported up front. A subcommand's callback returns what is to be done as a function, and `main`
calls it once click is out of the way: click takes over KeyboardInterrupt and EPIPE of all that runs inside
it.
"""

# Imports stand where they are needed: the start of `corral run` is what a user waits for.
# ruff: noqa: PLC0415

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, cast

import click

from corral_tools.cli import exits
from corral_tools.cli.backends import backends_command
from corral_tools.cli.doctor import doctor_command
from corral_tools.cli.run import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version  # 10 ms that a run does not need

        try:
            click.echo(f"corral {version('corral')}")
        except PackageNotFoundError as error:
            msg = "corral is not installed as a package, so its version is not known"
            raise exits.CliError(msg, remedy="pip install it") from error
        context.exit()


@click.group(
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status of corral itself: 125 with one line on standard error.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Run shell commands in places that end them for certain."""


cli.add_command(run_command)
cli.add_command(backends_command)
cli.add_command(doctor_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (default: those of the process) and returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _hold_standard_descriptors()
    try:
        parsed: object = cli.main(words, prog_name="corral", standalone_mode=False)
        # A callback's own return value is the work; click returns a status when --help or --version ended it.
        status = cast("Callable[[], int]", parsed)() if callable(parsed) else int(cast("int", parsed or 0))
        sys.stdout.flush()
    except click.ClickException as error:
        return _usage_error(error, words)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return exits.BROKEN_PIPE
    except exits.CliError as error:
        exits.tell(exits.explain(error))
        return exits.TROUBLE
    except OSError as error:  # of printing; actions tell their own
        exits.tell(exits.explain(exits.write_failure(exits.STDOUT, error)))
        _silence_stdout()
        return exits.TROUBLE
    return status


def _usage_error(error: click.ClickException, words: Sequence[str]) -> int:
    """125 and not click's 2: commands return 2 for reasons of their own."""
    message = exits.clause(error.format_message())
    context = error.ctx if isinstance(error, click.UsageError) else None
    remedy = f"see '{context.command_path if context else 'corral'} --help'"
    own_words = words[: words.index("--")] if "--" in words else words
    if own_words[:1] == ["run"] and "--json" in own_words:
        from corral_tools.cli.report import error_document, write_document

        write_document(error_document("UsageError", message, remedy=remedy))
    else:
        exits.tell(f"{message}; {remedy}")
    return exits.TROUBLE


def _hold_standard_descriptors() -> None:
    """Puts /dev/null on a closed 0, 1 or 2: else a socket of ours gets the number, and the command's output.

    Opened the wrong way round, as GNU programs do: writing to a closed standard output stays an error.
    """
    for fd, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDWR)):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is the one that is missing, since those below it are taken by now.
            os.open(os.devnull, flags)
    # The interpreter has no objects for what was closed when it started.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _silence_stdout() -> None:
    """Keeps the interpreter's last flush of a broken standard output from complaining."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
