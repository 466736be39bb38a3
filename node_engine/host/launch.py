"""What both launchers do: settings from the command line, then a process that hosts a role."""

import os
import sys
from collections.abc import Mapping, Sequence

from baton import config_flags, log, runtime
from baton.errors import ConfigError
from baton.failpoints import arm_from_environment
from baton.model_source import with_local_model
from baton.types import Role
from node_engine.host.process import host_node
from node_engine.host.roles import MakeRole

NODE_FIELDS = (
    *("coordinator", "cluster_token", "insecure", "name", "listen", "advertise", "health_port", "host_id"),
    *("model", "engine", "load_format", "device", "dtype", "threads", "max_model_len", "kv_memory", "block_size"),
    *(
        "max_num_seqs",
        "max_batched_tokens",
        "preemption",
        "transport",
        "layers_per_message",
        "segment_dir",
        "silence",
        "ticket_ttl",
    ),
    *("progress_timeout", "drain_timeout", "paced_prefill_us_per_token", "paced_step_ms", "paced_vocab_size"),
    *("paced_reread", "log_level", "log_format"),
)


def launch(role: Role, makers: Mapping[Role, MakeRole], argv: Sequence[str] | None = None) -> int:
    """Run a node, in `role` first, until it is told to stop; returns the exit code of the process."""
    supervisor = os.environ.get("BATON_SUPERVISOR_PID")
    if supervisor:
        runtime.die_with(int(supervisor))
    prog = f"python -m {role.value}_node"
    try:
        arm_from_environment()
        config = config_flags.load(argv, prog=prog, description=f"A {role.value} node of Baton.", fields=NODE_FIELDS)
        config = with_local_model(config)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return runtime.EXIT_USAGE
    log.configure(config.log_level, config.log_format)
    return runtime.run(lambda stop: host_node(config, role, makers, stop))
