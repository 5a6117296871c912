"""`import deep_ep` finds `hybrid_ep.deep_ep`: in this process, and for a program run unmodified."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybrid_ep
import hybrid_ep.deep_ep
from hybrid_ep.install import PATH_ENTRY, install_as_deep_ep, uninstall


@pytest.fixture(autouse=True)
def no_deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("a real deep_ep is installed")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yield
    uninstall()
    for name in [name for name in sys.modules if name == "deep_ep" or name.startswith("deep_ep.")]:
        del sys.modules[name]


@pytest.fixture
def real_deep_ep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the module path with another `deep_ep`."""
    package = tmp_path / "site" / "deep_ep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import buffer\nREAL = True\n")
    (package / "buffer.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def test_install_and_uninstall_of_the_name() -> None:
    install_as_deep_ep()
    import deep_ep
    from deep_ep.hybrid_ep_buffer import indices_to_map

    assert deep_ep is hybrid_ep.deep_ep
    assert deep_ep.HybridEPBuffer is hybrid_ep.deep_ep.hybrid_ep_buffer.HybridEPBuffer
    assert indices_to_map is hybrid_ep.deep_ep.hybrid_ep_buffer.indices_to_map
    install_as_deep_ep()
    assert sys.modules["deep_ep"] is hybrid_ep.deep_ep
    uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deep_ep")
    uninstall()


def test_importing_the_missing_interface_fails_as_clients_expect() -> None:
    install_as_deep_ep()
    with pytest.raises(ImportError, match="cannot import name 'Buffer'"):
        exec("from deep_ep import Buffer")
    with pytest.raises(ImportError):
        exec("from deep_ep.utils import EventHandle")


def test_an_installed_deep_ep_is_left_alone(real_deep_ep: Path) -> None:
    with pytest.raises(hybrid_ep.CallerError, match=r"a real deep_ep is installed \(.*__init__.py\).*force=True"):
        install_as_deep_ep()
    assert importlib.import_module("deep_ep").REAL


def test_an_imported_deep_ep_is_left_alone(real_deep_ep: Path) -> None:
    real = importlib.import_module("deep_ep")
    with pytest.raises(hybrid_ep.CallerError, match=r"is imported already \(.*__init__.py\)"):
        install_as_deep_ep()
    assert sys.modules["deep_ep"] is real


def test_force_hides_the_real_one_and_uninstall_restores_it(real_deep_ep: Path) -> None:
    real = importlib.import_module("deep_ep")
    with pytest.warns(RuntimeWarning, match="hides the real deep_ep, which is imported already") as caught:
        install_as_deep_ep(force=True)
    assert caught[0].filename == __file__
    assert sys.modules["deep_ep"] is hybrid_ep.deep_ep and "deep_ep.buffer" not in sys.modules
    install_as_deep_ep()
    uninstall()
    assert sys.modules["deep_ep"] is real and sys.modules["deep_ep.buffer"] is real.buffer


# Programs. Each Python process takes seconds to import torch, so few processes check many facts each.

TELL = """
import json, os, sys
import deep_ep
facts = {
    "name": __name__, "file": os.path.abspath(__file__), "path": sys.path[0], "argv": sys.argv,
    "spec": __spec__ and __spec__.name, "package": __package__, "loader": type(__loader__).__name__,
    "main": sys.modules["__main__"].__dict__ is globals(), "ours": deep_ep.HybridEPBuffer.__module__,
}
print(json.dumps(facts))
"""
STAND_IN = "class HybridEPBuffer: __module__ = 'hybrid_ep.deep_ep.hybrid_ep_buffer'\n"


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(hybrid_ep.__file__).parent.parent)
    paths = [environment.pop("PYTHONPATH", ""), package]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def facts(process: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "command", [["programs/tell.py"], ["-m", "programs.tell"], ["programs/app"]], ids=["file", "module", "directory"]
)
def test_a_program_runs_as_with_python(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "programs" / "app").mkdir(parents=True)
    (tmp_path / "programs" / "tell.py").write_text(TELL)
    (tmp_path / "programs" / "app" / "__main__.py").write_text(TELL)
    stand_in = tmp_path / "stand-in"
    stand_in.mkdir()
    (stand_in / "deep_ep.py").write_text(STAND_IN)
    arguments = [*command, "-h", "--force", "-m", "x y"]
    as_python = facts(python(*arguments, cwd=tmp_path, PYTHONPATH=str(stand_in)))
    as_ours = facts(python("-m", "hybrid_ep.run", *arguments, cwd=tmp_path))
    if command == ["programs/app"]:  # runpy makes the path absolute
        as_python["argv"] = [str(tmp_path / command[0]), *arguments[1:]]
    assert as_ours == as_python


CHILDREN = """
import atexit, multiprocessing, subprocess, sys

def farewell():
    print("farewell", sys.argv[0])

def work():
    from deep_ep import HybridEPBuffer
    from deep_ep.hybrid_ep_buffer import indices_to_map
    return HybridEPBuffer.__module__

if __name__ == "__main__":
    atexit.register(farewell)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(work) == "hybrid_ep.deep_ep.hybrid_ep_buffer"
    check = (
        "import hybrid_ep.install, deep_ep, hybrid_ep.deep_ep; hybrid_ep.install.install_as_deep_ep();"
        "assert deep_ep is hybrid_ep.deep_ep is sys.modules['deep_ep']"
    )
    sys.exit(subprocess.run([sys.executable, "-c", "import sys; " + check]).returncode or 7)
"""


def test_processes_that_a_program_starts_find_it_too(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(CHILDREN)
    process = python("-m", "hybrid_ep.run", "parent.py", cwd=tmp_path)
    assert process.returncode == 7, process.stderr  # the program's exit code
    assert process.stdout == "farewell parent.py\n"


def test_a_program_is_not_run_where_a_real_deep_ep_is(real_deep_ep: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TELL)
    site = str(real_deep_ep.parent)
    process = python("-m", "hybrid_ep.run", "program.py", cwd=tmp_path, PYTHONPATH=site)
    assert process.returncode == 1 and "a real deep_ep is installed" in process.stderr
    assert "Traceback" not in process.stderr and not process.stdout
    process = python("-m", "hybrid_ep.run", "--force", "program.py", cwd=tmp_path, PYTHONPATH=site)
    assert "RuntimeWarning: hybrid_ep hides the real deep_ep" in process.stderr
    assert facts(process)["ours"] == "hybrid_ep.deep_ep.hybrid_ep_buffer"


def test_the_command_line_has_help(tmp_path: Path) -> None:
    process = python("-m", "hybrid_ep.run", "-h", cwd=tmp_path)
    assert process.returncode == 0 and "(program.py | -m module) [arguments ...]" in process.stdout
    assert "torch.distributed.run" in process.stdout
    process = python("-m", "hybrid_ep.run", "missing.py", cwd=tmp_path)
    assert process.returncode == 2 and "can't open file" in process.stderr and "missing.py" in process.stderr


def test_the_path_entry_is_shipped() -> None:
    assert (PATH_ENTRY / "deep_ep" / "__init__.py").is_file()
