"""The device and the settings of a new buffer, from the arguments of its constructor and from the environment.

Only `joining` and the migration import this module.
"""

from __future__ import annotations

import os

import torch

from . import _native, ops
from .errors import CallerError, SetupError

__all__ = ["device_of", "join_timeout", "settings_of"]


def device_of(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise CallerError(f"device: expected the CPU or a CUDA device, found {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SetupError(f"device={str(device)!r}: {_no_cuda()}; without a GPU take device='cpu'")
    return device


def _no_cuda() -> str:
    """Says why PyTorch cannot use CUDA, and what would help."""
    try:
        _native.check_cuda()
    except SetupError as error:
        return str(error)
    # The driver lists GPUs, so the cause is PyTorch's build.
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA; install a build for CUDA (pytorch.org says which)"
    built = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}"
    return f"{built}, cannot use the GPU; torch.cuda.init() says why"


def _current_gpu() -> int:
    """The CUDA device for a buffer without `device`.

    This is PyTorch's current device, unless that is device 0, as it is if the program has set none. Then the launcher's
    local rank selects the device, so that the ranks of a machine do not share GPU 0.
    """
    current = torch.cuda.current_device()
    place = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    # A launcher may show each rank only one GPU; then the local rank is out of range.
    if current == 0 and place.isdecimal() and int(place) < torch.cuda.device_count():
        return int(place)
    return current


def settings_of(
    device: torch.device,
    num_experts: int,
    domains: int,
    timeout: float | None,
    stall_timeout: float | None,
    workers: int | None,
    sms: int | None,
    max_tokens: int | None = None,
    max_hidden: int | None = None,
) -> _native.Settings:
    on_gpu = device.type == "cuda"
    gpu = device.index
    counts = {"num_experts": num_experts, "domains": domains, "workers": workers, "sms": sms}
    for name, value in {**counts, "max_tokens": max_tokens, "max_hidden": max_hidden}.items():
        if value is not None:
            ops.check_count(name, value)
    for name, seconds in [("timeout", timeout), ("stall_timeout", stall_timeout)]:
        if not isinstance(seconds, float | int | None):
            raise CallerError(f"{name}: expected seconds, found {seconds!r}")
    if on_gpu and gpu is None:
        gpu = _current_gpu()
    return {
        "backend": "cuda" if on_gpu else "host",
        "gpu": gpu if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "experts": num_experts,
        "domains": domains,
        "timeout": timeout,
        "stall_timeout": stall_timeout,
        "workers": workers,
        "sms": sms,
        "max_tokens": max_tokens,
        "max_hidden": max_hidden,
    }


def join_timeout() -> float:
    """Returns the seconds in which all ranks must join, unless a buffer is made with another `timeout`."""
    return _native.timeout_of(settings_of(torch.device("cpu"), 1, 1, None, None, None, None))
