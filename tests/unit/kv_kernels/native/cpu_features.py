"""The sets of instructions that native kernels are tested with on this machine."""

import pytest

from kv_kernels.native.native_library import CpuFeature, NativeLibrary, load_library

ALL_FEATURES = ~CpuFeature(0)


def list_feature_sets() -> list[CpuFeature]:
    """All instructions of this CPU, and AVX-512 and AVX2 alone where it has more."""
    library = load_library()
    sets = [ALL_FEATURES]
    if isinstance(library, NativeLibrary) and CpuFeature.AMX in library.features:
        sets.append(ALL_FEATURES & ~CpuFeature.AMX)
    return [*sets, CpuFeature.AVX2]


def name_feature_set(features: CpuFeature) -> str:
    names = {ALL_FEATURES: "all", CpuFeature.AVX2: "avx2"}
    return names.get(features, "avx512")


FEATURE_PARAMS = [
    pytest.param(features, id=name_feature_set(features)) for features in list_feature_sets()
]
