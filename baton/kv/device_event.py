"""A point in what a device computes, for those who read what it has computed."""

from typing import Protocol


class DeviceEvent(Protocol):
    """Such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has passed. Raises RuntimeError if the device has failed."""
        ...

    def synchronize(self) -> None:
        """Wait until it has passed. Raises RuntimeError if the device has failed."""
        ...
