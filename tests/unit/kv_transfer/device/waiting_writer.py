"""Stands in for a prefill process that is writing over cuda_ipc, until it is killed.

It states that its end can be proven, locks and marks the fence byte of a ticket, and waits.

    python -m tests.unit.kv_transfer.device.waiting_writer FOLDER DRIVER_FILE FENCE BYTE [fork]

DRIVER_FILE stands for the file of a device's driver. With `fork`, a child that shares its
descriptors prints its pid and outlives this process.
"""

import os
import signal
import sys
from pathlib import Path

from baton.shared_memory.fence import lock_for_device_writes
from kv_transfer.device.writer_process import ProvableWriter


def main(folder: str, driver_file: str, fence: str, byte: str, fork: str = "") -> None:
    writer = ProvableWriter(Path(folder))
    os.open(driver_file, os.O_RDWR)  # as a driver does, after the lock
    writer.publish("test", Path(driver_file))
    if not lock_for_device_writes(os.open(fence, os.O_RDWR), int(byte)):
        raise SystemExit("the byte is locked")
    child = os.fork() if fork else 0
    if fork and child == 0:
        signal.pause()
    sys.stdout.write(f"{writer.name} {child}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
