"""Limits and counts of the connections to the coordinator's ports."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.config.coordinator_config import CoordinatorConfig
from baton.network.connection_guard import ConnectionGuard
from baton.network.connection_limits import COORDINATOR_PORTS, compute_port_limit
from coordinator.frontend.http.server.bounded_protocol import ConnectionTable


class PortConnections(Collector):
    """HTTP ports count their connections themselves; `ConnectionGuard` watches the gRPC ports."""

    def __init__(self, config: CoordinatorConfig, descriptors: int) -> None:
        """`descriptors` is the limit of open files. Raises ConfigError if it is too low."""
        self.limits = {
            name: compute_port_limit(
                name,
                descriptors,
                max_connections=config.max_connections,
                per_address=config.max_connections_per_address,
            )
            for name in COORDINATOR_PORTS
        }
        self._tables: dict[str, ConnectionTable] = {}
        self._guard = ConnectionGuard()

    def get_table(self, name: str) -> ConnectionTable:
        """Return the connection table of an HTTP port."""
        return self._tables.setdefault(name, ConnectionTable(name, self.limits[name]))

    def watch_grpc_port(self, name: str, port: int) -> None:
        """Watch a gRPC port, given its name in metrics and its number."""
        self._guard.watch_port(name, port, self.limits[name])

    def get_connection_counts(self) -> dict[str, int]:
        return {
            name: len(table) for name, table in self._tables.items()
        } | self._guard.get_connection_counts()

    def get_refused_counts(self) -> dict[str, int]:
        """Return how many connections each port has closed because there were too many."""
        return {
            name: table.refused_connections for name, table in self._tables.items()
        } | self._guard.get_refused_counts()

    def close(self) -> None:
        self._guard.close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, at a scrape."""
        held = GaugeMetricFamily("baton_connections", "Open connections of a port", labels=["port"])
        for name, count in self.get_connection_counts().items():
            held.add_metric([name], count)
        yield held
        yield self.build_refused_counter()

    def build_refused_counter(self) -> Metric:
        refused = CounterMetricFamily(
            "baton_connections_refused_total",
            "Connections closed because a connection limit was reached",
            labels=["port"],
        )
        for name, count in self.get_refused_counts().items():
            refused.add_metric([name], count)
        return refused
