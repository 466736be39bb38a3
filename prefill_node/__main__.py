"""`python -m prefill_node`: a compute-bound node, until it is told to take the other role. Their lives are told in
prefill_node/role.py and decode_node/role.py."""

import sys

from baton.types import Role
from decode_node.make import make_decode
from node_engine.host.launch import launch
from prefill_node.make import make_prefill

if __name__ == "__main__":
    sys.exit(launch(Role.PREFILL, {Role.PREFILL: make_prefill, Role.DECODE: make_decode}))
