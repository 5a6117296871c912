"""The command line: every command of the program `hybrid-ep`, and `bench --compare`, which needs PyTorch.

`python -m hybrid_ep` and the script `hybrid-ep`, which pip installs, are the same program.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from ._native import cli

MODULE = "python -m hybrid_ep"
SCRIPT = "hybrid-ep"


def main(arguments: list[str], name: str = MODULE) -> int:
    """Runs a command line to its end.

    Args:
        arguments: The arguments after the program's name.
        name: The program's name in help and errors.

    Returns:
        The exit code.
    """
    if arguments[:1] == ["bench"] and "--compare" in arguments:
        return compare([argument for argument in arguments[1:] if argument != "--compare"], name)
    sys.stdout.flush()
    # Python's own handler would run only after the native code returns, possibly hours after Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = cli(arguments, name=name, command=[sys.executable, "-m", "hybrid_ep"])
    finally:
        signal.signal(signal.SIGINT, before)
    if arguments[:1] == ["bench"] and not {"-h", "--help"}.isdisjoint(arguments):
        return _print(f"\nTo compare implementations from PyTorch:\n  {name} bench --compare --help", name) or code
    return code


def _print(text: str, name: str) -> int:
    """Prints text and returns the exit code. As in native commands, a pipe closed by its reader is not an error."""
    try:
        print(text, flush=True)
    except OSError as error:
        # Python would try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"{name}: error: writing to stdout: {error}", file=sys.stderr)
            return 2
    return 0


def compare(arguments: list[str], name: str = MODULE) -> int:
    """Runs `bench --compare` with the other arguments; returns the exit code."""
    try:
        module = importlib.import_module("hybrid_ep.compare")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        print(f"{name}: error: bench --compare: PyTorch is not installed; pip install torch", file=sys.stderr)
        return 2
    return int(module.main(arguments))


def script() -> int:
    """Runs the script `hybrid-ep`; returns the exit code."""
    return main(sys.argv[1:], name=SCRIPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
