"""Runs a Python program as `python` would, with `deep_ep` being `hybrid_ep.deep_ep`:

    python -m hybrid_ep.run pretrain_gpt.py --moe-flex-dispatcher-backend hybridep ...
    python -m hybrid_ep.run -m torch.distributed.run --standalone --nproc-per-node 8 pretrain_gpt.py ...

The program needs no change. Python processes that it starts find `deep_ep` through PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from hybrid_ep import CallerError
from hybrid_ep.install import PATH_ENTRY, install_as_deep_ep


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program that the command line names, in this process.

    Args:
        arguments: The command line. Default: `sys.argv[1:]`.
    """
    command = _parser().parse_args(arguments)
    try:
        install_as_deep_ep(force=command.force)
    except CallerError as error:
        sys.exit(f"hybrid_ep.run: {error}")
    _tell_children()
    sys.argv = [command.program, *command.arguments]
    if command.module:
        runpy.run_module(command.program, run_name="__main__", alter_sys=True)
    elif not os.path.exists(command.program):
        hint = "; for torchrun, say `-m torch.distributed.run`" if command.program == "torchrun" else ""
        print(
            f"hybrid_ep.run: can't open file {os.path.abspath(command.program)!r}: no such file{hint}", file=sys.stderr
        )
        sys.exit(2)
    else:
        _run_path(command.program)


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_ep.run",
        usage="%(prog)s [-h] [--force] (program.py | -m module) [arguments ...]",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--force", action="store_true", help="hide a real deep_ep, if one is installed")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as with python -m")
    parser.add_argument("program", help="a file, a directory or zip file with a __main__.py, or (with -m) a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    return parser


def _tell_children() -> None:
    """Lets processes that the program starts find `deep_ep`.

    Other processes read PYTHONPATH; `multiprocessing` passes on this process's module path. The entry gets the place on
    the module path that PYTHONPATH gives it.
    """
    before = os.environ.get("PYTHONPATH")
    entries = before.split(os.pathsep) if before else []
    if str(PATH_ENTRY) not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PATH_ENTRY), *entries])
        sys.path.insert(0 if _safe_path() else 1, str(PATH_ENTRY))


def _run_path(program: str) -> None:
    """Runs a file, a directory or an archive, with the module path that `python PROGRAM` has.

    With `python PROGRAM`, the program's directory comes first; with `-m`, which started this module, the working
    directory does.
    """
    if not _safe_path():
        del sys.path[0]
    path = os.path.abspath(program)
    if pkgutil.get_importer(path) is not None:
        # A directory or an archive: runpy puts it first on the module path.
        runpy.run_path(path, run_name="__main__")
        return
    if not _safe_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    # Not runpy.run_path: it clears the module's globals when the file ends, before the program's atexit functions run.
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, loader
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)


def _safe_path() -> bool:
    """Whether Python runs in safe-path mode (-P, -I, PYTHONSAFEPATH), which adds no directory for the program."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


if __name__ == "__main__":
    main()
