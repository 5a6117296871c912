"""What all tests share: devices, and a word about streams."""

from __future__ import annotations

import os

# Ranks of one process that share a GPU wait for each other in streams of their own, which must run at once; and a
# kernel that is loaded when it is first needed may wait for all that run. The driver reads these when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device that this machine has."""
    return str(request.param)
