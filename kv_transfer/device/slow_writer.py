"""A process that writes into a peer's device memory, to be killed: see fence_self_test.py.

    python -m kv_transfer.device.slow_writer FOLDER DEVICE MODE SECONDS

It prints the name of its writer file, reads a line `HANDLE OFFSET SIZE FENCE BYTE` with the memory
to write and a byte of a fence file (- for none) to hold meanwhile, begins to write in the given
mode, and prints `writing`. MODE is one of:

    running   one kernel that writes a word every 20 us
    full      one kernel whose blocks write without a pause
    queued    the same kernel as `running` behind one that spins for two seconds
    copies    endless copies of device memory
    forked    as `running`, and a child that outlives this process without an exec
"""

import os
import sys
import time
from pathlib import Path

from baton.shared_memory.fence import lock_for_device_writes
from kv_transfer.device.cuda_driver_api import UVM_FILE, CudaWorkDriver
from kv_transfer.device.writer_process import ProvableWriter

MODES = ("running", "full", "queued", "copies", "forked")
_SPIN_SECONDS = 2.0
_CHILD_SECONDS = 0.3
_COPIES_AHEAD = 1000  # of each pattern: tens of milliseconds of work
_FULL_BLOCKS = 256
# write_words(target, words, nanoseconds, pause): words of all blocks, each a count of its own.
_PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry write_words(.param .u64 p_target, .param .u64 p_words, .param .u64 p_time,
                            .param .u64 p_pause)
{
  .reg .u64 %rd<14>;
  .reg .u32 %r<4>;
  .reg .pred %p<3>;
  ld.param.u64 %rd1, [p_target];
  ld.param.u64 %rd2, [p_words];
  ld.param.u64 %rd3, [p_time];
  ld.param.u64 %rd10, [p_pause];
  cvt.u32.u64 %r1, %rd10;
  mov.u32 %r2, %ctaid.x;
  cvt.u64.u32 %rd6, %r2;
  mov.u32 %r3, %nctaid.x;
  cvt.u64.u32 %rd11, %r3;
  mov.u64 %rd4, %globaltimer;
  add.u64 %rd5, %rd4, %rd3;
NEXT:
  add.u64 %rd12, %rd6, 1;
  setp.eq.u64 %p2, %rd2, 0;
  @%p2 bra WAIT;
  rem.u64 %rd7, %rd6, %rd2;
  shl.b64 %rd8, %rd7, 3;
  add.u64 %rd9, %rd1, %rd8;
  st.volatile.global.u64 [%rd9], %rd12;
WAIT:
  add.u64 %rd6, %rd6, %rd11;
  setp.eq.u32 %p2, %r1, 0;
  @%p2 bra TIME;
  nanosleep.u32 %r1;
TIME:
  mov.u64 %rd4, %globaltimer;
  setp.lt.u64 %p1, %rd4, %rd5;
  @%p1 bra NEXT;
  ret;
}
"""


def main(folder: str, device: str, mode: str, seconds: str) -> None:
    writer = ProvableWriter(Path(folder))  # before the driver opens its files
    driver = CudaWorkDriver(int(device))
    writer.publish(f"cuda {driver.device_uuid()}", Path(UVM_FILE))
    kernel = driver.load_kernel(_PTX, "write_words")
    stream = driver.make_stream()
    _print_line(writer.name)
    handle, offset, size, fence, byte = sys.stdin.readline().split()
    if fence != "-":
        lock_for_device_writes(os.open(fence, os.O_RDWR), int(byte))
    target = driver.open_memory(bytes.fromhex(handle)) + int(offset)
    words, duration = int(size) // 8, int(float(seconds) * 1e9)
    if mode == "queued":
        driver.launch(kernel, stream, (target, 0, int(_SPIN_SECONDS * 1e9), 1000))
    if mode == "copies":
        _copy_endlessly(driver, stream, target, int(size), float(seconds))
        return
    if mode == "full":
        driver.launch(kernel, stream, (target, words, duration, 0), blocks=_FULL_BLOCKS)
    else:
        driver.launch(kernel, stream, (target, words, duration, 20_000))
    if mode == "forked" and os.fork() == 0:
        time.sleep(_CHILD_SECONDS)  # the child keeps the descriptors, and with them the context
        os._exit(0)
    _print_line("writing")
    driver.synchronize(stream)


def _copy_endlessly(
    driver: CudaWorkDriver, stream: int, target: int, size: int, seconds: float
) -> None:
    """Copy two different patterns in turn, so that each copy changes the memory."""
    sources = [driver.allocate(size) for _ in range(2)]
    driver.clear(sources[0], size)
    kernel = driver.load_kernel(_PTX, "write_words")
    driver.launch(kernel, stream, (sources[1], size // 8, 50_000_000, 0), blocks=_FULL_BLOCKS)
    driver.synchronize(stream)
    _print_line("writing")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for source in sources * _COPIES_AHEAD:
            driver.copy(target, source, size, stream)
        driver.synchronize(stream)


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
