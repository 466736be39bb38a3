"""The coordinator's parts, joined on one event loop, started in the order in which they are needed and stopped in the
opposite one: cluster port, front doors, warm-up; then refuse, let requests end, close the doors, let the nodes go."""

import asyncio
import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

from baton import log
from baton.config import Config, model_name
from baton.descriptors import descriptor_limit
from baton.errors import ConfigError
from baton.exposure import check_exposure
from baton.generation_defaults import GenerationDefaults, load_generation_defaults
from baton.model_files import read_model_files
from coordinator import admin, tenants_file, tokenizer_files
from coordinator.arriving_bodies import ArrivingBodies
from coordinator.auth import AdminGate, Clients, allowed_origins
from coordinator.cluster_service import ClusterService
from coordinator.core.identity import CoordinatorModel
from coordinator.dispatcher import Dispatcher
from coordinator.grpc_port import GrpcPort
from coordinator.http import app
from coordinator.http.listener import Listener, bind
from coordinator.intake import Intake
from coordinator.ledgers import Ledgers
from coordinator.metrics import Metrics
from coordinator.node_port import NodePort
from coordinator.ports import Ports
from coordinator.refusals import Refusals
from coordinator.text_workers import TextWorkers
from coordinator.tokenizer import Text
from coordinator.unknown_fields import UnknownFields
from coordinator.warmup import Readiness

_GRACE = 2.0  # seconds that open calls get once every request has ended
_log = log.get("coordinator")


class Coordinator:
    """Everything of one coordinator process. `run` returns when `stop` was set and the last request has ended.

    Every port is bound by the constructor, which raises ConfigError; none answers before `run`.
    """

    def __init__(self, config: Config) -> None:
        check_exposure(config)
        self._config = config
        tenants = tenants_file.load(config.tenants) if config.tenants else None
        self._who = Clients(config.api_key, tenants)
        self._state_file = _state_file(config.state_dir) if config.state_dir else None
        self._dispatcher = Dispatcher(config, served=served_model(config))
        if tenants is not None:
            self._dispatcher.reload_tenants(tenants)
        self._ledgers = Ledgers(self._dispatcher)
        unknown_fields = UnknownFields(ignored=config.unknown_fields == "ignore")
        self._ports = Ports(config, descriptor_limit())
        self._metrics = Metrics(self._dispatcher, unknown_fields)
        self._metrics.add_ports(self._ports)
        self._readiness = Readiness(config, self._dispatcher)
        self._cluster = ClusterService(config, self._dispatcher, self._ledgers, self._readiness, self._metrics)
        self._text: asyncio.Future[Text] = asyncio.get_running_loop().create_future()
        self._workers = TextWorkers()
        refusals = Refusals(self._dispatcher.count_rejection)
        intake = Intake(
            self._dispatcher,
            self._text,
            model=model_name(config),
            longest=config.request_timeout,
            refusals=refusals,
            defaults=_defaults(config),
            unknown_fields=unknown_fields,
            on_client_id=self._cluster.client_ids.add,
            workers=self._workers,
            bodies=ArrivingBodies(self._ports.limits["http"].most),
        )
        metrics = app.OperatorMetrics(self._cluster.metrics, AdminGate(config.admin_token))
        clients = app.build(
            intake,
            self._readiness,
            self._who,
            metrics if config.metrics_on_http else None,
            allowed_origins(config.allowed_origins),
        )
        operators = admin.build(self._cluster, self._readiness, config.admin_token, refusals)
        with ExitStack() as bound:
            ports = self._ports
            http = bound.enter_context(bind(config.host, config.port, "--port"))
            self._http = Listener(clients, http, ports.table("http"))
            admin_port = bound.enter_context(bind(config.admin_host, config.admin_port, "--admin-port"))
            self._admin = Listener(operators, admin_port, ports.table("admin"))
            self._grpc = GrpcPort(intake, self._readiness, self._who, ports.limits["grpc"])
            self._grpc.add_cluster(self._cluster)
            self._grpc.bind(config.host, config.grpc_port)
            self._nodes = NodePort(config, self._dispatcher, self._ledgers, ports.limits["cluster"])
            bound.pop_all()  # every port is ours

    async def run(self, stop: asyncio.Event) -> None:
        """Raises ConfigError for a tokenizer that cannot be used."""
        if self._config.tenants:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload_tenants)
        await self._nodes.start()
        await self._grpc.start()
        self._ports.watch("cluster", self._nodes.port)
        self._ports.watch("grpc", self._grpc.port)
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._http.run_until_stopped(), name="http")
                parts.create_task(self._admin.run_until_stopped(), name="admin")
                parts.create_task(self._announce(), name="announce")
                warming = parts.create_task(self._warm_up(), name="warm-up")
                await stop.wait()
                warming.cancel()
                await self._end_requests()
                self._http.stop()
                self._admin.stop()
        finally:
            self._cluster.close()
            await self._grpc.stop(_GRACE)
            self._dispatcher.close()
            await self._nodes.stop(_GRACE)
            await asyncio.to_thread(self._ports.close)
            if self._state_file is not None:
                self._state_file.unlink(missing_ok=True)

    def reload_tenants(self) -> None:
        """Read the file again. One that is wrong changes nothing."""
        try:
            tenants = tenants_file.load(self._config.tenants)
        except ConfigError as error:
            _log.error("tenants not reloaded", error=str(error))
            return
        self._who.tenants = tenants
        self._dispatcher.reload_tenants(tenants)
        _log.info("tenants reloaded", tenants=len(tenants.tenants), keys=len(tenants.keys))

    async def _warm_up(self) -> None:
        """Text prompts are part of being ready, so the tokenizer comes first: it loads while nodes do."""
        self._text.set_result(await tokenizer_files.load(self._config.model, self._config.engine, self._workers))
        await self._readiness.run()

    async def _end_requests(self) -> None:
        """Say that we are leaving, take no new request, and give those that run --drain-timeout."""
        await self._grpc.not_serving()
        await self._dispatcher.drain(self._config.drain_timeout)

    async def _announce(self) -> None:
        await self._http.listening.wait()
        await self._admin.listening.wait()
        where = {
            "http": self._http.address,
            "grpc": _address(self._config.host, self._grpc.port),
            "admin": self._admin.address,
            "cluster": _address(self._config.cluster_host, self._nodes.port),
        }
        if self._state_file is not None:
            draft = self._state_file.with_suffix(".draft")
            draft.write_text(json.dumps(where | {"pid": os.getpid()}))
            draft.replace(self._state_file)
        _log.info("listening", pid=os.getpid(), **where)


async def coordinate(config: Config, stop: asyncio.Event) -> None:
    """Run one coordinator until `stop` is set. Raises ConfigError for what a restart would not mend."""
    log.configure(config.log_level, config.log_format, node="coordinator")
    await Coordinator(config).run(stop)


def _defaults(config: Config) -> GenerationDefaults:
    """The model's own. Raises ConfigError."""
    folder = Path(config.model)
    known = config.engine == "model" and config.model and folder.is_dir()
    return load_generation_defaults(folder) if known else GenerationDefaults()


def served_model(config: Config) -> CoordinatorModel:
    """What nodes are compared with: the files of a model's folder, which `with_local_model` finds for a hub's name too;
    for a name without a folder the engine alone. Without --model it is unknown what nodes have, unless paced."""
    if config.engine != "paced" and not config.model:
        return CoordinatorModel()
    folder = Path(config.model)
    if config.engine == "paced" or not folder.is_dir():
        return CoordinatorModel(engine=config.engine)
    return CoordinatorModel(config.engine, read_model_files(folder, dummy=config.load_format == "dummy"))


def _state_file(folder: str) -> Path:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--state-dir {folder} cannot be made ({error.strerror}): choose another") from None
    return Path(folder) / "coordinator.json"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
