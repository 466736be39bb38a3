"""What an engine needs to share the cores of a host with other nodes."""

from typing import Protocol


class CoreSharingSlot(Protocol):
    """A node's slot on the shared-memory page that says which nodes of a host compute."""

    @property
    def address(self) -> int:
        """Address of the page, which stays mapped as long as this object lives."""
        ...

    @property
    def slot(self) -> int:
        """This node's, which no other living node has."""
        ...

    @property
    def cores(self) -> int:
        """That the nodes share."""
        ...
