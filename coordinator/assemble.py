"""Assembles the coordinator and runs it on one event loop.

Started in this order: cluster port, front ends, warm-up. Stopped: refuse new requests, let running
ones end, close the front ends, disconnect the nodes.
"""

import asyncio
import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

from starlette.types import ASGIApp

from baton.config.coordinator_config import CoordinatorConfig
from baton.errors import ConfigError
from baton.models.file_digests import compute_file_digests
from baton.models.generation_defaults import GenerationDefaults, load_generation_defaults
from baton.network.bind_policy import check_coordinator_binds
from baton.process import log
from baton.process.descriptors import get_descriptor_limit
from baton.process.runtime import prepare_to_serve
from baton.process.startup import STARTUP
from baton.structured_output.tokenizer_file import find_tokenizer_file
from coordinator.core.membership.join_checks import ServedModel
from coordinator.frontend import tenants_file
from coordinator.frontend.auth import AdminAuthenticator, ClientAuthenticator, parse_allowed_origins
from coordinator.frontend.body_budget import BodyBudgets
from coordinator.frontend.grpc.server import GrpcServer
from coordinator.frontend.http import app
from coordinator.frontend.http.server.http_server import HttpServer, bind_http_socket
from coordinator.frontend.output_parsing import OutputParserSettings
from coordinator.frontend.request import RejectionCounter
from coordinator.frontend.request_intake import RequestIntake
from coordinator.frontend.unknown_fields import UnknownFieldPolicy
from coordinator.node_links.cluster_readiness import ClusterReadiness
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.node_links.ledger_collector import LedgerCollector
from coordinator.node_links.node_link_server import NodeLinkServer
from coordinator.operators import admin_app
from coordinator.operators.cluster_operations import ClusterOperations
from coordinator.operators.cluster_service import ClusterService
from coordinator.operators.metrics import CoordinatorMetrics
from coordinator.operators.port_connections import PortConnections
from coordinator.structured_output.grammar_checker import VERDICTS_PER_GRAMMAR, GrammarChecker
from coordinator.text import tokenizer_loader
from coordinator.text.text_workers import TextWorkers
from coordinator.text.tokenizer import Tokenizer

_CLOSE_GRACE_SECONDS = 2.0  # for open calls, once every request has ended
_log = log.get_logger("coordinator")


class Coordinator:
    """All parts of one coordinator process."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Bind every port; none answers before `run`. Raises ConfigError."""
        check_coordinator_binds(config)
        self._config = config
        tenants = tenants_file.load_tenants(config.tenants) if config.tenants else None
        self._client_auth = ClientAuthenticator(config.api_key, tenants)
        self._state_file = _make_state_file_path(config.state_dir) if config.state_dir else None
        self._dispatcher = Dispatcher(config, served=read_served_model(config))
        if tenants is not None:
            self._dispatcher.reload_tenants(tenants)
        self._ledger_collector = LedgerCollector(self._dispatcher)
        unknown_fields = UnknownFieldPolicy(ignored=config.unknown_fields == "ignore")
        self._port_connections = PortConnections(config, get_descriptor_limit())
        self._grammar_checker = GrammarChecker(
            find_tokenizer_file(config.model, config.engine),
            timeout_seconds=config.grammar_timeout,
            max_entries=config.grammar_cache * VERDICTS_PER_GRAMMAR,
        )
        self._metrics = CoordinatorMetrics(self._dispatcher, unknown_fields)
        self._metrics.add_port_connections(self._port_connections)
        self._metrics.registry.register(self._grammar_checker)
        self._readiness = ClusterReadiness(config, self._dispatcher)
        self._operations = ClusterOperations(
            config, self._dispatcher, self._ledger_collector, self._readiness, self._metrics
        )
        self._tokenizer: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
        self._text_workers = TextWorkers()
        intake = self._build_intake(unknown_fields)
        clients = self._build_client_app(intake)
        operators = admin_app.build_admin_app(
            self._operations, self._readiness, config.admin_token, intake.rejections
        )
        self._bind_ports(intake, clients, operators)

    def _build_intake(self, unknown_fields: UnknownFieldPolicy) -> RequestIntake:
        dispatcher, config = self._dispatcher, self._config
        return RequestIntake(
            dispatcher,
            self._tokenizer,
            model=config.public_model_name,
            max_timeout_seconds=config.request_timeout,
            rejections=RejectionCounter(
                lambda error, tenant_class: dispatcher.brain.count_rejection(
                    error, tenant_class, dispatcher.clock()
                )
            ),
            defaults=_load_generation_defaults(config),
            unknown_fields=unknown_fields,
            output_parsers=OutputParserSettings(config.tool_call_parser, config.reasoning_parser),
            on_client_request_id=self._operations.client_request_ids.add_request,
            workers=self._text_workers,
            bodies=BodyBudgets(self._port_connections.limits["http"].max_connections),
            check_grammar=self._grammar_checker.check_grammar,
        )

    def _build_client_app(self, intake: RequestIntake) -> ASGIApp:
        config = self._config
        metrics = app.MetricsEndpoint(
            self._operations.render_metrics, AdminAuthenticator(config.admin_token)
        )
        return app.build_app(
            intake,
            self._readiness,
            self._client_auth,
            metrics if config.metrics_on_http else None,
            parse_allowed_origins(config.allowed_origins),
        )

    def _bind_ports(self, intake: RequestIntake, clients: ASGIApp, operators: ASGIApp) -> None:
        config, ports = self._config, self._port_connections
        with ExitStack() as bound:
            http = bound.enter_context(bind_http_socket(config.host, config.port, "--port"))
            self._http_server = HttpServer(clients, http, ports.get_table("http"))
            admin = bound.enter_context(
                bind_http_socket(config.admin_host, config.admin_port, "--admin-port")
            )
            self._admin_server = HttpServer(operators, admin, ports.get_table("admin"))
            self._grpc_server = GrpcServer(
                intake, self._readiness, self._client_auth, ports.limits["grpc"]
            )
            self._grpc_server.add_cluster_service(
                ClusterService(self._operations, config.admin_token)
            )
            self._grpc_server.bind(config.host, config.grpc_port)
            self._node_link_server = NodeLinkServer(
                config, self._dispatcher, self._ledger_collector, ports.limits["cluster"]
            )
            bound.pop_all()  # every port is bound: keep the sockets open

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set and the last request has ended.

        Raises ConfigError for a tokenizer that cannot be used.
        """
        if self._config.tenants:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload_tenants)
        await self._node_link_server.start()
        await self._grpc_server.start()
        self._port_connections.watch_grpc_port("cluster", self._node_link_server.port)
        self._port_connections.watch_grpc_port("grpc", self._grpc_server.port)
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._http_server.run_until_stopped(), name="http")
                parts.create_task(self._admin_server.run_until_stopped(), name="admin")
                parts.create_task(self._announce_addresses(), name="announce")
                warming = parts.create_task(self._warm_up(), name="warm-up")
                await stop.wait()
                warming.cancel()
                await self._drain_requests()
                self._http_server.stop()
                self._admin_server.stop()
        finally:
            self._operations.close()
            await self._grammar_checker.close()
            await self._grpc_server.stop(_CLOSE_GRACE_SECONDS)
            self._dispatcher.close()
            await self._node_link_server.stop(_CLOSE_GRACE_SECONDS)
            await asyncio.to_thread(self._port_connections.close)
            if self._state_file is not None:
                self._state_file.unlink(missing_ok=True)

    def reload_tenants(self) -> None:
        """Read the file of tenants again. An invalid file is logged and changes nothing."""
        try:
            tenants = tenants_file.load_tenants(self._config.tenants)
        except ConfigError as error:
            _log.error("reloading tenants failed", error=str(error))
            return
        self._client_auth.tenants = tenants
        self._dispatcher.reload_tenants(tenants)
        _log.info("tenants reloaded", tenants=len(tenants.by_name), keys=len(tenants.key_digests))

    async def _warm_up(self) -> None:
        """Load the tokenizer, without which the cluster is not ready, then send the warm-up."""
        self._tokenizer.set_result(
            await tokenizer_loader.load_tokenizer(
                self._config.model, self._config.engine, self._text_workers
            )
        )
        prepare_to_serve()
        await self._readiness.run()

    async def _drain_requests(self) -> None:
        """Fail health checks, refuse new requests, and give running ones --drain-timeout to end."""
        await self._grpc_server.set_not_serving()
        await self._dispatcher.drain_requests(self._config.drain_timeout)

    async def _announce_addresses(self) -> None:
        await self._http_server.listening.wait()
        await self._admin_server.listening.wait()
        where = {
            "http": self._http_server.address,
            "grpc": _format_address(self._config.host, self._grpc_server.port),
            "admin": self._admin_server.address,
            "cluster": _format_address(self._config.cluster_host, self._node_link_server.port),
        }
        if self._state_file is not None:
            draft = self._state_file.with_suffix(".draft")
            draft.write_text(json.dumps(where | {"pid": os.getpid()}))
            draft.replace(self._state_file)
        _log.info("listening", pid=os.getpid(), **where)
        STARTUP.finish("ports")


async def run_coordinator(config: CoordinatorConfig, stop: asyncio.Event) -> None:
    """Run one coordinator until `stop` is set.

    Raises ConfigError for problems that a restart would not solve.
    """
    log.configure_logging(config.log_level, config.log_format, node="coordinator")
    await Coordinator(config).run(stop)


def _load_generation_defaults(config: CoordinatorConfig) -> GenerationDefaults:
    """Read the defaults in the model's generation_config.json. Raises ConfigError."""
    folder = Path(config.model)
    known = config.engine == "model" and config.model and folder.is_dir()
    return load_generation_defaults(folder) if known else GenerationDefaults()


def read_served_model(config: CoordinatorConfig) -> ServedModel:
    """Return what is known of the model, to compare joining nodes with.

    That is the digests of the files in the model's folder, which `with_local_model` finds for a
    name on a hub, too. For a name without a folder it is the engine alone. Without --model nothing
    is known, except for the paced engine.
    """
    if config.engine != "paced" and not config.model:
        return ServedModel()
    folder = Path(config.model)
    if config.engine == "paced" or not folder.is_dir():
        return ServedModel(engine=config.engine)
    return ServedModel(
        config.engine, compute_file_digests(folder, dummy=config.load_format == "dummy")
    )


def _make_state_file_path(folder: str) -> Path:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--state-dir {folder} cannot be made ({error.strerror}): choose another"
        ) from None
    return Path(folder) / "coordinator.json"


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
