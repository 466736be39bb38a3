from baton.cluster_link.stream import decode_checked, encode_checked
from baton.pb.cluster_pb2 import AttemptKey, CoordinatorMessage, NodeMessage, Ping, Token, Tokens

MESSAGE = NodeMessage(
    incarnation="0123456789abcdef",
    tokens=Tokens(
        tokens=[Token(key=AttemptKey(request_id="f" * 32, attempt=2), index=7, token=31999)]
    ),
)


def test_encode_decode_round_trip() -> None:
    opened = decode_checked(NodeMessage, encode_checked(MESSAGE))
    assert opened is not None
    assert opened.checksum
    opened.ClearField("checksum")
    assert opened == MESSAGE


def test_empty_message_round_trip() -> None:
    assert (
        decode_checked(CoordinatorMessage, encode_checked(CoordinatorMessage(ping=Ping())))
        is not None
    )
    assert decode_checked(CoordinatorMessage, b"") is None


def test_every_flipped_bit_is_detected() -> None:
    """Without the checksum, some would: the token's own bits make another token."""
    data = encode_checked(MESSAGE)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_checked(NodeMessage, bytes(damaged)) is None, bit


def test_truncated_or_repeated_bytes_are_rejected() -> None:
    data = encode_checked(MESSAGE)
    assert all(decode_checked(NodeMessage, data[:cut]) is None for cut in range(len(data)))
    assert decode_checked(NodeMessage, data + data) is None
