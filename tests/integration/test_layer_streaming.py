"""The headline: a layer's KV lands in decode's cache while prefill still computes the next one.

A failpoint makes prefill wait, after each layer, until that layer has landed. A transfer of whole prompts would never
get past the first layer; here every transport completes, and decode computes no prompt token.
"""

from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster
from tests.models import build_model, reference_generate

PROMPT = [(37 * position + 11) % 500 for position in range(512)]
LAYERS = 24
OUTPUT = 48


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("narrow", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("transport", ["shm", "zmq", "grpc"])
async def test_each_layer_lands_before_the_next_is_computed(transport: str, narrow: Path, tmp_path: Path) -> None:
    cluster = Cluster(
        tmp_path,
        model=str(narrow),
        transport=transport,
        max_batched_tokens=512,
        layers_per_message=1,
        kv_memory="64MiB",
        per_node={"prefill-0": {"BATON_FAILPOINTS": "prefill.layer.landed=delay(30)"}},
    )
    async with cluster:
        # Enough tokens for the report of the hand-off to be there before the last of them.
        answer = await cluster.generate(PROMPT, max_tokens=OUTPUT, temperature=0.0)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{cluster.admin}/metrics")).text
        await cluster.wait_quiet()
    cluster.assert_clean()
    reference = reference_generate(narrow, PROMPT, OUTPUT)
    assert reference.margin > 1e-3
    assert answer.tokens == reference.tokens
    report = answer.timeline.handoff
    assert (report.transport, report.slabs) == (transport, LAYERS * len(PROMPT) // 16)
    assert report.slabs_landed_before_last_layer >= report.slabs * (LAYERS - 1) // LAYERS
    assert answer.timeline.attempts == 1
    assert _metric(metrics, 'baton_prompt_tokens_total{source="computed_decode"}') == 0
    assert _metric(metrics, 'baton_prompt_tokens_total{source="computed_prefill"}') == len(PROMPT)


def _metric(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return float(line.split()[-1])
