"""Structured output on real clusters: forms, ends, choices, clients, and public schemas.

Of the outputs of a random model under the schemas of a public test suite, every one that ends with
`stop` satisfies its schema, and every one that max_tokens cuts begins one that does: over every
transport, and when a decode node is killed in mid-object.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import jsonschema
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from baton.pb import generation_pb2 as pb
from baton.types import STAGED_TRANSPORTS
from tests.cluster import Cluster
from tests.cluster_metrics import read_metric
from tests.models import build_model
from tests.soak.conftest import Figures, figures
from tests.structured.public_schemas import (
    PublicSchema,
    check_complete_output,
    closing_biases,
    draw_schemas,
    is_prefix,
    load_tokenizer,
)

__all__ = ["figures"]
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")
_CONCURRENT_REQUESTS = 8
_MAX_TOKENS = 160
_CLOSING_BIAS = 8.0
_MIN_STOPPED_SHARE = 0.9
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "kind", "size"],
    "additionalProperties": False,
}
_LONG = PublicSchema(
    "long",
    {
        "type": "object",
        "properties": {
            "values": {
                "type": "array",
                "items": {"enum": [True, False]},
                "minItems": 300,
                "maxItems": 310,
            },
            "name": {"enum": ["first", "second"]},
        },
        "required": ["values", "name"],
        "additionalProperties": False,
    },
)


@dataclass
class Stage:
    """A cluster of one prefill and two decode nodes, and its tokenizer."""

    cluster: Cluster
    http: httpx2.AsyncClient
    tokenizer_file: Path

    async def complete(self, schema: PublicSchema, seed: int, **fields: Any) -> httpx2.Response:
        body = {
            "prompt": f"answer {seed}",
            "max_tokens": _MAX_TOKENS,
            "seed": seed,
            "return_token_ids": True,
            "structured_outputs": {"json": schema.schema},
        }
        return await self.http.post("/v1/completions", json=body | fields)

    async def chat(self, **fields: Any) -> Any:
        """The only choice of a conversation."""
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
        response = await self.http.post("/v1/chat/completions", json=body | fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def check_output(self, schema: PublicSchema, choice: Any) -> bool:
        """Check one output; returns whether it ended by itself."""
        if choice["finish_reason"] == "stop":
            check_complete_output(schema, choice["text"])
            return True
        assert choice["finish_reason"] == "length"
        tokenizer = load_tokenizer(self.tokenizer_file)
        assert is_prefix(schema, tokenizer, choice["token_ids"]), (schema.name, choice["text"])
        return False


def list_transports() -> list[Any]:
    """Shared memory, and with --every-fault the others."""
    return [
        name if name == "shm" else pytest.param(name, marks=pytest.mark.thorough)
        for name in STAGED_TRANSPORTS
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list_transports())
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    model = build_model("llama", tmp_path_factory.mktemp("models"), eos_token_id=0)
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    cluster = Cluster(
        tmp_path_factory.mktemp("structured"),
        model=str(model),
        dtype="float32",
        transport=request.param,
        threads="1",
        decode=2,
        kv_memory="2MiB",  # the least: for 8192 tokens
    )
    async with cluster:
        async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=100) as http:
            yield Stage(cluster, http, model / "tokenizer.json")
        await cluster.wait_idle()
    cluster.assert_clean()


async def test_outputs_obey_public_schemas(
    stage: Stage, pytestconfig: pytest.Config, figures: Figures
) -> None:
    wanted = pytestconfig.getoption("--structured-generations")
    biases = closing_biases(stage.tokenizer_file, _CLOSING_BIAS)
    gate = asyncio.Semaphore(_CONCURRENT_REQUESTS)
    ends: list[bool] = []
    refused: list[str] = []

    async def generate(schema: PublicSchema, seed: int) -> None:
        async with gate:
            if len(ends) >= wanted:
                return
            response = await stage.complete(schema, seed, logit_bias=biases)
            if response.status_code == 400:
                error = response.json()["error"]
                assert error["param"] == "structured_outputs", error
                refused.append(error["message"])
                return
            assert response.status_code == 200, (schema.name, response.text)
            ends.append(stage.check_output(schema, response.json()["choices"][0]))

    for round_number in range(1 + wanted // 100):
        schemas = draw_schemas(round_number)
        await asyncio.gather(
            *(generate(each, 1000 * round_number + seed) for seed, each in enumerate(schemas))
        )
    transport = stage.cluster.config.transport
    ended = f"{sum(ends)} of {len(ends)} ended, {len(refused)} schemas refused"
    figures.append((f"structured, {transport}", "outputs", ended))
    assert len(ends) >= wanted
    assert sum(ends) >= _MIN_STOPPED_SHARE * len(ends), f"{sum(ends)} of {len(ends)} ended"
    assert all(message.startswith("structured_outputs: ") for message in refused), refused


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_json_schema_is_obeyed(stage: Stage, seed: int) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice = await stage.chat(response_format=format_, seed=seed)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


async def test_the_openai_client_parses_its_own_types(stage: Stage) -> None:
    class Place(BaseModel):
        kind: Literal["city", "river"]
        inhabitants: int | None

    class Places(BaseModel):
        first: Place
        others: Annotated[list[Place], Field(max_length=1)]

    async with openai.AsyncOpenAI(
        base_url=f"{stage.cluster.http_url}/v1", api_key="none"
    ) as client:
        completion = await client.chat.completions.parse(
            model=stage.cluster.config.public_model_name,
            messages=[{"role": "user", "content": "hello"}],
            response_format=Places,
            max_tokens=400,
            seed=1,
        )
    assert isinstance(completion.choices[0].message.parsed, Places)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_first_token_and_the_last_obey_the_grammar(
    stage: Stage, temperature: float
) -> None:
    """The first is sampled on prefill, and no end token is needed after the last."""
    for pattern, tokens in (("[xyz]", 1), ("[xyz][0-9]{3}", 4)):
        choice = await stage.chat(
            structured_outputs={"regex": pattern},
            temperature=temperature,
            max_tokens=tokens,
            n=1,
        )
        assert re.fullmatch(pattern, choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


async def test_each_choice_obeys_the_grammar_and_streams_are_equal(
    stage: Stage,
) -> None:
    body = {
        "prompt": "hello",
        "n": 3,
        "seed": 5,
        "max_tokens": 30,
        "structured_outputs": {"choice": ["yes", "no", "perhaps not"]},
    }
    whole = (await stage.http.post("/v1/completions", json=body)).json()["choices"]
    texts = [choice["text"] for choice in whole]
    assert set(texts) <= {"yes", "no", "perhaps not"}
    told = (await stage.http.post("/v1/completions", json=body | {"stream": True})).text
    streamed = ["", "", ""]
    for line in told.split("\n\n"):
        if line and not line.endswith("[DONE]"):
            (part,) = json.loads(line.removeprefix("data: "))["choices"]
            streamed[part["index"]] += part["text"]
    assert streamed == texts


async def test_ends_give_way_to_the_grammar(stage: Stage) -> None:
    for fields in ({"min_tokens": 20}, {"ignore_eos": True}, {"logit_bias": {"0": -100}}):
        choice = await stage.chat(structured_outputs={"regex": "ab?"}, **fields)
        assert choice["message"]["content"] in ("a", "ab")
        assert choice["finish_reason"] == "stop"


async def test_explain_has_the_time_of_the_grammar(stage: Stage) -> None:
    grammar = pb.StructuredOutput(regex="explained")
    answer = await stage.cluster.generate("hello", structured_output=grammar, max_tokens=20)
    assert answer.text == "explained"
    assert answer.timeline.grammar > 0
    plain = await stage.cluster.generate("hello", max_tokens=2)
    assert plain.timeline.grammar == 0


async def write_long_output(stage: Stage, number: int, begun: asyncio.Event) -> str:
    """Return the text of a long output; `begun` is set in the middle of it."""
    grammar = pb.StructuredOutput(json=json.dumps(_LONG.schema), disable_any_whitespace=True)
    asked: dict[str, Any] = {"max_tokens": 1800, "seed": number, "structured_output": grammar}
    async with stage.cluster.stream_generate(f"answer {number}", **asked) as call:
        text = ""
        async for part in call:
            text += part.text
            if len(text) > len('{"values":['):
                begun.set()
    check_complete_output(_LONG, text)
    return text


@asynccontextmanager
async def long_outputs(stage: Stage, count: int) -> AsyncIterator[list[asyncio.Task[str]]]:
    """Outputs of 1200 tokens. Inside, all of them have begun and make slow progress."""
    cluster, events = stage.cluster, [asyncio.Event() for _ in range(count)]
    await cluster.arm_failpoints("decode", "decode.step.before=delay(0.1)")
    outputs = [
        asyncio.create_task(write_long_output(stage, number, begun))
        for number, begun in enumerate(events)
    ]
    for event in events:
        await event.wait()
    yield outputs
    await cluster.arm_failpoints("decode", "")


async def test_preempted_outputs_continue_their_objects(stage: Stage) -> None:
    """The cache is too small for all of them: the texts are those of outputs that run alone."""
    name = 'baton_replaced_total{reason="preempted"}'
    before = await read_metric(stage.cluster, name)
    async with long_outputs(stage, 16) as outputs:
        pass
    texts = await asyncio.gather(*outputs)
    assert await read_metric(stage.cluster, name) > before
    numbers = (0, 13, 14, 15)
    alone = [write_long_output(stage, number, asyncio.Event()) for number in numbers]
    assert await asyncio.gather(*alone) == [texts[number] for number in numbers]


async def test_decode_node_is_killed_in_mid_object(stage: Stage) -> None:
    """The state of the grammar is made again from the tokens that the client has."""
    cluster = stage.cluster
    name = 'baton_replaced_total{reason="node_gone"}'
    before = await read_metric(cluster, name)
    async with long_outputs(stage, 6) as outputs:
        status = await cluster.get_status()
        decode_nodes = [node for node in status.nodes if node.role == "decode"]
        victim = max(decode_nodes, key=lambda node: node.placed).name
        await asyncio.to_thread(cluster.kill, victim)
    await asyncio.gather(*outputs)
    assert await read_metric(cluster, name) > before, "no output was in progress there"
    cluster.start(victim)
    await cluster.wait_status(lambda status: len(status.nodes) == 3)
