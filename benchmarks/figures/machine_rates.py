"""The best rates at which this machine moves bytes, for comparison with a transfer."""

import socket
import threading
import time

import numpy as np

_COPY_BYTES = 64 << 20  # more than the CPU caches hold
_ROUNDS = 8


def measure_memcpy_rate() -> float:
    """Return bytes per second that one thread copies from memory to memory, best of some rounds."""
    source, target = (np.ones(_COPY_BYTES, dtype=np.uint8) for _ in range(2))
    return _COPY_BYTES / min(_timed_copy(source, target) for _ in range(_ROUNDS))


def measure_loopback_tcp_rate() -> float:
    """Return bytes per second through one loopback TCP connection, best of some rounds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with (
            socket.create_connection(listening.getsockname()) as sender,
            listening.accept()[0] as receiver,
        ):
            return _COPY_BYTES / min(_timed_send(sender, receiver) for _ in range(_ROUNDS))


def _timed_copy(source: np.ndarray, target: np.ndarray) -> float:
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


def _timed_send(sender: socket.socket, receiver: socket.socket) -> float:
    """Return the seconds until the last byte is in the receiver's memory."""
    data, landed = memoryview(bytearray(_COPY_BYTES)), memoryview(bytearray(_COPY_BYTES))
    thread = threading.Thread(target=sender.sendall, args=(data,))
    started = time.perf_counter()
    thread.start()
    received = 0
    while received < _COPY_BYTES:
        received += receiver.recv_into(landed[received:])
    elapsed = time.perf_counter() - started
    thread.join()
    return elapsed
