"""`python -m hybrid_ep`: every command of the program `hybrid-ep`, and `bench --compare`, which needs PyTorch."""

from __future__ import annotations

import importlib
import signal
import sys

from ._native import cli

NAME = "python -m hybrid_ep"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"] and "--compare" in arguments:
        return compare([argument for argument in arguments[1:] if argument != "--compare"])
    sys.stdout.flush()
    # Python would note Ctrl-C and act on it when the native code returns, which may be hours later.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = cli(arguments, name=NAME, command=[sys.executable, "-m", "hybrid_ep"])
    finally:
        signal.signal(signal.SIGINT, before)
    if arguments[:1] == ["bench"] and not {"-h", "--help"}.isdisjoint(arguments):
        print(f"\nBeside other implementations, from PyTorch:\n  {NAME} bench --compare --help")
    return code


def compare(arguments: list[str]) -> int:
    try:
        module = importlib.import_module("hybrid_ep.compare")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        print(f"{NAME}: error: bench --compare: PyTorch is not installed; pip install torch", file=sys.stderr)
        return 2
    return int(module.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
