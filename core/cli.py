"""The `penjing` command: commands of the stages by name, each stage's `cli.py` imported only when it is asked.

What needs two stages is called from one stage's `cli.py` and written here, the only module that reaches up.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from penjing.core.cli_options import Json, write_json
from penjing.core.errors import ConfigError, InputError, PenjingError
from penjing.core.imports.commands import import_command
from penjing.core.recipe_cli import recipe_app

STAGES = {
    "curate": "penjing.curate.cli",
    "train": "penjing.train.cli",
    "compress": "penjing.compress.cli",
    "serve": "penjing.serve.cli",
}
"""Where a stage's commands are: `app` of the module."""
COMMANDS = {
    "export": "compress",
    "import": "",
    "graph": "compress",
    "report": "compress",
    "generate": "serve",
    "serve": "serve",
    "stop": "serve",
    "chat": "serve",
    "info": "",
    "curate": "curate",
    "train": "train",
    "compress": "compress",
    "server": "serve",
    "models": "serve",
    "adapters": "serve",
    "keys": "serve",
    "bench": "serve",
    "recipe": "",
}
"""Every command in the order of the help, and its stage; those without one are core's."""


class LazyApp(TyperGroup):
    """Imports a stage's `cli.py` when one of its commands is called, or shown in the help."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: self.commands.get(name) for name in COMMANDS}  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self.commands.get(cmd_name) is None and (stage := COMMANDS.get(cmd_name)):
            self.commands |= get_command(import_module(STAGES[stage]).app).commands  # type: ignore[attr-defined]
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=LazyApp,
    name="penjing",
    help="Train, compress and serve neural networks: from full precision to INT8 on NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipe_app, name="recipe")
INTERRUPTED = 130


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"penjing {version('penjing')}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["PENJING_DEBUG"] = "1"


import_command(app)


@app.command()
def info(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile the GPU kernels for sm_90: registers, spills, shared memory.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With --kernels: rare configurations too.")] = False,
    json_file: Json = None,
) -> None:
    """Show versions, the device and which implementation of each kernel runs here, and why.

    Example: `penjing info --kernels # needs no GPU`
    """
    from penjing.core.info import collect, compiled_kernels, print_kernels
    from penjing.core.progress import print_table, progress_bar

    if not kernels:
        result = collect()
        print_table(result)
    else:
        with progress_bar() as progress:
            result = compiled_kernels(progress, full=full)
        print_kernels(result)
    write_json(result, json_file)


def ask_server(artifact: Path, server: str | None) -> dict[str, Any]:
    """`penjing compress verify --served` or `--server`: compress checks the rest.

    Args:
        server: host:port of a server that runs; None starts one for it, with settings of the record.

    Returns:
        See `penjing.serve.parity.served_parity`.
    """
    from penjing.serve.families.base import family_at
    from penjing.serve.parity import served_parity
    from penjing.serve.supervisor.temporary import temporary_server

    with nullcontext(server) if server else temporary_server(artifact, [*family_at(artifact).as_recorded]) as address:
        return served_parity(artifact, address)


def write_repository(
    artifact: Path,
    out: Path,
    form: Literal["onnxruntime", "python"] | None,
    overrides: list[str] | None,
    *,
    name: str | None,
    force: bool,
) -> None:
    """`penjing export --to model-repository`: compress writes the other forms."""
    from penjing.core.progress import progress_bar, typed
    from penjing.serve.supervisor.export import export_repository

    with progress_bar() as progress:
        made = export_repository(artifact, out, form, name=name, overrides=overrides, force=force, progress=progress)
        progress.note(f"wrote {made}; serve it with 'tritonserver --model-repository={typed(out)}'")


def main() -> None:
    """Run the command line: a user's error is one line and an exit code, a traceback only with `--debug`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a model writes what a terminal of another encoding cannot show
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    def called() -> int:
        code = app(arguments, prog_name="penjing", standalone_mode=False) or 0
        if code == INTERRUPTED:  # typer turns Ctrl-C into this exit code without a word
            raise KeyboardInterrupt
        return code

    return guarded(called)


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`; what it raises becomes one line on standard error."""
    try:
        return work()
    except PenjingError as error:
        return _fail(error, str(error), error.exit_code)
    except TyperException as error:
        message = " ".join(error.format_message().replace(": Value error, ", ": ").split()).rstrip(".")
        if not message:  # a group without a command: its help was shown in place of a message
            return ConfigError.exit_code
        command = getattr(getattr(error, "ctx", None), "command_path", "penjing")
        end = "" if message.endswith("?") else "."
        return _fail(error, f"{message}{end} Try '{command} --help'.", ConfigError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # the edge of the program: one line, and the way to see more
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _fail(error, f"the path {str(error.filename)[:40]}… is too long for a file", InputError.exit_code)
        return _fail(
            error, f"unexpected {type(error).__name__}: {error} (PENJING_DEBUG=1 or penjing --debug … shows where)", 70
        )


def _fail(error: BaseException, message: str, exit_code: int) -> int:
    if os.environ.get("PENJING_DEBUG", "0") != "0":
        import traceback

        traceback.print_exception(error)
    from penjing.core.progress import printable

    print(f"error: {printable(message)}", file=sys.stderr)
    return exit_code
