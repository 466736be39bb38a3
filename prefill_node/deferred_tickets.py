"""Holds tickets back from the transfer plane while a step is launched on a GPU.

What the plane does with a ticket (look up the peer's arena, open a link, send the first frames)
takes Python's lock from the thread that launches the step, at a moment when the GPU has nothing
else to compute.
"""

import threading
from collections.abc import Callable

from baton.types import Ticket


class DeferredTickets:
    """Passes tickets to the plane in the order of their arrival: at once, or after a launch.

    Thread-safe: tickets come on the event loop, and launches begin and end on the compute thread.
    """

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
        """Give all tickets to the plane now: the caller's next call of it may concern them."""
        with self._lock:
            self._give_to_plane()

    def _give_to_plane(self) -> None:
        """With the lock held, so that a later call of the plane cannot overtake a ticket."""
        for ticket in self._tickets:
            self._set_ticket(ticket)
        self._tickets.clear()
