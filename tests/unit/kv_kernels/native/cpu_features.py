"""The sets of instructions that native kernels are tested with on this machine."""

import pytest

from kv_kernels.native.native_library import (
    CpuFeature,
    NativeLibrary,
    describe_features,
    load_library,
)

ALL_FEATURES = ~CpuFeature(0)
# Each set makes the library choose other kernels, if the CPU has their instructions.
_FEATURE_SETS = {
    "all": ALL_FEATURES,
    "avx512": ~(CpuFeature.AMX | CpuFeature.SLOW_BF16),
    "widened": ~CpuFeature.AVX512_BF16,
    "avx2": CpuFeature.AVX2,
}


def list_feature_sets() -> list[CpuFeature]:
    """One for each variant of the kernels that this CPU can run."""
    library = load_library()
    if not isinstance(library, NativeLibrary):
        return [ALL_FEATURES]
    variants = {
        describe_features(library.features & features): features
        for features in reversed(_FEATURE_SETS.values())
    }
    return list(variants.values())


def name_feature_set(features: CpuFeature) -> str:
    return next(name for name, known in _FEATURE_SETS.items() if known == features)


FEATURE_PARAMS = [
    pytest.param(features, id=name_feature_set(features)) for features in list_feature_sets()
]
