"""The interface of DeepEP's `hybrid-ep` branch, for programs written against it (Megatron-Core, torchtitan).

`hybrid_ep.install_as_deep_ep()` makes `import deep_ep` find this package. DeepEP's other interface, `deep_ep.Buffer`,
is not offered; importing that name fails as it does where DeepEP is not installed.
"""

from .config import HybridEpConfigInstance
from .hybrid_ep_buffer import HybridEPBuffer

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance"]
