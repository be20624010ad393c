"""The ``tensordict`` command: arguments in, one line per error out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from . import convert, demo, plan


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = _Parser(
        prog="tensordict",
        description="Plan, convert and exchange the weights of models.",
    )
    top.add_argument("--version", action="version", version=f"tensordict {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (demo, plan, convert):
        module.add_command(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Every error is one line on stderr: 2 for a wrong call, 1 for anything else.  With
    ``TENSORDICT_TRACEBACK=1`` in the environment errors are raised as they are.
    """
    try:
        args = parser().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except SystemExit as err:  # from argparse
        return err.code if isinstance(err.code, int) else 1
    except KeyboardInterrupt:
        print("tensordict: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads on (`tensordict plan ... | head`); keep Python from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as err:
        if os.environ.get("TENSORDICT_TRACEBACK") == "1":
            raise
        print(f"tensordict: {one_line(err)}", file=sys.stderr)
        return 1


def one_line(err: BaseException, limit: int = 600) -> str:
    """The text of an error on one printable line.

    >>> one_line(ValueError("several\\n    lines"))
    'several; lines'
    >>> one_line(FileNotFoundError(2, "No such file or directory", "x.safetensors"))
    'x.safetensors: No such file or directory'
    """
    if isinstance(err, OSError) and err.filename is not None:
        text = f"{err.filename}: {err.strerror}"
    else:
        text = str(err) or type(err).__name__
    text = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 4] + " ..."
