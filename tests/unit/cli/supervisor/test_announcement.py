"""What `baton up` prints once it serves: the suggested command must work."""

import json
import re
from typing import Literal

import pytest

from baton.cli.supervisor.ports import Endpoints
from baton.cli.supervisor.run_cluster import ready_announcement
from baton.config.settings import Config
from coordinator.frontend.http.schema.body_decoder import BodyDecoder
from coordinator.frontend.http.schema.generation_requests import CompletionRequest

ENDPOINTS = Endpoints(
    http="127.0.0.1:1", grpc="127.0.0.1:2", admin="127.0.0.1:3", cluster="127.0.0.1:4"
)


@pytest.mark.parametrize(("engine", "kind"), [("model", str), ("paced", list)])
def test_the_body_to_try_is_one_that_the_engine_can_answer(
    engine: Literal["model", "paced"], kind: type
) -> None:
    text = ready_announcement(
        Config(model="" if engine == "paced" else "/models/small", engine=engine), ENDPOINTS
    )
    body = re.search(r"-d '(.*)'$", text)
    assert body is not None
    assert isinstance(BodyDecoder(CompletionRequest).decode_inline(body[1].encode()).prompt, kind)
    assert json.loads(body[1])["stream"] is True
    assert ("paced, " if engine == "paced" else "small, ") in text


def test_announcement_names_the_key_variable_not_the_key() -> None:
    text = ready_announcement(Config(api_key="s3cret"), ENDPOINTS)
    assert "$BATON_API_KEY" in text
    assert "s3cret" not in text
