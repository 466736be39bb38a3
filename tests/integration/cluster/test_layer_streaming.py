"""The headline: a layer's KV lands in decode's cache while prefill still computes the next one.

A failpoint makes prefill wait, after each layer, until that layer has landed. A transfer of whole
prompts would never get past the first layer; here every transport completes, and decode computes no
prompt token.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from baton.pb import cluster_pb2 as pb
from baton.pb.common_pb2 import HandoffReport
from tests.cluster import Cluster
from tests.grpc_calls import GenerateAnswer, call_cluster_service
from tests.models import build_model, generate_reference, load_reference_model

NODE_BY_TRANSPORT = {"shm": "decode-0", "zmq": "decode-1", "grpc": "decode-2"}
PROMPT_TOKENS = 512
LAYERS = 24
OUTPUT_TOKENS = 48


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("narrow", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(narrow: Path) -> PreTrainedModel:
    return load_reference_model(narrow)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(narrow: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One decode node for each transport."""
    own: dict[str, dict[str, object]] = {
        node: {"transport": transport} for transport, node in NODE_BY_TRANSPORT.items()
    }
    made = Cluster(
        tmp_path_factory.mktemp("streaming"),
        model=str(narrow),
        decode=len(NODE_BY_TRANSPORT),
        max_batched_tokens=PROMPT_TOKENS,
        layers_per_message=1,
        kv_memory="64MiB",
        per_node={"prefill-0": {"BATON_FAILPOINTS": "prefill.layer.landed=delay(30)"}, **own},
    )
    async with made:
        yield made
        await made.wait_idle()
    made.assert_clean()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("transport", NODE_BY_TRANSPORT)
async def test_each_layer_lands_before_the_next_is_computed(
    cluster: Cluster, reference: PreTrainedModel, transport: str
) -> None:
    first = 11 + list(NODE_BY_TRANSPORT).index(
        transport
    )  # another prompt for each: none of it is cached
    prompt = [(37 * position + first) % 500 for position in range(PROMPT_TOKENS)]
    for name in NODE_BY_TRANSPORT.values():
        order = (
            pb.UndrainRequest(node=name)
            if name == NODE_BY_TRANSPORT[transport]
            else pb.DrainRequest(node=name)
        )
        await call_cluster_service(
            cluster.grpc_address, type(order).__name__.removesuffix("Request"), order
        )
    before = await prompt_tokens_by_source(cluster)
    answer = await cluster.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0)
    expected = generate_reference(reference, prompt, OUTPUT_TOKENS)
    assert expected.min_logit_margin > 1e-3
    assert answer.tokens == expected.tokens
    report = await wait_handoff_report(cluster, answer)
    assert (report.transport, report.slabs) == (transport, LAYERS * PROMPT_TOKENS // 16)
    assert report.slabs_landed_before_last_layer >= report.slabs * (LAYERS - 1) // LAYERS
    assert answer.timeline.attempts == 1
    after = await prompt_tokens_by_source(cluster)
    assert (
        after["computed_decode"],
        after["computed_prefill"] - before.get("computed_prefill", 0),
    ) == (0, PROMPT_TOKENS)


async def wait_handoff_report(cluster: Cluster, answer: GenerateAnswer) -> HandoffReport:
    """What prefill has reported of it, which may come after the last token."""
    request = pb.ExplainRequest(request_id=answer.request_id)
    async with asyncio.timeout(60):
        while True:
            told: pb.ExplainResponse = await call_cluster_service(
                cluster.grpc_address, "Explain", request
            )
            if told.timeline.HasField("handoff"):
                return told.timeline.handoff
            await asyncio.sleep(0.05)


async def prompt_tokens_by_source(cluster: Cluster) -> dict[str, float]:
    """Prompt tokens by who computed them."""
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"{cluster.admin_url}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("baton_prompt_tokens_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}
