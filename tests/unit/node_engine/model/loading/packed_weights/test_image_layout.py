import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.shared_memory.memory_map import HUGE_PAGE
from node_engine.model.loading.packed_weights.image_layout import RegionSpec, plan_image
from tests.unit.node_engine.model.loading.packed_weights.weight_images import KEY, LAYOUT, SPECS

NAMES = st.text(min_size=1, max_size=256)
MANIFESTS = st.lists(
    st.builds(
        RegionSpec,
        NAMES,
        st.integers(0, 1 << 36),
        st.integers(0, 21).map(lambda bits: 1 << bits),
    ),
    max_size=40,
    unique_by=lambda spec: spec.name,
)


@given(MANIFESTS)
def test_regions_are_aligned_in_order_and_apart(specs: list[RegionSpec]) -> None:
    layout = plan_image(KEY, specs)
    checksums = {spec.name: "f" * 16 for spec in specs}
    end = len(layout.encode_header(checksums))
    for spec, region in zip(specs, layout.regions, strict=True):
        assert (region.name, region.size_bytes) == (spec.name, spec.size_bytes)
        assert region.offset % spec.alignment == 0
        assert end <= region.offset < end + spec.alignment + 32 * len(specs) + 64
        end = region.offset + region.size_bytes
    assert end <= layout.image_bytes <= layout.segment_bytes
    assert layout.segment_bytes % HUGE_PAGE == 0


@given(MANIFESTS, st.data())
def test_a_header_is_decoded_or_found_damaged(specs: list[RegionSpec], data: st.DataObject) -> None:
    layout = plan_image(KEY, specs)
    checksums = {
        spec.name: data.draw(st.text("0123456789abcdef", min_size=16, max_size=16))
        for spec in specs
    }
    header = layout.encode_header(checksums)
    assert layout.decode_header(header + bytes(100)) == checksums
    bit = data.draw(st.integers(0, 8 * len(header) - 1))
    damaged = bytearray(header)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"header|image"):
        layout.decode_header(bytes(damaged))
    with pytest.raises(ValueError, match=r"header|image"):
        layout.decode_header(header[: data.draw(st.integers(0, len(header) - 1))])


@pytest.mark.parametrize("field", KEY.__struct_fields__)
def test_each_field_of_the_key_makes_another_image(field: str) -> None:
    value = 2 if field == "format_version" else "other"
    other = plan_image(msgspec.structs.replace(KEY, **{field: value}), SPECS)
    assert other.image_id != LAYOUT.image_id
    with pytest.raises(ValueError, match="other weights"):
        LAYOUT.decode_header(other.encode_header({spec.name: "0" * 16 for spec in SPECS}))


@pytest.mark.parametrize("change", [{"name": "x"}, {"size_bytes": 5}, {"alignment": 1 << 20}])
def test_other_regions_make_another_image(change: dict[str, object]) -> None:
    specs = [*SPECS[:-1], dataclasses.replace(SPECS[-1], **change)]  # type: ignore[arg-type]
    assert plan_image(KEY, specs).image_id != LAYOUT.image_id


@pytest.mark.parametrize(
    "specs",
    [
        [RegionSpec("a", 1), RegionSpec("a", 2)],
        [RegionSpec("", 1)],
        [RegionSpec("a" * 257, 1)],
        [RegionSpec("a", -1)],
        [RegionSpec("a", 1, 0)],
        [RegionSpec("a", 1, 48)],
        [RegionSpec("a", 1, 2 * HUGE_PAGE)],
    ],
)
def test_regions_that_cannot_be_placed_are_rejected(specs: list[RegionSpec]) -> None:
    with pytest.raises(ValueError, match="region"):
        plan_image(KEY, specs)
