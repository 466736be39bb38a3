"""`python -m prefill_node`: a node that starts in the prefill role; the role may be switched.

The roles are described in prefill_node/prefill_role.py and decode_node/decode_role.py.
"""

import sys

from baton.types import Role
from decode_node.factory import make_decode_role
from kv_pool.client.factory import make_pool_client
from node_engine.host.launch import launch_node
from prefill_node.factory import make_prefill_role

if __name__ == "__main__":
    sys.exit(
        launch_node(
            Role.PREFILL,
            {Role.PREFILL: make_prefill_role, Role.DECODE: make_decode_role},
            make_pool_client,
        )
    )
