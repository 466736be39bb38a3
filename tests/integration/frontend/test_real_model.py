"""HTTP and gRPC on a real cluster with a real model: the answers are those of the model."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc.aio
import httpx2
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from baton.pb import generation_pb2 as pb
from baton.pb.generation_pb2_grpc import GenerationStub
from offline.batch import __main__ as run_batch
from offline.llm import LLM
from tests.cluster import Cluster
from tests.models import (
    EOS_TOKEN,
    MIN_LOGIT_MARGIN,
    build_model,
    generate_reference,
    load_reference_model,
)
from tests.unit.offline.batch_files import read_lines, write_lines
from tests.unit.offline.output_comparisons import assert_same_output, generate_everything

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PROMPT = "The quick brown fox waits for the baton while the decode node writes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_model("llama", tmp_path_factory.mktemp("models"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    settings: dict[str, Any] = {"dtype": "float32", "transport": "shm", "threads": "1"}
    made = Cluster(tmp_path_factory.mktemp("front"), model=str(model), **settings)
    async with made:
        yield made
        await made.wait_idle()
    made.assert_clean()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=60) as client:
        yield client


async def post_request(
    http: httpx2.AsyncClient, path: str = "/v1/completions", **fields: object
) -> Any:
    response = await http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(http: httpx2.AsyncClient, **fields: object) -> tuple[str, list[int], str, Any]:
    """Text, tokens, finish reason and usage."""
    options = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/completions", json=fields | options)
    *parts, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]", response.text
    *told, last = map(json.loads, parts)
    choices = [part["choices"][0] for part in told]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return (
        "".join(choice["text"] for choice in choices),
        tokens,
        choices[-1]["finish_reason"],
        last["usage"],
    )


async def test_choices_equal_separate_requests(http: httpx2.AsyncClient) -> None:
    fields: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "seed": 11,
        "temperature": 1.0,
        "return_token_ids": True,
    }
    together = (await post_request(http, n=4, **fields))["choices"]
    alone = await asyncio.gather(
        *(post_request(http, first_choice=number, **fields) for number in range(4))
    )
    assert [choice["token_ids"] for choice in together] == [
        answer["choices"][0]["token_ids"] for answer in alone
    ]
    assert len({tuple(choice["token_ids"]) for choice in together}) > 1
    greedy = (await post_request(http, n=4, **fields | {"temperature": 0}))["choices"]
    assert len({choice["text"] for choice in greedy}) == 1


async def test_echoed_logprobs_equal_the_models(http: httpx2.AsyncClient, model: Path) -> None:
    tokenizer, reference = (
        Tokenizer.from_file(str(model / "tokenizer.json")),
        load_reference_model(model),
    )
    prompts = [tokenizer.encode(text).ids for text in (PROMPT, "def handoff(blocks): return")]
    fields: dict[str, Any] = {
        "prompt": prompts,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    answer = await post_request(http, **fields)
    apart = fields | {"echo": False, "logprobs": None, "prompt_logprobs": 1}
    again = await post_request(http, **apart)  # now the caches have the prompts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for ids, choice, scored in zip(prompts, answer["choices"], again["choices"], strict=True):
        with torch.inference_mode():
            scores = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), dim=-1)
        told = choice["logprobs"]
        expected = [float(scores[place, token]) for place, token in enumerate(ids[1:])]
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        best = [max(top.values()) for top in told["top_logprobs"][1:]]
        assert best == pytest.approx(scores.max(dim=-1).values.tolist(), abs=1e-4)
        assert told["token_logprobs"][-1] == best[-1]
        entries = scored["prompt_logprobs"][1:]
        own = [entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)]
        assert own == pytest.approx(expected, abs=1e-4)
        ranked = [max(each["logprob"] for each in entry.values()) for entry in entries]
        assert ranked == pytest.approx(best[:-1], abs=1e-4)
        assert choice["text"].startswith(tokenizer.decode(ids))


async def test_output_logprobs_equal_the_models(
    http: httpx2.AsyncClient, cluster: Cluster, model: Path
) -> None:
    """Of every token of every choice, over each front door, though they were drawn with penalties
    and temperature."""
    reference = load_reference_model(model)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(PROMPT).ids
    drawn: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 1.4,
        "seed": 3,
        "n": 3,
        "frequency_penalty": 1.0,
    }

    def expected(tokens: list[int]) -> tuple[list[float], list[list[float]]]:
        """The log probability of each token, and those of the two best in its place."""
        with torch.inference_mode():
            scores = torch.log_softmax(
                reference(torch.tensor([ids + tokens])).logits[0].double(), dim=-1
            )
        rows = scores[len(ids) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)], rows.topk(
            2
        ).values.tolist()

    answer = await post_request(http, prompt=ids, logprobs=2, return_token_ids=True, **drawn)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        told = choice["logprobs"]
        exact, best = expected(choice["token_ids"])
        assert told["token_logprobs"] == pytest.approx(exact, abs=1e-4)
        assert [sorted(top.values())[-2:] for top in told["top_logprobs"]] == [
            pytest.approx(sorted(two), abs=1e-4) for two in best
        ]
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
        first = await GenerationStub(channel).GenerateOnce(
            pb.GenerateRequest(text=PROMPT, logprobs=2, **drawn)
        )
    for one, choice in zip([first, *first.others], answer["choices"], strict=True):
        assert list(one.token_ids) == choice["token_ids"]
        exact, best = expected(list(one.token_ids))
        assert [score.logprob for score in one.scores] == pytest.approx(exact, abs=1e-4)
        assert [list(score.top_logprobs) for score in one.scores] == [
            pytest.approx(two, abs=1e-4) for two in best
        ]
    talk = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2}
    chat = await post_request(http, "/v1/chat/completions", return_token_ids=True, **talk, **drawn)
    ids = (await post_request(http, "/tokenize", messages=talk["messages"]))["tokens"]
    for choice in chat["choices"]:
        exact, best = expected(choice["token_ids"])
        content = choice["logprobs"]["content"]
        assert [token["logprob"] for token in content] == pytest.approx(exact, abs=1e-4)
        tops = [[top["logprob"] for top in token["top_logprobs"]] for token in content]
        assert tops == [pytest.approx(two, abs=1e-4) for two in best]


async def test_explain_covers_all_choices(http: httpx2.AsyncClient, cluster: Cluster) -> None:
    fields: dict[str, Any] = {
        "prompt": [PROMPT, "another one"],
        "n": 2,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    response = await http.post("/v1/completions", json=fields)
    async with httpx2.AsyncClient(base_url=cluster.admin_url) as admin:
        told = (await admin.get(f"/admin/explain/{response.headers['x-baton-request-id']}")).json()
    everyone = [told, *told["others"]]
    assert [(one["state"], one["output_tokens"]) for one in everyone] == [("finished", 4)] * 4
    assert [one["attempts"][0]["prefill_node"] for one in everyone] == [
        "prefill-0",
        "",
        "prefill-0",
        "",
    ]


async def test_explain_finds_a_request_by_each_of_its_ids(
    http: httpx2.AsyncClient, cluster: Cluster
) -> None:
    """The header, the body's id and the client's own id; of several requests with one such id,
    which they are."""
    messages = [{"role": "user", "content": PROMPT}]
    mine = {"x-request-id": "orders/66"}
    done = await http.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=mine
    )
    chat = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    async with httpx2.AsyncClient(base_url=cluster.admin_url) as admin:

        async def explained(name: str) -> str:
            answer = await admin.get(f"/admin/explain/{quote(name, safe='')}")
            assert answer.status_code == 200, answer.text
            return str(answer.json()["request_id"])

        own = done.headers["x-baton-request-id"]
        assert [await explained(name) for name in (own, done.json()["id"], "orders/66")] == [
            own
        ] * 3
        assert await explained(chat.json()["id"]) == chat.headers["x-baton-request-id"]
        again = await http.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=mine
        )
        several = await admin.get("/admin/explain/orders%2F66")
        assert several.status_code == 400
        assert own in several.text
        assert again.headers["x-baton-request-id"] in several.text
        shadow = {"x-request-id": own}
        assert (
            await http.post(
                "/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=shadow
            )
        ).is_success
        assert await explained(own) == own, "a client's id never stands for another request's own"


async def test_short_streams_equal_whole_answers(http: httpx2.AsyncClient) -> None:
    for most in (1, 2, 3):
        fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": most, "temperature": 0}
        answer = await post_request(http, return_token_ids=True, **fields)
        choice = answer["choices"][0]
        text, tokens, reason, usage = await streamed(http, **fields)
        assert (text, tokens, reason) == (
            choice["text"],
            choice["token_ids"],
            choice["finish_reason"],
        )
        assert (
            usage["completion_tokens"]
            == answer["usage"]["completion_tokens"]
            == len(tokens)
            <= most
        )


async def test_stop_strings_cut_the_text(http: httpx2.AsyncClient, cluster: Cluster) -> None:
    """Cut out of what comes without them; the request counts as one that ended well."""
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = (await post_request(http, **fields))["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    before = (await cluster.get_status()).counters
    answer = await post_request(http, stop=[stop, "never said"], return_token_ids=True, **fields)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert answer["usage"]["completion_tokens"] < 24
    shown, tokens, reason, usage = await streamed(http, stop=stop, **fields)
    assert (shown, tokens, reason) == (choice["text"], choice["token_ids"], "stop")
    assert usage["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    after = (await cluster.get_status()).counters
    ended = {
        name: int(after[name] - before.get(name, 0))
        for name in after
        if "baton_requests_total" in name
    }
    (outcome,) = ((name, count) for name, count in ended.items() if count)
    assert outcome[1] == 2
    assert "stop" in outcome[0]


async def test_chat_equals_completion_of_the_rendered_prompt(
    http: httpx2.AsyncClient, cluster: Cluster
) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    rendered = f"system: Be brief.\nuser: {PROMPT}\nassistant:"
    chat = await post_request(
        http, "/v1/chat/completions", messages=talk, max_tokens=5, temperature=0
    )
    plain = await post_request(http, prompt=rendered, max_tokens=5, temperature=0)
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    tokens = (await post_request(http, "/tokenize", messages=talk))["tokens"]
    assert tokens == (await post_request(http, "/tokenize", prompt=rendered))["tokens"]
    assert (await post_request(http, "/detokenize", tokens=tokens))["prompt"] == rendered
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
        once = await GenerationStub(channel).GenerateOnce(
            pb.GenerateRequest(chat={"messages": talk}, max_tokens=5, temperature=0.0)
        )
    assert once.text == plain["choices"][0]["text"]


async def test_first_token_may_be_a_stop_token(http: httpx2.AsyncClient, model: Path) -> None:
    """A stop token is one that its client does not see the text of; what ends at once has no
    text."""
    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(EOS_TOKEN)
    fields: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "logit_bias": {str(end): 100},
        "stop_token_ids": [end],
    }
    answer = await post_request(http, return_token_ids=True, **fields)
    choice = answer["choices"][0]
    text, tokens, reason, usage = await streamed(http, **fields)
    assert (
        (text, tokens, reason)
        == (choice["text"], choice["token_ids"], choice["finish_reason"])
        == ("", [end], "stop")
    )
    assert usage["completion_tokens"] == answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
async def test_64_bit_seeds_mean_the_same_over_http_and_grpc(
    http: httpx2.AsyncClient, cluster: Cluster, seed: int
) -> None:
    drawn: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": seed}
    (choice,) = (await post_request(http, prompt=PROMPT, return_token_ids=True, **drawn))["choices"]
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
        stub = GenerationStub(channel)
        once = await stub.GenerateOnce(pb.GenerateRequest(text=PROMPT, **drawn))
        other = await stub.GenerateOnce(pb.GenerateRequest(text=PROMPT, **drawn | {"seed": 1}))
    assert list(once.token_ids) == choice["token_ids"] != list(other.token_ids)


async def test_python_api_equals_the_cluster_and_transformers(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"dtype": "float32", "threads": "1", "kv_memory": "8MiB"}
    with LLM(cluster.http_url) as remote, LLM(str(model), segment_dir=str(tmp_path), **own) as llm:
        served = await asyncio.to_thread(generate_everything, remote, PROMPT)
        local = await asyncio.to_thread(generate_everything, llm, PROMPT)
    assert [len(output.outputs) for output in served] == [1, 2, 1, 1, 1, 2, 1]
    assert re.fullmatch("(fox|dog)( [a-z]{2}){2}", local[3].outputs[0].text)
    for one, other in zip(served, local, strict=True):
        assert_same_output(one, other)
    reference = generate_reference(load_reference_model(model), served[0].prompt_token_ids, 12)
    assert tuple(local[0].outputs[0].token_ids) == tuple(reference.tokens)
    assert reference.min_logit_margin > MIN_LOGIT_MARGIN


async def test_a_batch_has_the_answers_of_http(
    cluster: Cluster, http: httpx2.AsyncClient, tmp_path: Path
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, "seed": 3},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "fox"}], "seed": 3},
    }
    lines: list[dict[str, Any]] = [
        {"custom_id": url, "method": "POST", "url": url, "body": body | {"max_tokens": 5}}
        for url, body in bodies.items()
    ]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [str(source), str(target), "--url", f"{cluster.http_url}/v1"]
    assert await asyncio.to_thread(run_batch.main, command) == 0
    answers = {line["custom_id"]: line["response"]["body"] for line in read_lines(target)}
    for line in lines:
        expected = await post_request(http, line["url"], **line["body"])
        assert answers[line["url"]]["choices"] == expected["choices"]
