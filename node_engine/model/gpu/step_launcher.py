"""Launches steps on a GPU: as graphs where there are some, without waiting for their results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kv_kernels.reference.paged_attention import PagedCache
from node_engine.core.step.step_batch import StepBatch
from node_engine.model.gpu.decode_graphs import DecodeGraphs, capture_decode_graphs
from node_engine.model.gpu.draws import StepOutput, draw_tokens
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.launch_mark import LaunchMark
from node_engine.model.gpu.layer_graphs import BucketedLayerGraphs, capture_layer_graphs
from node_engine.model.gpu.run_ahead import is_decode_slice
from node_engine.model.gpu.step_inputs import (
    DeviceInputs,
    StepInputs,
    StepInputsBuilder,
    resolve_source_rows,
)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the GPU computes."""

    inputs: StepInputs
    logits: torch.Tensor | None  # [draws, vocab], valid until the next launch; None without draws
    hidden: torch.Tensor | None  # [rows, hidden], if a prompt is scored
    _tokens: torch.Tensor  # int64 [draws], in host memory, valid until the launch after the next
    _end: LaunchMark

    @property
    def draw_by_slice(self) -> Mapping[int, int]:
        """The draw of each slice of the batch that has one, by their index."""
        return {index: draw for draw, index in enumerate(self.inputs.drawn_slice_indices)}

    def read_tokens(self) -> list[int]:
        """Wait for the step; the token of each draw, -1 where the logits are not finite."""
        self._end.wait()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class StepLauncher:
    """Launches the steps of one model and cache. Compute thread only.

    `decode_graphs` and `layer_graphs` are used once they are set.
    """

    def __init__(
        self, model: FusedTransformer, cache: PagedCache, builder: StepInputsBuilder
    ) -> None:
        self._model = model
        self._cache = cache
        self._builder = builder
        self._device = cache.arena.device
        self.decode_graphs: DecodeGraphs | None = None
        self.layer_graphs: BucketedLayerGraphs | None = None
        self._last_tokens = torch.zeros(0, dtype=torch.int64)  # of the last launch, by draw
        self._host_tokens = [self._last_tokens] * 2  # used in turn

    def capture_graphs(
        self,
        max_rows: int,
        max_table_entries: int,
        max_tokens: int,
        is_wanted: Callable[[], bool],
    ) -> None:
        """Capture steps of up to `max_rows` decode slices or `max_tokens` tokens.

        Stops when `is_wanted` returns False. What cannot be captured is launched kernel by kernel.
        Raises torch.AcceleratorError if the GPU has failed.
        """
        self.decode_graphs = capture_decode_graphs(
            self._model, self._cache, max_rows, max_table_entries, is_wanted
        )
        if is_wanted():
            self.layer_graphs = capture_layer_graphs(
                self._model, self._cache, max_tokens, is_wanted
            )

    def launch(
        self,
        batch: StepBatch,
        *,
        continues: bool = False,
        on_written: Callable[[int], None] | None = None,
    ) -> LaunchedStep:
        """Queue a step.

        With `continues`, a negative token -1 - n is the one that draw n of the step launched before
        samples. `on_written` is called for each layer when the launches that write its KV are
        queued. Raises ValueError as StepInputsBuilder.build_inputs does.
        """
        last_tokens = self._last_tokens if continues else None
        graphs, bucket = self.decode_graphs, self._find_decode_bucket(batch)
        if graphs is not None and bucket is not None and on_written is None:
            inputs = self._builder.build_inputs(batch, bucket)
            if graphs.fits(inputs):
                return self._end_launch(inputs, graphs.replay(bucket, inputs, last_tokens), None)
        bucket = self._find_token_bucket(batch)
        inputs = self._builder.build_inputs(batch, tokens=bucket)
        device_inputs = DeviceInputs.unpack(self._copy_to_device(inputs), inputs.shape)
        if last_tokens is not None:
            resolve_source_rows(device_inputs.token_ids, last_tokens)
        layer_graphs = None
        if self.layer_graphs is not None and bucket is not None:
            layer_graphs = self.layer_graphs.get_graphs(bucket)
        hidden = self._model.forward(device_inputs, self._cache, on_written, layer_graphs)
        return self._end_launch(inputs, self._draw(hidden, device_inputs), hidden)

    def _find_decode_bucket(self, batch: StepBatch) -> int | None:
        """The graph that computes this step; None if it has more than decode slices."""
        if self.decode_graphs is None or not all(map(is_decode_slice, batch.slices)):
            return None
        return self.decode_graphs.find_bucket(len(batch.slices))

    def _find_token_bucket(self, batch: StepBatch) -> int | None:
        """The layer graphs that compute this step; None if none do.

        A scored prompt needs all of its rows beyond the last layer, without padding.
        """
        is_scored = any(slice_.logprobs_spec is not None for slice_ in batch.slices)
        if self.layer_graphs is None or is_scored:
            return None
        return self.layer_graphs.find_bucket(batch.num_tokens)

    def _copy_to_device(self, inputs: StepInputs) -> torch.Tensor:
        words = torch.from_numpy(inputs.words)
        if self._device.type == "cpu":  # Triton's interpreter
            return words
        return words.pin_memory().to(self._device, non_blocking=True)

    def _draw(self, hidden: torch.Tensor | None, inputs: DeviceInputs) -> StepOutput | None:
        if hidden is None or not inputs.shape.draws:
            return None
        if inputs.shape.draws != inputs.shape.sampled_rows:  # all rows are scored
            hidden = hidden.index_select(0, inputs.drawn_rows)
        return draw_tokens(self._model, hidden, inputs.sampling)

    def _end_launch(
        self, inputs: StepInputs, output: StepOutput | None, hidden: torch.Tensor | None
    ) -> LaunchedStep:
        """Queue the copies of the drawn tokens: for the next step, and to the host."""
        draws = 0 if output is None else len(output.tokens)
        if draws > len(self._last_tokens):
            self._grow_tokens(draws)
        self._host_tokens.reverse()
        tokens = self._host_tokens[0][:draws]
        if output is not None:
            self._last_tokens[:draws].copy_(output.tokens)
            tokens.copy_(output.tokens, non_blocking=True)
        end = LaunchMark(self._device)
        end.record()
        logits = None if output is None else output.logits
        return LaunchedStep(inputs, logits, hidden if inputs.scored_rows else None, tokens, end)

    def _grow_tokens(self, draws: int) -> None:
        """Make room for more draws. Steps that are launched already keep their tokens."""
        pinned = self._device.type == "cuda"
        self._last_tokens = torch.zeros(draws, dtype=torch.int64, device=self._device)
        self._host_tokens = [
            torch.zeros(draws, dtype=torch.int64, pin_memory=pinned) for _ in range(2)
        ]
