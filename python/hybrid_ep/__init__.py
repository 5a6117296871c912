"""Expert-parallel communication for mixture-of-experts models.

Start with `Buffer`: one rank's end of a communicator, with the operators `preprocess`, `dispatch` and `combine`.
`MoELayer` is a mixture-of-experts layer built on `Buffer`. docs/python.md in the source tree is the guide.

Importing the package does not import PyTorch; the first use of a name that needs PyTorch does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ._native import __version__
from .errors import CallerError, HybridEPError, PeerError, SetupError, renamed

if TYPE_CHECKING:
    from .buffer import Buffer
    from .dispatcher import TokenDispatcher
    from .install import install_as_deep_ep
    from .moe import MoELayer
    from .results import Combined, Dispatched, Handle, Traffic
    from .work import Work

__all__ = [
    "Buffer",
    "CallerError",
    "Combined",
    "Dispatched",
    "Handle",
    "HybridEPError",
    "MoELayer",
    "PeerError",
    "SetupError",
    "TokenDispatcher",
    "Traffic",
    "Work",
    "__version__",
    "install_as_deep_ep",
]

# PyTorch warns when it is imported without NumPy. This package does not need NumPy.
if "torch" not in sys.modules and importlib.util.find_spec("numpy") is None:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

# Imported at first use, so that the command line works, and starts fast, without PyTorch.
_HOMES = {
    "Buffer": "buffer",
    "Combined": "results",
    "Dispatched": "results",
    "Handle": "results",
    "Traffic": "results",
    "Work": "work",
    "MoELayer": "moe",
    "TokenDispatcher": "dispatcher",
    "install_as_deep_ep": "install",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        if (error := renamed(name)) is not None:
            return error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
