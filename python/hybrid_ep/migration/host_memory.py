"""`HostMemory`: codecs and carriers read and write host memory only, so tensors of a GPU are copied to it and back."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostMemory"]


class HostMemory:
    """Copies of the tensors of one device in host memory. Tensors on the CPU are not copied.

    Args:
        device: The device of the tensors.
        copies: Whether they are copied. Default: unless the device is the CPU.
    """

    def __init__(self, device: torch.device, copies: bool | None = None) -> None:
        self._pinned = device.type == "cuda"
        self.copies = device.type != "cpu" if copies is None else copies
        # One of each for all layers: the engine needs the values only during one call.
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sum = torch.empty(0, dtype=torch.float32, device="cpu")

    def counterpart(self, tensor: Tensor) -> Tensor:
        """Returns host memory of its own for a tensor, filled with zeros; the tensor itself if it is not copied."""
        if not self.copies:
            return tensor
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned)

    def read(self, tensor: Tensor) -> Tensor:
        """Returns the values of a tensor in host memory, until the next call. Waits for the current stream.

        A tensor that is not copied is returned itself.
        """
        if not self.copies:
            return tensor
        if self._scratch.nbytes < tensor.nbytes:
            self._scratch = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        return self._scratch[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def sum_of(self, rows: int, elements: int) -> Tensor:
        """Returns host memory for a sum, float32 [rows, elements]; for tensors of a GPU, until the next call."""
        if not self._pinned:
            return torch.empty(rows, elements, dtype=torch.float32, device="cpu")
        if self._sum.numel() < rows * elements:
            self._sum = torch.empty(rows * elements, dtype=torch.float32, device="cpu", pin_memory=True)
        return self._sum[: rows * elements].view(rows, elements)
