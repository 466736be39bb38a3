"""The coordinator's parts, joined on one event loop, started in the order in which they are needed and stopped in the
opposite one: cluster port, brain, front doors; then refuse, let requests end, close the doors, let the nodes go."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import generate_latest

from baton import link_codec, log
from baton.config import Config
from baton.errors import ConfigError
from baton.limits import LINK_OPTIONS
from baton.pb import cluster_pb2_grpc
from baton.pb.cluster_pb2 import LedgerResponse, StatusResponse
from coordinator import admin, tokenizer
from coordinator.auth import check_exposure
from coordinator.cluster_service import ClusterService
from coordinator.dispatcher import Dispatcher
from coordinator.grpc_port import GrpcPort
from coordinator.http import app
from coordinator.http.listener import Listener, bind
from coordinator.intake import Intake
from coordinator.ledgers import Ledgers
from coordinator.metrics import Metrics
from coordinator.node_link import NodeLink
from coordinator.readiness import Readiness
from coordinator.refusals import Refusals
from coordinator.warmup import Readiness as ClusterReadiness

_GRACE = 2.0  # seconds that open calls get once every request has ended


class Coordinator:
    """Everything of one coordinator process. `run` returns when `stop` was set and the last request has ended."""

    def __init__(self, config: Config) -> None:
        check_exposure(config)
        self._config = config
        self._readiness = Readiness()
        self._dispatcher = Dispatcher(config)
        ledgers = Ledgers(self._dispatcher)
        self._metrics = Metrics(self._dispatcher)
        self._warmup = ClusterReadiness(config, self._dispatcher)
        self._warmup.on_change.append(self._cluster_changed)
        self._readiness.hold("cluster", "no node has joined yet")
        self._cluster = ClusterService(config, self._dispatcher, ledgers, self._warmup, self._metrics)
        self._ledgers = ledgers
        self._text = asyncio.create_task(tokenizer.load(config.model, config.engine))
        self._readiness.hold("tokenizer", "the tokenizer is being loaded")
        self._text.add_done_callback(lambda _: self._readiness.release("tokenizer"))
        refusals = Refusals(self._dispatcher.count_rejection)
        intake = Intake(
            self._dispatcher,
            self._text,
            model=model_name(config),
            longest=config.request_timeout,
            refusals=refusals,
        )
        self._http = Listener(
            app.build(intake, self._readiness, config.api_key), bind(config.host, config.port, "--port")
        )
        self._admin = Listener(
            admin.build(self, self._readiness, config.admin_token, refusals),
            bind(config.admin_host, config.admin_port, "--admin-port"),
        )
        self._grpc = GrpcPort(intake, self._readiness, config.api_key)
        cluster_pb2_grpc.add_ClusterServicer_to_server(self._cluster, self._grpc.server)
        self._grpc.bind(config.host, config.grpc_port)
        self._nodes = grpc.aio.server(options=(*LINK_OPTIONS, ("grpc.so_reuseport", 0)))
        link_codec.add_to(self._nodes, NodeLink(config, self._dispatcher, ledgers).Attach)
        self._cluster_port = _bind_cluster(self._nodes, config)

    async def run(self, stop: asyncio.Event) -> None:
        await self._nodes.start()
        await self._grpc.start()
        parts: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._http.run_until_stopped(), name="http"),
            asyncio.create_task(self._admin.run_until_stopped(), name="admin"),
            asyncio.create_task(self._warmup.run(), name="warmup"),
            asyncio.create_task(stop.wait(), name="stop"),
        ]
        try:
            await self._http.listening.wait()
            await self._admin.listening.wait()
            self._announce()
            parts.append(self._text)
            await self._until_stopped(parts)
        finally:
            await self._take_down()
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _until_stopped(self, parts: list[asyncio.Task[Any]]) -> None:
        """Wait for `stop`; a part that fails first ends the process with its error."""
        waiting = set(parts)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
                if part.get_name() in ("stop", "http", "admin"):
                    return

    async def _take_down(self) -> None:
        self._readiness.hold("shutdown", "the coordinator is stopping")
        await self._dispatcher.drain(self._config.drain_timeout)
        self._http.stop()
        self._admin.stop()
        await self._grpc.stop(_GRACE)
        self._dispatcher.close()
        await self._nodes.stop(_GRACE)

    def _cluster_changed(self, ready: bool, reason: str) -> None:
        if ready:
            self._readiness.release("cluster")
        else:
            self._readiness.hold("cluster", reason)

    def _announce(self) -> None:
        where = {
            "http": self._http.address,
            "grpc": f"{self._config.host}:{self._grpc.port}",
            "admin": self._admin.address,
            "cluster": f"{self._config.cluster_host}:{self._cluster_port}",
        }
        log.get("coordinator").info("listening", pid=os.getpid(), **where)
        if self._config.state_dir:
            path = Path(self._config.state_dir) / "coordinator.json"
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(where | {"pid": os.getpid()}))
            draft.replace(path)

    # what the admin port shows

    def status(self) -> StatusResponse:
        return self._cluster.status()

    async def ledger(self) -> LedgerResponse:
        return await self._ledgers.collect()

    def metrics(self) -> bytes:
        return generate_latest(self._metrics.registry)


def model_name(config: Config) -> str:
    """What clients call the model: --served-model-name, or the last part of --model."""
    if config.served_model_name:
        return config.served_model_name
    return Path(config.model).name or config.engine


async def coordinate(config: Config, stop: asyncio.Event) -> None:
    """Run one coordinator until `stop` is set. Raises ConfigError for what a restart would not mend."""
    log.configure(config.log_level, config.log_format, node="coordinator")
    await Coordinator(config).run(stop)


def _bind_cluster(server: grpc.aio.Server, config: Config) -> int:
    try:
        port: int = server.add_insecure_port(f"{config.cluster_host}:{config.cluster_port}")
    except RuntimeError as error:
        target = f"{config.cluster_host}:{config.cluster_port}"
        raise ConfigError(f"cannot listen on {target} ({error}): choose another --cluster-port") from None
    return port
