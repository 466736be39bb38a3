"""`python -m kv_transfer.device.fence_probe FOLDER`: the fence self-test on each GPU, as JSON.

For `baton doctor`, which loads no driver itself.
"""

import json
import sys
from pathlib import Path

from kv_transfer.device.cuda_driver_api import CudaDriver, CudaError
from kv_transfer.device.open_device import find_fence_refusal


def main(folder: str) -> None:
    count, refusals = 1, {}
    try:
        count = CudaDriver(0).count_devices()
    except CudaError as error:
        refusals["0"] = str(error)
    for index in range(count if not refusals else 0):
        refusals[str(index)] = find_fence_refusal(index, Path(folder))
    sys.stdout.write(json.dumps({"refusals": refusals}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
