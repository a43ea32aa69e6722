"""Numbers from the host to the device of the KV cache, without a wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["to_device"]


def to_device(
    numbers: torch.Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> torch.Tensor:
    """An int64 tensor on ``device``, of numbers on the host.

    From pageable memory torch would wait until all earlier work of the device is done.
    """
    host = torch.as_tensor(numbers, dtype=torch.int64)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
