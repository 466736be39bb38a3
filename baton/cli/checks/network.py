"""`baton doctor`: checks of the ports, and of a cluster that may already run."""

from typing import Any

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.cli.common.errors import CommandFailed, EndpointUnreachable
from baton.cli.supervisor.ports import PORT_FIELDS, reserve_port
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.version import package_version

_REFUSED_METRIC = "baton_connections_refused_total"


def fetch_status(endpoint: str, admin_token: str) -> Any:
    """Return the status of the cluster at `endpoint`, or None if nothing answers there.

    Raises CommandFailed when the cluster refuses the call.
    """
    from baton.cli.client.grpc_channel import admin_metadata, coordinator_channel
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    try:
        with coordinator_channel(endpoint) as channel:
            stub = cluster_pb2_grpc.ClusterStub(channel)
            return stub.Status(
                cluster_pb2.StatusRequest(), timeout=10.0, metadata=admin_metadata(admin_token)
            )
    except EndpointUnreachable:
        return None


def check_network(config: Config, endpoint: str) -> list[Finding]:
    try:
        status = fetch_status(endpoint, config.admin_token)
    except CommandFailed as error:
        finding = warning_finding(
            "cluster", f"{endpoint} answers: {error.message}", "give the right --admin-token"
        )
        return [finding, check_ports(config, occupied=True)]
    return [
        check_cluster(endpoint, status),
        *check_connections(status),
        check_ports(config, occupied=status is not None),
    ]


def check_connections(status: Any) -> list[Finding]:
    """Report the ports on which the running cluster closed connections beyond its limit."""
    counters = status.counters if status is not None else {}
    refused = {
        name: int(value)
        for name, value in sorted(counters.items())
        if name.startswith(_REFUSED_METRIC) and value
    }
    if not refused:
        return []
    counts = ", ".join(
        f"{name.removeprefix(_REFUSED_METRIC).strip('{}')}: {count}"
        for name, count in refused.items()
    )
    fix = (
        "raise ulimit -Hn or --max-connections, or keep out who opens them "
        "(--max-connections-per-address, a firewall)"
    )
    return [
        warning_finding(
            "connections",
            f"closed because there were too many, since the coordinator started: {counts}",
            fix,
        )
    ]


def check_cluster(endpoint: str, status: Any) -> Finding:
    """Check readiness and version of the running cluster; no cluster (`status` None) is ok."""
    if status is None:
        return ok_finding("cluster", f"none answers at {endpoint}")
    detail = f"{endpoint}: version {status.version or 'unknown'}, {len(status.nodes)} nodes"
    if not status.ready:
        return warning_finding(
            "cluster", f"{detail}, not ready: {status.reason}", "see `baton status` and the logs"
        )
    if status.version != package_version():
        return warning_finding(
            "cluster",
            f"{detail}; this is {package_version()}",
            "use the same version on both sides",
        )
    return ok_finding("cluster", f"{detail}, ready")


def check_ports(config: Config, *, occupied: bool) -> Finding:
    """Check that the ports of `baton up` are free.

    `occupied` says that a cluster runs here, which may itself use them.
    """
    errors = []
    for field, host in PORT_FIELDS.items():
        flag = "--" + field.replace("_", "-")
        try:
            reserve_port(getattr(config, host), getattr(config, field), flag).close()
        except ConfigError as error:
            errors.append(error.message)
    if not errors:
        return ok_finding("ports", "free")
    if occupied:
        return ok_finding("ports", f"{len(errors)} in use, while a cluster runs here")
    return bad_finding(
        "ports", "; ".join(errors), "stop what listens there, or choose other ports (0 for any)"
    )
