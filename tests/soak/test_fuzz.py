"""Requests that nobody would write, at every port of clients and operators, beside traffic that
must not notice.

Cases come from our own documents: the OpenAPI schema (schemathesis), the proto files, and below
both, bytes. No answer may be a 5xx, none may say anything but what its document says, no process
may end, and at the end nothing is held. `make test` runs a seeded slice, `make soak` 5,000 cases.
`--soak-seed` repeats a run.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import grpc
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from baton.limits import MAX_BODY_BYTES
from baton.pb import cluster_pb2, generation_pb2
from tests.soak import fuzz_http, fuzz_proto
from tests.soak.fuzz_environment import (
    CONTEXT_TOKENS,
    SPARE_NODES,
    VOCAB_SIZE,
    FuzzEnvironment,
    FuzzTarget,
)
from tests.soak.fuzz_wire import PATHS, RawExchange, exchange_strategy

pytestmark = pytest.mark.timeout(1800)
SHARES = {"schema": 0.5, "admin": 0.07, "proto": 0.23, "wire": 0.2}
TARGETS = ("cluster", "front")
VOCABULARIES = {"cluster": VOCAB_SIZE, "front": 1000}
KINDS = [
    (target, path, kind)
    for target in TARGETS
    for path in PATHS
    for kind in ("allowed", "forbidden", "served")
    if (target, kind) != ("cluster", "served")
    or path == "/v1/completions"  # paced nodes know no text
]
_GENERATION = [
    method.name for method in generation_pb2.DESCRIPTOR.services_by_name["Generation"].methods
]
_CLUSTER = [method.name for method in cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].methods]
_DEFECTS = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
_CASES_PER_TEST = 500  # cases; a longer run shows where it is
_TIMEOUT_SECONDS = 60.0  # seconds in which every call must have ended
Case = tuple[
    bytes, int, list[tuple[str, str]]
]  # what is sent, after how many responses the client goes, metadata


@pytest.fixture(scope="module")
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FuzzEnvironment]:
    with FuzzEnvironment(
        tmp_path_factory.mktemp("fuzz"), int(request.config.getoption("--soak-seed"))
    ) as running:
        yield running


@pytest.fixture
def run_cases(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> Callable[..., None]:
    """Run a share of all cases, and return how many there were."""
    cases, number = (
        int(request.config.getoption("--fuzz-cases")),
        int(request.config.getoption("--soak-seed")),
    )

    def run(share: float, strategy: st.SearchStrategy[Any], judge: Callable[[Any], None]) -> None:
        count = 0

        @seed(number)
        @settings(
            max_examples=max(1, round(cases * share)),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def cases_of_share(case: Any) -> None:
            nonlocal count
            count += 1
            judge(case)

        cases_of_share()
        with capfd.disabled() if cases > _CASES_PER_TEST else nullcontext():
            print(f"  {request.node.name}: {count} cases")  # noqa: T201

    return run


@pytest.mark.parametrize(("target", "path", "kind"), KINDS)
def test_fuzz_openapi_requests(
    environment: FuzzEnvironment, run_cases: Callable[..., None], target: str, path: str, kind: str
) -> None:
    target_ports: FuzzTarget = getattr(environment, target)
    url = f"http://127.0.0.1:{target_ports.http}"
    with requests.Session() as session:
        document = session.get(f"{url}/openapi.json", timeout=_TIMEOUT_SECONDS).json()
        if kind == "served":
            texts = target == "front"
            document = fuzz_http.narrow_schema(
                document, VOCABULARIES[target], target_ports.model, CONTEXT_TOKENS // 4, texts=texts
            )

        def judge(case: Any) -> None:
            response = fuzz_http.send_case(case, url, session, _TIMEOUT_SECONDS)
            fuzz_http.check_response(case, response, strict=kind == "forbidden")

        cases = fuzz_http.case_strategy(document, path, "POST", good=kind != "forbidden")
        shares = 3 if kind == "served" else 1
        weight = shares / sum(3 if kind == "served" else 1 for _, _, kind in KINDS)
        run_cases(
            SHARES["schema"] * weight,
            cases.map(fuzz_http.with_whole_numbers) if kind == "served" else cases,
            judge,
        )


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/openapi.json"])
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_get_routes(environment: FuzzEnvironment, target: str, path: str) -> None:
    url = f"http://127.0.0.1:{getattr(environment, target).http}{path}"
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "HEAD"):
        response = requests.request(
            method, url, data=b"\xff", params={"a": "\0"}, timeout=_TIMEOUT_SECONDS
        )
        assert response.status_code in {"GET": (200,), "HEAD": (200, 405)}.get(method, (405,)), (
            method
        )


@pytest.mark.parametrize("kind", ["allowed", "forbidden"])
def test_fuzz_admin_port(
    environment: FuzzEnvironment, run_cases: Callable[..., None], kind: str
) -> None:
    url, document = f"http://127.0.0.1:{environment.cluster.admin}", fuzz_http.admin_document()
    drain = fuzz_http.case_strategy(document, "/admin/drain", "POST", good=kind == "allowed")
    if kind == "allowed":
        pages = [
            fuzz_http.case_strategy(document, path, "GET", good=True)
            for path in document["paths"]
            if "drain" not in path
        ]
        drain = st.one_of(drain, *pages)
    with requests.Session() as session:

        def judge(case: Any) -> None:
            response = fuzz_http.send_case(case, url, session, _TIMEOUT_SECONDS)
            fuzz_http.check_response(case, response, strict=kind == "forbidden")

        run_cases(SHARES["admin"] / 2, drain, judge)
        assert "baton_" in session.get(f"{url}/metrics", timeout=_TIMEOUT_SECONDS).text
        for name in SPARE_NODES:
            session.post(
                f"{url}/admin/drain", json={"node": name, "undrain": True}, timeout=_TIMEOUT_SECONDS
            )


@pytest.mark.parametrize("method", [*_GENERATION, *_CLUSTER])
def test_fuzz_grpc_messages(
    environment: FuzzEnvironment, run_cases: Callable[..., None], method: str
) -> None:
    operators = method in _CLUSTER
    file = cluster_pb2 if operators else generation_pb2
    service = file.DESCRIPTOR.services_by_name["Cluster" if operators else "Generation"]
    described = service.methods_by_name[method]
    answer = getattr(file, described.output_type.name)
    for target in ("cluster",) if operators else TARGETS:
        target_ports: FuzzTarget = getattr(environment, target)
        with grpc.insecure_channel(
            target_ports.grpc, options=(("grpc.enable_http_proxy", 0),)
        ) as channel:
            streams = described.server_streaming
            call = (channel.unary_stream if streams else channel.unary_unary)(
                f"/{service.full_name}/{method}"
            )

            def judge(case: Case, call: Any = call, streams: bool = streams) -> None:
                code = _call(case, call, answer, streams=streams)
                assert code not in _DEFECTS, code
                assert (code is grpc.StatusCode.UNIMPLEMENTED) <= (method == "ArmFailpoints"), code

            data = fuzz_proto.encoding_strategy(described.input_type, _usual(target_ports))
            enough = st.just(2) if method == "Watch" else st.integers(0, 4)
            cases = st.tuples(data, enough, _metadata())
            weight = 1.0 if operators else 3.0 / len(TARGETS)
            run_cases(
                SHARES["proto"] * weight / (3 * len(_GENERATION) + len(_CLUSTER)), cases, judge
            )


@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_raw_http(
    environment: FuzzEnvironment, run_cases: Callable[..., None], target: str
) -> None:
    port = getattr(environment, target).http
    run_cases(
        SHARES["wire"] * 0.45, exchange_strategy(), lambda exchange: _check_exchange(exchange, port)
    )


def test_fuzz_raw_http_of_the_admin_port(
    environment: FuzzEnvironment, run_cases: Callable[..., None]
) -> None:
    run_cases(
        SHARES["wire"] * 0.1,
        exchange_strategy(("/admin/drain",)),
        lambda exchange: _check_exchange(exchange, environment.cluster.admin),
    )


def test_too_large_requests_are_refused(environment: FuzzEnvironment) -> None:
    body = b'{"prompt":"' + b"x" * MAX_BODY_BYTES + b'"}'
    for path in PATHS:
        url, headers = (
            f"http://127.0.0.1:{environment.cluster.http}{path}",
            {"content-type": "application/json"},
        )
        assert (
            requests.post(url, data=body, headers=headers, timeout=_TIMEOUT_SECONDS).status_code
            == 413
        )


def test_nothing_is_left_after_fuzzing(environment: FuzzEnvironment) -> None:
    """This test must be the last one in the file: see `FuzzEnvironment.close`."""
    environment.close()


def _check_exchange(exchange: RawExchange, port: int) -> None:
    answer = exchange.perform(port)
    if answer is None:
        return
    status, body = answer
    assert status < 500 or (status == 501 and port), f"{status} {body[:200]!r} to {exchange}"
    if status == 200 and body.startswith(b"data:"):
        fuzz_http.check_stream(body)
    elif status == 200 or (status >= 400 and body):
        assert body.startswith(b"{"), f"{status} {body[:200]!r} to {exchange}"
        json.loads(body)


def _call(case: Case, call: Any, answer: Any, *, streams: bool) -> grpc.StatusCode:
    """Return how the call ended."""
    data, enough, metadata = case
    try:
        if streams:
            _read(call(data, timeout=_TIMEOUT_SECONDS, metadata=metadata), enough, answer)
        else:
            answer.FromString(call(data, timeout=_TIMEOUT_SECONDS, metadata=metadata))
    except grpc.RpcError as error:
        note(str(error))
        return error.code()
    return grpc.StatusCode.OK


def _read(responses: Any, enough: int, kind: Any) -> None:
    """Read `enough` responses and disconnect; 0 reads all of them."""
    try:
        for number, data in enumerate(responses, 1):
            kind.FromString(data)
            if number == enough:
                break
    finally:
        responses.cancel()


def _metadata() -> st.SearchStrategy[list[tuple[str, str]]]:
    words = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=140)
    return st.lists(
        st.tuples(st.sampled_from(["x-request-id", "authorization", "x-odd"]), words), max_size=2
    )


def _usual(target: FuzzTarget) -> fuzz_proto.UsualValues:
    unit = st.floats(0, 1)
    token = st.integers(0, 255)
    return {
        "model": st.sampled_from(["", target.model]),
        "ids": token,
        "token_ids": token,
        "stop_token_ids": token,
        "logit_bias": token,
        "max_tokens": st.integers(1, 8),
        "min_tokens": st.integers(0, 1),
        "n": st.integers(1, 3),
        "first_choice": st.integers(0, 9),
        "logprobs": st.integers(0, 5),
        "priority": st.just(0),
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "temperature": unit,
        "min_p": unit,
        "top_p": st.floats(0.1, 1),
        "top_k": st.integers(0, 50),
        "presence_penalty": unit,
        "frequency_penalty": unit,
        "repetition_penalty": st.floats(0.5, 2),
        "node": st.sampled_from([*SPARE_NODES, "nobody"]),
        "interval_seconds": st.sampled_from([0.0, 0.1]),
        "spec": st.sampled_from(["", "step=sleep(1)"]),
    }
