"""Runs a Python program as `python` would, with `deep_ep` being `hybrid_ep.deep_ep`:

    python -m hybrid_ep.run pretrain_gpt.py --moe-flex-dispatcher-backend hybridep ...
    python -m hybrid_ep.run -m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py ...

The program is not changed, and neither are the Python processes that it starts: they find `deep_ep` through PYTHONPATH.
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
    """Runs the program that the command line names, in this process."""
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
        print(f"hybrid_ep.run: can't open file {os.path.abspath(command.program)!r}: no such file", file=sys.stderr)
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
    """Lets processes that the program starts find `deep_ep` too: by PYTHONPATH, and where that entry of it comes to lie
    on the module path, which `multiprocessing` hands down as it is."""
    before = os.environ.get("PYTHONPATH")
    entries = before.split(os.pathsep) if before else []
    if str(PATH_ENTRY) not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PATH_ENTRY), *entries])
        sys.path.insert(0 if _safe_path() else 1, str(PATH_ENTRY))


def _run_path(program: str) -> None:
    """Python has the program's place first on the module path, where `-m` has the working directory."""
    if not _safe_path():
        del sys.path[0]
    path = os.path.abspath(program)
    if pkgutil.get_importer(path) is not None:
        # A directory or an archive. runpy puts it there.
        runpy.run_path(path, run_name="__main__")
        return
    if not _safe_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    # What runpy does for a file is gone when the file ends, too early for what the program has registered to run last.
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, loader
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)


def _safe_path() -> bool:
    """Whether Python was told to put nothing before the module path."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


if __name__ == "__main__":
    main()
