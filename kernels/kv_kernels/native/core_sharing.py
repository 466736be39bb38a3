"""The interface by which an engine announces that it computes, and so divides a host's cores."""

from typing import Protocol


class CoreSharingSlot(Protocol):
    """A node's slot in memory that all nodes of a host share.

    Nodes announce in it that they compute. Those that do divide the host's cores.
    """

    @property
    def address(self) -> int:
        """Address at which this process has mapped the memory, valid while this object lives."""
        ...

    @property
    def slot(self) -> int:
        """Index of this node's slot, which no other running node has."""
        ...

    @property
    def cores(self) -> int:
        """Number of cores that the nodes divide."""
        ...
