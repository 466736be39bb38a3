"""What known devices can compute and read in a second, by the data sheets of their vendor.

Figures are for dense matrices (data sheets that give only figures with sparsity are halved) and for
whole devices: a partition of a GPU has another name, and so no figures here.
"""

from collections.abc import Mapping
from typing import NamedTuple

_VENDOR_PREFIX = "NVIDIA "  # older drivers leave it out


class DevicePeaks(NamedTuple):
    """Peak rates of one device."""

    bfloat16_tflops: float  # 10**12 operations a second, accumulated in float32
    fp8_tflops: float | None  # None without fp8 products
    gigabytes_per_second: float  # 10**9 bytes of its memory

    @property
    def bytes_per_second(self) -> float:
        return self.gigabytes_per_second * 1e9

    def get_flops_per_second(self, precision: str) -> float | None:
        """The peak rate of products in `precision`; None if it is not known."""
        tflops = {"bfloat16": self.bfloat16_tflops, "fp8": self.fp8_tflops}.get(precision)
        return None if tflops is None else tflops * 1e12


# By the name that the driver reports, without the vendor.
KNOWN_DEVICES: Mapping[str, DevicePeaks] = {
    "B200": DevicePeaks(2250, 4500, 8000),
    "GH200 480GB": DevicePeaks(989, 1979, 4000),
    "H200": DevicePeaks(989, 1979, 4800),
    "H200 NVL": DevicePeaks(835, 1671, 4800),
    "H100 80GB HBM3": DevicePeaks(989, 1979, 3350),  # SXM
    "H100 NVL": DevicePeaks(835, 1671, 3900),
    "H100 PCIe": DevicePeaks(756, 1513, 2000),
    "A100-SXM4-80GB": DevicePeaks(312, None, 2039),
    "A100-SXM4-40GB": DevicePeaks(312, None, 1555),
    "A100 80GB PCIe": DevicePeaks(312, None, 1935),
    "A100-PCIE-40GB": DevicePeaks(312, None, 1555),
    "L40S": DevicePeaks(362, 733, 864),
    "L40": DevicePeaks(181, 362, 864),
    "L4": DevicePeaks(121, 242, 300),
    "A40": DevicePeaks(149.7, None, 696),
    "A30": DevicePeaks(165, None, 933),
    "A10": DevicePeaks(125, None, 600),
    "RTX 6000 Ada Generation": DevicePeaks(364, 728, 960),
    "RTX A6000": DevicePeaks(154.8, None, 768),
    "GeForce RTX 4090": DevicePeaks(165.2, 330.3, 1008),
    "GeForce RTX 3090": DevicePeaks(71, None, 936),
}


def find_device_peaks(name: str) -> DevicePeaks | None:
    """Find the peaks of the device that has exactly this name; None if it is not known.

    Similar names are no match: an A10G is not an A10, and no figure is better than a wrong one.
    """
    return KNOWN_DEVICES.get(name.removeprefix(_VENDOR_PREFIX))
