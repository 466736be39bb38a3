"""The endpoint that writers dial when it differs from the address that decode binds."""

import pytest

from kv_transfer.common.settings import TransferSettings
from kv_transfer.transports.zmq_keys import derive_curve_keys
from kv_transfer.transports.zmq_link import ZmqDecodeLink


def advertised_and_bound(advertise: str) -> tuple[str, str]:
    """The endpoint that decode advertises, and the port that it binds."""
    plain = ZmqDecodeLink(derive_curve_keys("token"), TransferSettings())
    bound = plain.endpoint.rpartition(":")[2]
    plain.close()
    link = ZmqDecodeLink(
        derive_curve_keys("token"),
        TransferSettings(listen=f"127.0.0.1:{bound}", advertise=advertise),
    )
    try:
        return link.endpoint, bound
    finally:
        link.close()


@pytest.mark.parametrize("host", ["10.0.0.7", "decode-0.example", "[fe80::1]"])
def test_a_host_gets_the_bound_port(host: str) -> None:
    advertised, bound = advertised_and_bound(host)
    assert advertised == f"tcp://{host}:{bound}"


@pytest.mark.parametrize("address", ["10.0.0.7:7000", "decode-0.example:7000", "[fe80::1]:7000"])
def test_host_with_a_port_is_advertised_unchanged(address: str) -> None:
    assert advertised_and_bound(address)[0] == f"tcp://{address}"


def test_without_advertise_the_bound_address_is_used() -> None:
    advertised, bound = advertised_and_bound("")
    assert advertised == f"tcp://127.0.0.1:{bound}"
