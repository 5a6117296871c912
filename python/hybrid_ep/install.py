"""`import deep_ep` finds `hybrid_ep.deep_ep`: programs written against DeepEP's hybrid-ep branch run unmodified."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

from hybrid_ep import CallerError

NAME = "deep_ep"
PATH_ENTRY = Path(__file__).resolve().parent / "deep_ep" / "path_entry"
"""A directory to put on the module path of another process, where it does what `install_as_deep_ep()` does here."""

_HIDDEN: dict[str, ModuleType] = {}
"""The modules of a real `deep_ep` that were taken out of `sys.modules`."""


def install_as_deep_ep(*, force: bool = False) -> None:
    """Makes `import deep_ep` and `import deep_ep.hybrid_ep_buffer` find this package, in this process.

    Where a real `deep_ep` is installed or imported this is refused: two libraries under one name is a matter for
    whoever set up the environment. `force=True` hides the real one, with a warning. Calling it again does nothing.
    """
    ours = _ours()
    if all(sys.modules.get(name) is module for name, module in ours.items()):
        return
    real = _real()
    if real is not None and not force:
        raise CallerError(
            f"a real deep_ep is {real}; hybrid_ep does not take its place unasked. Uninstall it, run where it is "
            "not installed, or hide it: install_as_deep_ep(force=True), python -m hybrid_ep.run --force"
        )
    if real is not None:
        warnings.warn(
            f"hybrid_ep hides the real deep_ep, which is {real}; what was imported from it before stays in use",
            RuntimeWarning,
            stacklevel=2,
        )
    _HIDDEN.update(_take_out(keep=ours))
    sys.modules.update(ours)


def uninstall() -> None:
    """Takes `deep_ep` away again, and puts back what `force=True` hid. Names already imported from it stay as they
    are."""
    ours = _ours()
    if sys.modules.get(NAME) is not ours[NAME]:
        return
    for name in ours:
        sys.modules.pop(name, None)
    sys.modules.update(_HIDDEN)
    _HIDDEN.clear()


def _ours() -> dict[str, ModuleType]:
    names = {NAME: "hybrid_ep.deep_ep", f"{NAME}.hybrid_ep_buffer": "hybrid_ep.deep_ep.hybrid_ep_buffer"}
    return {name: importlib.import_module(target) for name, target in names.items()}


def _real() -> str | None:
    """Where a `deep_ep` is that is not ours, in words that follow "is"."""
    loaded = sys.modules.get(NAME)
    if loaded is None:
        # A None in sys.modules forbids the import; there is then nothing to hide.
        spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
        found, how = (spec, "installed") if spec else (None, "")
    else:
        found, how = getattr(loaded, "__spec__", None), "imported already"
        if found is None:
            return f"{how} ({getattr(loaded, '__file__', None) or 'made by the program'})"
    if found is None or _is_path_entry(found.submodule_search_locations):
        return None
    return f"{how} ({found.origin or ', '.join(found.submodule_search_locations or [])})"


def _is_path_entry(locations: list[str] | None) -> bool:
    return any(Path(location).resolve().parent == PATH_ENTRY for location in locations or [])


def _take_out(keep: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Removes `deep_ep` and its submodules from `sys.modules`; returns those that are somebody else's."""
    names = [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]
    modules = {name: sys.modules.pop(name) for name in names}
    return {
        name: module
        for name, module in modules.items()
        if module is not None and module is not keep.get(name) and not _is_path_entry(getattr(module, "__path__", None))
    }
