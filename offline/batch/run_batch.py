"""Answers the requests of a file, each exactly once, also if the batch is killed and run again."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError, DeadlineExceeded
from offline.batch.answer_writer import AnswerWriter, WrittenAnswer
from offline.batch.batch_input import BatchInput
from offline.batch.batch_lines import (
    BadLine,
    BatchRequest,
    count_tokens,
    encode_answer,
    encode_error,
)
from offline.batch.batch_output import BatchOutput
from offline.endpoint import Endpoint


@dataclass(slots=True)
class BatchCounts:
    """What became of the requests of a batch, in all of its runs."""

    num_requests: int  # in the whole input
    answered_before: int = 0  # by earlier runs
    answered: int = 0  # by this one, and on the disk
    failed: int = 0  # of both, bad lines and answers with another status than 200


def open_batch(source: Path, target: Path) -> tuple[BatchInput, BatchOutput, BatchCounts]:
    """Open both files and mark what is answered already. Raises ConfigError."""
    if os.path.exists(source) and os.path.exists(target) and source.samefile(target):
        raise ConfigError(f"{source} is the input and the output: give two files")
    requests = BatchInput(source)
    output = BatchOutput(target)
    counts = BatchCounts(requests.num_requests)
    try:
        for number, key in output.read_answers():
            line = key.error.line if key.error is not None else None
            before = requests.mark_answered(key.custom_id, line)
            if before is None:
                raise ConfigError(
                    f"{target} line {number} answers custom_id {key.custom_id!r}, which {source}"
                    " does not have: give another file for the output"
                )
            if before:
                raise ConfigError(
                    f"{target} line {number} answers custom_id {key.custom_id!r} again: remove it"
                )
            counts.answered_before += 1
            counts.failed += key.is_failure
    except BaseException:
        output.close()
        raise
    return requests, output, counts


async def answer_requests(
    requests: BatchInput,
    output: BatchOutput,
    endpoint: Endpoint,
    counts: BatchCounts,
    max_in_flight: int,
    advance: Callable[[int], None],
) -> None:
    """Answer what is not answered yet; `advance` is called with the tokens of each answer.

    Answers are counted once the disk has them. One that was not written when this ends is asked
    for again in the next run. Raises EndpointUnavailable, OutputFailed, and NodeFailed if the
    engine in this process has failed.
    """
    waiting = requests.iter_unanswered()

    def count_answer(answer: WrittenAnswer) -> None:
        counts.answered += 1
        counts.failed += answer.is_failure
        advance(answer.num_tokens)

    writer = AnswerWriter(output, count_answer)

    async def work() -> None:
        for request in waiting:  # each worker takes the next one
            await writer.append(*await _answer_request(request, endpoint))

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            workers = [tasks.create_task(work()) for _ in range(max_in_flight)]
            await asyncio.wait(workers)
            writer.finish()
    except ExceptionGroup as group:  # the first error has ended the other tasks
        raise group.exceptions[0] from None


async def _answer_request(
    request: BatchRequest | BadLine, endpoint: Endpoint
) -> tuple[bytes, WrittenAnswer]:
    """Return the line of the answer. Raises EndpointUnavailable and NodeFailed."""
    failure = WrittenAnswer(0, is_failure=True)
    if isinstance(request, BadLine):
        return encode_error(request.number, request.custom_id, request), failure
    try:
        answer = await endpoint.post(request.path, request.body)
    except DeadlineExceeded as error:
        return encode_error(request.number, request.custom_id, error), failure
    written = WrittenAnswer(count_tokens(answer), is_failure=answer.status != 200)
    return encode_answer(request, answer), written
