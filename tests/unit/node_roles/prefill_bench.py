"""A prefill role on a test bench."""

from typing import Any

from kv_transfer.plane import OutboundAborted
from prefill_node.prefill_role import PrefillRole
from tests.unit.node_roles.role_bench import FakeOutbound, RoleBench


class PrefillBench(RoleBench):
    def __init__(self, **sizes: Any) -> None:
        self.plane = FakeOutbound()
        super().__init__(lambda context: PrefillRole(context, self.plane), **sizes)

    def answer_aborts(self) -> None:
        """The plane has let go of everything that it was told to."""
        for key, error in tuple(self.plane.aborted.items()):
            self.send_item(OutboundAborted(key, error))
