"""`LLM`: the Python API, with vLLM's names, in this process or over a cluster's URL."""

import asyncio
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from baton.errors import BatonError
from offline.endpoint import Endpoint
from offline.event_loop_thread import EventLoopThread
from offline.open_endpoint import DEFAULT_OPTIONS, EndpointOptions, open_endpoint
from offline.output_room import fill_max_tokens
from offline.outputs import PromptsFailed, RequestOutput
from offline.progress import show_progress
from offline.request_bodies import (
    Conversation,
    Prompt,
    PromptRequest,
    build_chat,
    build_completion,
    list_conversations,
    list_prompts,
)
from offline.sampling_params import SamplingParams, pair_with_prompts


class LLM:
    """Generates text with a model in this process, or with a cluster.

        from baton import LLM, SamplingParams

        with LLM("models/demo") as llm:
            for output in llm.generate(["def read("], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Thread-safe. `close`, or the end of a `with` block, ends its threads and frees its memory.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str = "",
        max_in_flight: int = DEFAULT_OPTIONS.max_in_flight,
        timeout: float = DEFAULT_OPTIONS.answer_seconds,
        retry_timeout: float = DEFAULT_OPTIONS.retry_seconds,
        **settings: Any,
    ) -> None:
        """`model` is a folder, a hub id, or the http:// or https:// URL of a cluster.

        At most `max_in_flight` prompts are generated at once. Of a cluster, each answer may take
        `timeout` seconds, and a refused request is tried again for `retry_timeout` seconds.
        `settings` are those of a node, such as dtype="float32" or kv_memory="4GiB", and the
        parsers of conversations, `tool_call_parser` and `reasoning_parser`.

        Raises ConfigError for a setting or a model that cannot be used, and EndpointUnavailable.
        """
        options = EndpointOptions(api_key, max_in_flight, timeout, retry_timeout)
        self._thread = EventLoopThread("baton-llm")
        try:
            self._endpoint = open_endpoint(self._thread, str(model), options, settings)
        except BaseException:
            self._thread.close()
            raise
        self._finalizer = weakref.finalize(self, _close_abandoned, self._thread, self._endpoint)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one or several prompts; the outputs have their order.

        A prompt is a text, token ids, or a dictionary with `prompt` or `prompt_token_ids`. Without
        `sampling_params` the model's own defaults apply. `use_tqdm` shows a progress bar.

        Raises InvalidRequest for arguments of the wrong form, before anything is generated, and
        PromptsFailed, which has all outputs, if some prompts got no answer.
        """
        listed = list_prompts(prompts)
        params = pair_with_prompts(sampling_params, len(listed))
        pairs = zip(listed, params, strict=True)
        requests = [build_completion(index, *pair) for index, pair in enumerate(pairs)]
        return self._run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, each a list of messages; see `generate`."""
        listed = list_conversations(messages)
        params = pair_with_prompts(sampling_params, len(listed))
        template: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            template["continue_final_message"] = True
        if tools is not None:
            template["tools"] = list(tools)
        if chat_template_kwargs is not None:
            template["chat_template_kwargs"] = dict(chat_template_kwargs)
        pairs = zip(listed, params, strict=True)
        requests = [build_chat(index, *pair, template) for index, pair in enumerate(pairs)]
        return self._run(requests, use_tqdm=use_tqdm)

    def close(self) -> None:
        """End the threads and free the memory. Idempotent; other calls fail afterwards.

        In a forked process this ends nothing: threads and files are of the parent.
        """
        if self._finalizer.detach() is not None:
            _close(self._thread, self._endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[PromptRequest], *, use_tqdm: bool) -> list[RequestOutput]:
        if not self._finalizer.alive:
            raise BatonError("this LLM is closed: make a new one")
        if not self._thread.is_of_this_process:
            raise BatonError(
                "this LLM is of the process that was forked: make one in each process, and start"
                " processes by spawn"
            )
        with show_progress(len(requests), "prompts", is_shown=use_tqdm) as advance:

            async def answer(request: PromptRequest) -> RequestOutput:
                output = await _answer_prompt(self._endpoint, request)
                advance(sum(len(each.token_ids) for each in output.outputs))
                return output

            async def answer_all() -> list[RequestOutput]:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(answer(each)) for each in requests]
                return [task.result() for task in tasks]

            outputs = self._thread.call(answer_all())
        if any(output.error is not None for output in outputs):
            raise PromptsFailed(outputs)
        return outputs


async def _answer_prompt(endpoint: Endpoint, request: PromptRequest) -> RequestOutput:
    try:
        request = await fill_max_tokens(endpoint, request)
        answer = await endpoint.post(request.path, request.encode_body())
    except BatonError as error:
        return request.make_failed_output("", error)
    if answer.error is not None:
        return request.make_failed_output(answer.request_id, answer.error)
    try:
        return request.parse_answer(answer.decode_body())
    except (LookupError, TypeError, ValueError) as error:
        missing = BatonError(
            f"the answer has another form ({error}): an LLM needs the token ids that a cluster of"
            " Baton returns"
        )
        return request.make_failed_output(answer.request_id, missing)


def _close(thread: EventLoopThread, endpoint: Endpoint) -> None:
    if not thread.is_of_this_process:
        return  # nothing there would answer
    try:
        thread.call(endpoint.close())
    finally:
        thread.close()


def _close_abandoned(thread: EventLoopThread, endpoint: Endpoint) -> None:
    """Close what belonged to an `LLM` that was collected, or is left when the program ends.

    Python may collect it on any thread, also on one that would have to wait for itself.
    """
    if threading.current_thread() is threading.main_thread() or not thread.is_of_this_process:
        _close(thread, endpoint)
    else:
        threading.Thread(target=_close, args=(thread, endpoint), name="baton-llm-close").start()
