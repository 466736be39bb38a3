"""`python -m baton.cli.probe coordinator|node`: one health check of a process on this machine.

It reads the settings that the process reads (BATON_* and --config), so a container's health check
needs no address and no token of its own. Prints why not. Exit codes: 0 healthy, 1 not healthy, 2
wrong usage, 3 nobody answers.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from baton.cli.client.grpc_channel import CHANNEL_OPTIONS
from baton.cli.common.errors import CommandFailed, EndpointUnreachable, exit_code
from baton.cli.supervisor.ports import cluster_endpoints, dial_address
from baton.config.resolve import resolve_config
from baton.config.settings import Config
from baton.errors import BatonError, ConfigError
from baton.network.bind_policy import get_endpoint_host

PROBE_TIMEOUT = 4.0  # seconds


def probe_coordinator(config: Config, timeout: float = PROBE_TIMEOUT) -> None:
    """Ask /readyz of the admin port.

    Raises CommandFailed with the coordinator's reason, or EndpointUnreachable.
    """
    import httpx2

    address = cluster_endpoints(config).admin
    headers = {"authorization": f"Bearer {config.admin_token}"} if config.admin_token else {}
    try:
        answer = httpx2.get(
            f"http://{address}/readyz",
            headers=headers,
            timeout=timeout,
            trust_env=False,  # no proxy stands between us and this machine
            verify=False,  # there are no certificates to load
        )
    except httpx2.HTTPError as error:
        raise EndpointUnreachable(f"no coordinator answers at {address}: {error}") from None
    if not answer.is_success:
        raise CommandFailed(
            _error_message(answer.content) or f"/readyz answers {answer.status_code}"
        )


def probe_node(config: Config, timeout: float = PROBE_TIMEOUT) -> None:
    """Ask the node's gRPC health service.

    Raises CommandFailed, EndpointUnreachable, or ConfigError without a fixed health port.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    if config.health_port < 1:
        raise ConfigError(
            f"health_port is {config.health_port}: a probe needs a fixed one", param="health_port"
        )
    address = dial_address(get_endpoint_host(config.listen), config.health_port)
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout
            )
        except grpc.RpcError as error:
            raise EndpointUnreachable(
                f"no node answers at {address}: {error.code().name}"
            ) from None
    serving_status = health_pb2.HealthCheckResponse.ServingStatus
    if answer.status != serving_status.SERVING:
        raise CommandFailed(f"the node at {address} is {serving_status.Name(answer.status)}")


PROBES = {"coordinator": probe_coordinator, "node": probe_node}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m baton.cli.probe", description=(__doc__ or "").splitlines()[2]
    )
    parser.add_argument("kind", choices=PROBES)
    kind = parser.parse_args(argv).kind
    try:
        PROBES[kind](resolve_config({}))
    except BatonError as error:
        sys.stderr.write(f"{error}\n")
        return exit_code(error)
    return 0


def _error_message(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, empty if `body` has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
