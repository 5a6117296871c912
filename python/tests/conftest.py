"""Settings and fixtures for all tests."""

from __future__ import annotations

import os

# Ranks of one process that share a GPU wait for each other in different streams, which must run at the same time. A
# lazily loaded kernel may wait for all running kernels. The driver reads these variables when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device type of this machine."""
    return str(request.param)
