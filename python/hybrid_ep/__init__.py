"""Expert-parallel communication for mixture-of-experts models.

Start with `Buffer`: one rank's end of a communicator, with the operators `preprocess`, `dispatch` and `combine`.
`MoELayer` is a layer built on it. What the calls mean is in docs/python.md of the sources.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._native import __version__
from .errors import CallerError, EnvironmentError, Error, PeerError

if TYPE_CHECKING:
    from .buffer import Buffer, Combined, Dispatched, Handle, Traffic
    from .install import install_as_deep_ep
    from .moe import MoELayer, TokenDispatcher

__all__ = [
    "Buffer",
    "CallerError",
    "Combined",
    "Dispatched",
    "EnvironmentError",
    "Error",
    "Handle",
    "MoELayer",
    "PeerError",
    "TokenDispatcher",
    "Traffic",
    "__version__",
    "install_as_deep_ep",
]

# Imported when they are first used: the command line works without PyTorch, and does not wait for it.
_HOMES = {
    "Buffer": "buffer",
    "Combined": "buffer",
    "Dispatched": "buffer",
    "Handle": "buffer",
    "Traffic": "buffer",
    "MoELayer": "moe",
    "TokenDispatcher": "moe",
    "install_as_deep_ep": "install",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
