"""The calls of the CUDA driver that torch does not offer, by ctypes.

Nothing here imports torch, so that a process that only writes a test pattern starts in a fraction
of a second. A context is the device's primary one, which torch uses too.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_void_p

HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
UVM_FILE = "/dev/nvidia-uvm"
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING_STREAM = 1
_PEER_ACCESS_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


class CudaError(Exception):
    """A call of the driver failed. The message names the call and the driver's error."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


class CudaDriver:
    """The driver, with the primary context of one device. Calls make that context current."""

    def __init__(self, index: int) -> None:
        """Raises CudaError if there is no driver or no such device."""
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaError(f"{_LIBRARY}: {error}") from None
        self.call_driver("cuInit", c_uint(0))
        self._device = c_int()
        self.call_driver("cuDeviceGet", byref(self._device), c_int(index))
        self._context = c_void_p()
        self.call_driver("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self.make_current()

    def make_current(self) -> None:
        """Let calls of this thread use the device."""
        self.call_driver("cuCtxSetCurrent", self._context)

    def device_uuid(self) -> str:
        uuid = (c_char * 16)()
        self.call_driver("cuDeviceGetUuid_v2", byref(uuid), self._device)
        return bytes(uuid).hex()

    def count_devices(self) -> int:
        count = c_int()
        self.call_driver("cuDeviceGetCount", byref(count))
        return count.value

    def can_access(self, uuid: str) -> bool:
        """Whether kernels of this device may write to the memory of the device with that id."""
        if uuid == self.device_uuid():
            return True
        other, allowed = self._find_device(uuid), c_int()
        if other is not None:
            self.call_driver("cuDeviceCanAccessPeer", byref(allowed), self._device, other)
        return bool(allowed.value)

    def _find_device(self, uuid: str) -> c_int | None:
        for index in range(self.count_devices()):
            found, found_uuid = c_int(), (c_char * 16)()
            self.call_driver("cuDeviceGet", byref(found), c_int(index))
            self.call_driver("cuDeviceGetUuid_v2", byref(found_uuid), found)
            if bytes(found_uuid).hex() == uuid:
                return found
        return None

    def enable_peer_access(self, uuid: str) -> None:
        """Let kernels of this device use memory of this process on the device with that id.

        Memory of another process needs no such call: opening it is enough.
        """
        other = self._find_device(uuid)
        if other is None or uuid == self.device_uuid():
            return
        peer = c_void_p()
        self.call_driver("cuDevicePrimaryCtxRetain", byref(peer), other)
        self.make_current()
        code = int(self._library.cuCtxEnablePeerAccess(peer, c_uint(0)))
        if code not in (0, _PEER_ACCESS_ALREADY_ENABLED):
            raise self._describe_error("cuCtxEnablePeerAccess", code)

    # memory, own and of other processes

    def find_allocation(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that an address lies in."""
        start, size = c_void_p(), c_size_t()
        self.call_driver("cuMemGetAddressRange_v2", byref(start), byref(size), c_void_p(address))
        return _address(start), size.value

    def export_memory(self, start: int) -> bytes:
        """The handle by which other processes of this host open an allocation."""
        handle = _IpcHandle()
        self.call_driver("cuIpcGetMemHandle", byref(handle), c_void_p(start))
        return ctypes.string_at(byref(handle), HANDLE_BYTES)

    def open_memory(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address here."""
        pointer = c_void_p()
        self.call_driver(
            "cuIpcOpenMemHandle_v2",
            byref(pointer),
            _IpcHandle.from_buffer_copy(handle),
            c_uint(_LAZY_PEER_ACCESS),
        )
        return _address(pointer)

    def close_memory(self, address: int) -> None:
        """Unmap an allocation of another process. Nothing may be writing to it."""
        self.call_driver("cuIpcCloseMemHandle", c_void_p(address))

    def call_driver(self, name: str, *arguments: object) -> None:
        """Raises CudaError."""
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise self._describe_error(name, code)

    def _describe_error(self, name: str, code: int) -> CudaError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(c_int(code), byref(text))
        return CudaError(f"{name}: {(text.value or b'').decode() or code}")


class CudaWorkDriver(CudaDriver):
    """A driver with memory, streams and kernels of its own, without torch."""

    def allocate(self, size: int) -> int:
        pointer = c_void_p()
        self.call_driver("cuMemAlloc_v2", byref(pointer), c_size_t(size))
        return _address(pointer)

    def free(self, address: int) -> None:
        self.call_driver("cuMemFree_v2", c_void_p(address))

    def clear(self, address: int, size: int) -> None:
        self.call_driver("cuMemsetD8_v2", c_void_p(address), ctypes.c_ubyte(0), c_size_t(size))

    def read(self, address: int, size: int) -> bytes:
        """The bytes of device memory, by a copy that waits for itself alone."""
        buffer = ctypes.create_string_buffer(size)
        self.call_driver("cuMemcpyDtoH_v2", buffer, c_void_p(address), c_size_t(size))
        return buffer.raw

    def copy(self, target: int, source: int, size: int, stream: int = 0) -> None:
        """Queue a copy within device memory."""
        self.call_driver(
            "cuMemcpyDtoDAsync_v2",
            c_void_p(target),
            c_void_p(source),
            c_size_t(size),
            c_void_p(stream),
        )

    def make_stream(self) -> int:
        stream = c_void_p()
        self.call_driver("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING_STREAM))
        return _address(stream)

    def synchronize(self, stream: int) -> None:
        self.call_driver("cuStreamSynchronize", c_void_p(stream))

    def load_kernel(self, ptx: str, name: str) -> int:
        """Compile a module for this device and return its kernel."""
        module, kernel = c_void_p(), c_void_p()
        self.call_driver("cuModuleLoadData", byref(module), ptx.encode())
        self.call_driver(
            "cuModuleGetFunction", byref(kernel), module, ctypes.c_char_p(name.encode())
        )
        return _address(kernel)

    def launch(
        self, kernel: int, stream: int, arguments: Sequence[int], *, blocks: int = 1
    ) -> None:
        """Queue a kernel of one thread a block, whose arguments are all 64 bits wide."""
        values = [ctypes.c_uint64(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        one, none = c_uint(1), c_uint(0)
        self.call_driver(
            "cuLaunchKernel",
            c_void_p(kernel),
            *(c_uint(blocks), one, one, one, one, one),
            none,
            c_void_p(stream),
            pointers,
            None,
        )


def _address(pointer: c_void_p) -> int:
    return pointer.value or 0
