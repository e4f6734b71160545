"""`danube-fast completion`: prints the lines that teach a shell to complete our commands."""

from __future__ import annotations

import enum
import os
import sys
from typing import Annotated, Any

import typer

from danube_fast.cli.options import command
from danube_fast.cli.output import write

__all__ = ["COMPLETE_VARIABLE", "answer_shell"]

COMPLETE_VARIABLE = "_DANUBE_FAST_COMPLETE"


class Shell(enum.StrEnum):
    """Shells that can be taught."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@command('eval "$(danube-fast completion bash)"    # or put that line into ~/.bashrc')
def completion(shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Print what makes a shell complete danube-fast's commands and options."""
    script = _shell_support().get_completion_script(
        prog_name="danube-fast", complete_var=COMPLETE_VARIABLE, shell=shell.value
    )
    write(script.encode() + b"\n")


def _shell_support() -> Any:
    """Typer's own module for this; what we need of it is not declared as exported."""
    import typer.completion

    return typer.completion


def answer_shell(app: typer.Typer, program: str) -> None:
    """If a shell asks for completions, answer it and end the process; else do nothing."""
    if COMPLETE_VARIABLE not in os.environ:
        return
    _shell_support().completion_init()
    app(prog_name=program, complete_var=COMPLETE_VARIABLE, standalone_mode=True)
    sys.exit(0)
