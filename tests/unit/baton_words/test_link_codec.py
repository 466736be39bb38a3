from baton.link_codec import seal, unseal
from baton.pb.cluster_pb2 import AttemptKey, CoordinatorMessage, NodeMessage, Ping, Token, Tokens

MESSAGE = NodeMessage(
    incarnation="0123456789abcdef",
    tokens=Tokens(tokens=[Token(key=AttemptKey(request_id="f" * 32, attempt=2), index=7, token=31999)]),
)


def test_what_is_sealed_comes_back() -> None:
    opened = unseal(NodeMessage, seal(MESSAGE))
    assert opened is not None
    assert opened.checksum
    opened.ClearField("checksum")
    assert opened == MESSAGE


def test_an_empty_message_is_sealed_too() -> None:
    assert unseal(CoordinatorMessage, seal(CoordinatorMessage(ping=Ping()))) is not None
    assert unseal(CoordinatorMessage, b"") is None


def test_no_flipped_bit_goes_unseen() -> None:
    """Without the checksum, some would: the token's own bits make another token."""
    data = seal(MESSAGE)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unseal(NodeMessage, bytes(damaged)) is None, bit


def test_a_message_cut_short_or_repeated_is_not_whole() -> None:
    data = seal(MESSAGE)
    assert all(unseal(NodeMessage, data[:cut]) is None for cut in range(len(data)))
    assert unseal(NodeMessage, data + data) is None
