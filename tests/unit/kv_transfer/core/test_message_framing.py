"""Messages of a stream, however it is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.core.message_framing import pack_message, split_messages

MAX_BYTES = 40


@given(st.lists(st.binary(max_size=MAX_BYTES), max_size=8), st.data())
def test_messages_are_found_however_they_arrive(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(pack_message(message, None) for message in messages)
    received, found = bytearray(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += stream[:size]
        stream = stream[size:]
        found += split_messages(received, MAX_BYTES)
    assert found == messages
    assert not received


def test_a_message_that_is_too_long_is_refused_before_it_has_arrived() -> None:
    received = bytearray(pack_message(b"fits", None) + (MAX_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ValueError, match="a message of 41 bytes; at most 40"):
        split_messages(received, MAX_BYTES)
