"""`python -m decode_node`: a memory-bound node, until it is told to take the other role. Their lives are told in
decode_node/role.py and prefill_node/role.py."""

import sys

from baton.types import Role
from decode_node.make import make_decode
from node_engine.host.launch import launch
from prefill_node.make import make_prefill

if __name__ == "__main__":
    sys.exit(launch(Role.DECODE, {Role.PREFILL: make_prefill, Role.DECODE: make_decode}))
