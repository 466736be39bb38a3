"""`python -m prefill_node`: a node that starts in the prefill role; the role may be switched.

The roles are described in prefill_node/prefill_role.py and decode_node/decode_role.py.
"""

import sys

from baton.types import Role
from node_engine.host.assemble import launch_node

if __name__ == "__main__":
    sys.exit(launch_node(Role.PREFILL))
