"""Hypothesis strategies for protobuf messages, built from their descriptors."""

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_DEPTH = 3  # of messages in messages
_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
UsualValues = dict[
    str, st.SearchStrategy[Any]
]  # by a field's name: values that are likely to be taken


def message_strategy(
    descriptor: Descriptor, usual: UsualValues, depth: int = _DEPTH
) -> st.SearchStrategy[Message]:
    """Messages of one type: any field may be there, its value mostly a usual one if there are
    such."""
    make = GetMessageClass(descriptor)
    fields = {
        field.name: _field(field, usual, depth)
        for field in descriptor.fields
        if depth or not _has_submessages(field)
    }
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: make(**values))


def encoding_strategy(descriptor: Descriptor, usual: UsualValues) -> st.SearchStrategy[bytes]:
    """The bytes of messages, of broken messages, and of none at all."""
    whole = message_strategy(descriptor, usual).map(lambda message: message.SerializeToString())
    return st.one_of(
        whole,
        whole,
        whole,
        st.builds(_break_bytes, whole, st.binary(max_size=8), st.integers(0)),
        st.binary(),
    )


def _break_bytes(data: bytes, patch: bytes, where: int) -> bytes:
    """Bytes overwritten at one place, and now and then the rest cut off."""
    at = where % (len(data) + 1)
    return data[:at] + patch + (b"" if where % 3 == 0 else data[at + len(patch) :])


def _field(field: FieldDescriptor, usual: UsualValues, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_one(part, usual, depth) for part in field.message_type.fields)
        return st.dictionaries(key, value, max_size=4)
    one = _one(field, usual, depth)
    return st.lists(one, max_size=4) if field.is_repeated else one


def _one(field: FieldDescriptor, usual: UsualValues, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return message_strategy(field.message_type, usual, depth - 1)
    owner = field.containing_type
    assert owner is not None
    name = owner.name if owner.GetOptions().map_entry else field.name
    known = usual.get(name)
    return _any(field) if known is None else st.one_of(known, known, known, known, _any(field))


def _any(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type in _WHOLE:
        low, high = _WHOLE[field.cpp_type]
        return st.one_of(
            st.integers(max(low, -1), 20), st.sampled_from([low, high]), st.integers(low, high)
        )
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.one_of(st.floats(0, 2), st.floats())
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.integers(-1, 20)
        case _ if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary()
        case _:
            return st.text(st.characters(exclude_categories=["Cs"]))


def _has_submessages(field: FieldDescriptor) -> bool:
    return field.message_type is not None
