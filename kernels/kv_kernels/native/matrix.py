"""Packed matrices: where their parts lie in one region of memory, and how it is filled."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_kernels.native.structures import Format, KvnLinear, KvnPack, Status

PANEL_CHANNELS = 16  # output channels that are computed together
_ALIGNMENT = 64  # bytes: a cache line
_STEP_INPUTS = {Format.FLOAT32: 1, Format.BFLOAT16: 2, Format.INT8: 4}
_COMPACT_BLOCK_INPUTS, _COMPACT_BLOCK_BYTES = 32, 768  # of a panel
_SOURCE_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


class IncompressibleWeightsError(ValueError):
    """The weights of a matrix have too many different exponents to be stored in 12 bits each."""


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """The region of one packed matrix: weights, then bias, scales and channel sums if it has them.

    A gated matrix joins two of `outputs` channels each, of which panels take turns.
    """

    inputs: int
    outputs: int
    format: Format
    is_gated: bool = False
    has_bias: bool = False

    @property
    def num_panels(self) -> int:
        return -(-self.outputs // PANEL_CHANNELS) * (2 if self.is_gated else 1)

    @property
    def weight_bytes(self) -> int:
        return self.num_panels * self.panel_bytes

    @property
    def panel_bytes(self) -> int:
        """Bytes of the weights of PANEL_CHANNELS output channels, which are stored together.

        COMPACT_BFLOAT16 puts a table of upper bytes in front of them: see src/compact_panel.h.
        """
        if self.format is Format.COMPACT_BFLOAT16:
            header = 64 * (1 + -(-self.inputs // 1024))
            return header + -(-self.inputs // _COMPACT_BLOCK_INPUTS) * _COMPACT_BLOCK_BYTES
        return -(-self.inputs // _STEP_INPUTS[self.format]) * 64

    @property
    def channel_bytes(self) -> int:
        """Bytes of an array with one 32-bit number for each output channel."""
        return self.num_panels * PANEL_CHANNELS * 4

    @property
    def nbytes(self) -> int:
        arrays = self.has_bias + 2 * (self.format is Format.INT8)
        return self.weight_bytes + arrays * self.channel_bytes

    def describe(self, address: int) -> KvnLinear:
        """The structure of the matrix whose region starts at `address`."""
        bias, scales, sums = self._find_arrays(address)
        return KvnLinear(
            address, bias, scales, sums, self.inputs, self.outputs, self.format, self.is_gated
        )

    def _find_arrays(self, address: int) -> tuple[int | None, int | None, int | None]:
        """Addresses of bias, scales and channel sums."""
        end, found = address + self.weight_bytes, list[int | None]()
        for is_there in (self.has_bias, *(2 * [self.format is Format.INT8])):
            found.append(end if is_there else None)
            end += self.channel_bytes * is_there
        bias, scales, sums = found
        return bias, scales, sums

    def pack(
        self,
        functions: ctypes.CDLL,
        region: memoryview,  # `nbytes` zeros, writable
        weights: Sequence[torch.Tensor],  # [outputs, inputs]; of a gated matrix, gate and up
        biases: Sequence[torch.Tensor] = (),  # [outputs], like `weights`
    ) -> None:
        """Write float32 or bfloat16 weights to `region`, in the layout that the kernels read.

        Raises IncompressibleWeightsError if the format is COMPACT_BFLOAT16 and cannot represent
        them exactly, MemoryError.
        """
        address = np.frombuffer(region, np.uint8).ctypes.data
        _, scales, sums = self._find_arrays(address)
        for number, weight in enumerate(weights):
            source = weight.contiguous()
            pack = KvnPack(
                source.data_ptr(),
                self.outputs,
                self.inputs,
                _SOURCE_FORMATS[source.dtype],
                self.format,
                number,
                len(weights),
                address,
                scales,
                sums,
            )
            status = functions.kvn_pack(ctypes.byref(pack))
            if status == Status.INCOMPRESSIBLE:
                raise IncompressibleWeightsError(
                    "a matrix has too many different exponents to be stored in 12 bits a weight"
                )
            if status == Status.OUT_OF_MEMORY:
                raise MemoryError("no memory to pack a matrix")
            if status != Status.OK:
                raise ValueError(f"a matrix of shape {tuple(weight.shape)} cannot be packed")
        if self.has_bias:
            array = np.frombuffer(region, np.float32)[self.weight_bytes // 4 :]
            self._store_biases(array[: self.channel_bytes // 4], biases)

    def _store_biases(self, array: np.ndarray, biases: Sequence[torch.Tensor]) -> None:
        panels = array.reshape(-1, PANEL_CHANNELS)
        for number, bias in enumerate(biases):
            padded = np.zeros(-(-self.outputs // PANEL_CHANNELS) * PANEL_CHANNELS, np.float32)
            padded[: self.outputs] = bias.float().numpy()
            panels[number :: len(biases)] = padded.reshape(-1, PANEL_CHANNELS)
