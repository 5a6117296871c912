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
"""A directory with a `deep_ep` that calls `install_as_deep_ep()`, for the module path of another process."""

_HIDDEN: dict[str, ModuleType] = {}
"""The modules of a real `deep_ep` that `force=True` removed from `sys.modules`."""


def install_as_deep_ep(*, force: bool = False) -> None:
    """Makes `import deep_ep` and `import deep_ep.hybrid_ep_buffer` find `hybrid_ep.deep_ep`, in this process.

    Call the function before the program imports `deep_ep`. A second call does nothing.

    Args:
        force: Hide a real `deep_ep` that is installed or imported, with a RuntimeWarning.

    Raises:
        CallerError: A real `deep_ep` is installed or imported, and `force` is False.
    """
    ours = _ours()
    if all(sys.modules.get(name) is module for name, module in ours.items()):
        return
    real = _real()
    if real is not None and not force:
        raise CallerError(
            f"a real deep_ep is {real}; hybrid_ep does not replace it unasked. Uninstall it, use another environment, "
            "or hide it: install_as_deep_ep(force=True), python -m hybrid_ep.run --force"
        )
    if real is not None:
        warnings.warn(
            f"hybrid_ep hides the real deep_ep, which is {real}; names imported from it earlier still refer to it",
            RuntimeWarning,
            stacklevel=2,
        )
    _HIDDEN.update(_take_out(keep=ours))
    sys.modules.update(ours)


def uninstall() -> None:
    """Undoes `install_as_deep_ep`, and restores what `force=True` hid. Names already imported keep their meaning."""
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
    """Describes a `deep_ep` of another package, in words that follow "a real deep_ep is"; None if there is none."""
    loaded = sys.modules.get(NAME)
    if loaded is None:
        # A None in sys.modules forbids the import, so there is nothing to hide.
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
    """Removes `deep_ep` and its submodules from `sys.modules`; returns those of another package."""
    names = [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]
    modules = {name: sys.modules.pop(name) for name in names}
    return {
        name: module
        for name, module in modules.items()
        if module is not None and module is not keep.get(name) and not _is_path_entry(getattr(module, "__path__", None))
    }
