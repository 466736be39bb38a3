"""The printable characters that stand for bytes in the vocabulary of byte-level tokenizers."""


def _build_char_to_byte() -> dict[str, int]:
    """Build GPT-2's table: printable Latin-1 stands for itself, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


CHAR_TO_BYTE = _build_char_to_byte()
