"""A front end whose backend ends every generation at once."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.integration.frontend.frontend_harness import (
    FrontendHarness,
    finished_event,
    running_frontend,
)
from tests.small_tokenizers import chat_tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    async with running_frontend(text=chat_tokenizer()) as running:
        running.backend.script = lambda generation: generation.emit_events(finished_event())
        yield running
