"""gRPC channels to the coordinator, with errors translated for the command line."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from baton.cli.common.errors import CommandFailed, EndpointUnreachable
from baton.config.resolve import read_secret
from baton.network.bind_policy import parse_endpoint

CONNECT_TIMEOUT = 5.0  # seconds; for an endpoint that neither answers nor refuses
CALL_TIMEOUT = 15.0  # seconds; for one call of an operator's command
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))

Metadata = tuple[tuple[str, str], ...]


@contextmanager
def coordinator_channel(endpoint: str) -> Iterator[grpc.Channel]:
    """Yield a connected channel. Raises EndpointUnreachable at the first refused connection.

    Errors of calls inside the block become CommandFailed with the server's own message. Raises
    ConfigError unless the endpoint is HOST:PORT.
    """
    parse_endpoint(endpoint, "--endpoint")
    channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
    try:
        _wait_until_ready(channel, endpoint)
        yield channel
    except grpc.RpcError as error:
        raise _translate_error(error, endpoint) from None
    finally:
        channel.close()


def api_key_metadata(api_key: str) -> Metadata:
    """Return metadata with the client's key, empty without a key. `@FILE` reads it from a file."""
    return (("authorization", f"Bearer {read_secret(api_key, 'api_key')}"),) if api_key else ()


def admin_metadata(admin_token: str) -> Metadata:
    """Return metadata that authorizes an operator on another host, empty without a token."""
    return (
        (("authorization", f"Bearer {read_secret(admin_token, 'admin_token')}"),)
        if admin_token
        else ()
    )


def _wait_until_ready(channel: grpc.Channel, endpoint: str) -> None:
    connected_or_failed = threading.Event()
    state = grpc.ChannelConnectivity.IDLE

    def on_state_change(new: grpc.ChannelConnectivity) -> None:
        nonlocal state
        state = new
        if new in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            connected_or_failed.set()

    channel.subscribe(on_state_change, try_to_connect=True)
    connected_or_failed.wait(CONNECT_TIMEOUT)
    channel.unsubscribe(on_state_change)
    if state is not grpc.ChannelConnectivity.READY:
        raise EndpointUnreachable(
            f"no cluster answers at {endpoint}: start one with `baton up`, "
            "or name it with --endpoint"
        )


def _translate_error(error: grpc.RpcError, endpoint: str) -> Exception:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
        return EndpointUnreachable(f"the connection to {endpoint} was lost: {details}")
    return CommandFailed(f"{details} ({code.name.lower()})")
