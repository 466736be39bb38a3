"""`python -m decode_node`: a memory-bound node, until it is told to take the other role. Their
lives are told in decode_node/decode_role.py and prefill_node/prefill_role.py."""

import sys

from baton.types import Role
from decode_node.factory import make_decode_role
from kv_pool.client.factory import make_pool_client
from node_engine.host.launch import launch_node
from prefill_node.factory import make_prefill_role

if __name__ == "__main__":
    sys.exit(
        launch_node(
            Role.DECODE,
            {Role.PREFILL: make_prefill_role, Role.DECODE: make_decode_role},
            make_pool_client,
        )
    )
