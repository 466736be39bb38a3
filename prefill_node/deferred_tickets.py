"""Keeps tickets from the transfer plane while a step is launched on a GPU.

Opening the way that a ticket names takes Python's lock from the thread that launches the step. The
GPU, which has nothing to compute at that moment, would wait for it, and no copy can begin before
the step's first layers are computed. It brought the time to compute a prompt of 128 tokens from
10.0 to 9.1 ms.
"""

import threading
from collections.abc import Callable

from baton.types import Ticket


class DeferredTickets:
    """Any thread. Tickets reach the plane in the order of their arrival, and at once if no step is
    being launched."""

    def __init__(self, set_ticket: Callable[[Ticket], None]) -> None:
        """`set_ticket` gives a ticket to the plane; it must not block."""
        self._set_ticket = set_ticket
        self._lock = threading.Lock()
        self._is_launching = False
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        with self._lock:
            self._tickets.append(ticket)
            if not self._is_launching:
                self._give_to_plane()

    def begin_launch(self) -> None:
        """`end_launch` must follow."""
        with self._lock:
            self._is_launching = True

    def end_launch(self) -> None:
        """The step is launched, or it never will be."""
        with self._lock:
            self._is_launching = False
            self._give_to_plane()

    def pass_on(self) -> None:
        """Give the plane all tickets now, before what the caller has for it."""
        with self._lock:
            self._give_to_plane()

    def _give_to_plane(self) -> None:
        """With the lock held, so that a later call of the plane cannot overtake a ticket."""
        for ticket in self._tickets:
            self._set_ticket(ticket)
        self._tickets.clear()
