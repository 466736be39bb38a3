"""Tickets that are stale, expired, used twice, forged or exceeded.

The decode node refuses them and never reads what was written, and another node serves the
request."""

from collections.abc import Awaitable, Callable

import pytest
import xxhash

from baton.types import Incarnation, TicketId, mint_id
from kv_transfer.core import frames
from tests.faults.observed_cluster import ObservedCluster
from tests.faults.rogue_writer import RogueGrant, RogueWriter, forge_ticket
from tests.history import Closed
from tests.paced_reference import paced_reference_tokens

pytestmark = pytest.mark.asyncio(loop_scope="session")

InvalidTransfer = Callable[[RogueWriter, RogueGrant], Awaitable[frames.RefusedFrame]]


def make_slab(rogue: RogueWriter) -> tuple[bytes, int]:
    data = bytes(rogue.layout.slab_bytes)
    return data, xxhash.xxh3_64_intdigest(data)


async def made_up(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    await rogue.send_frame(rogue.open_frame(forge_ticket(grant.ticket, id=TicketId(mint_id()))))
    return await rogue.next_refusal()


async def of_another_writer(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    data, checksum = make_slab(rogue)
    await rogue.send_frame(
        rogue.write_frame(
            forge_ticket(grant.ticket, writer_incarnation=Incarnation(mint_id(64))), checksum
        ),
        data,
    )
    return await rogue.next_refusal()


async def of_an_earlier_life_of_decode(
    rogue: RogueWriter, grant: RogueGrant
) -> frames.RefusedFrame:
    data, checksum = make_slab(rogue)
    await rogue.send_frame(
        rogue.write_frame(grant.ticket, checksum, decode_incarnation=mint_id(64)), data
    )
    return await rogue.next_refusal()


async def of_another_attempt(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    data, checksum = make_slab(rogue)
    await rogue.send_frame(
        rogue.write_frame(grant.ticket, checksum, attempt=grant.ticket.key.attempt_number + 1), data
    )
    return await rogue.next_refusal()


async def beyond_its_blocks(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    data, checksum = make_slab(rogue)
    last = grant.ticket.first_block + len(grant.ticket.block_offsets)
    await rogue.send_frame(rogue.write_frame(grant.ticket, checksum, first_block=last), data)
    return await rogue.next_refusal()


async def beyond_its_layers(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    data, checksum = make_slab(rogue)
    await rogue.send_frame(
        rogue.write_frame(grant.ticket, checksum, first_layer=rogue.layout.num_layers), data
    )
    return await rogue.next_refusal()


async def longer_than_it_says(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    data, _ = make_slab(rogue)
    data += b"more"
    await rogue.send_frame(rogue.write_frame(grant.ticket, xxhash.xxh3_64_intdigest(data)), data)
    return await rogue.next_refusal()


async def without_its_bytes(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    _, checksum = make_slab(rogue)
    await rogue.send_frame(rogue.write_frame(grant.ticket, checksum))
    return await rogue.next_refusal()


async def as_if_in_place(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    """Write as if the ticket were for shared memory."""
    _, checksum = make_slab(rogue)
    await rogue.send_frame(rogue.write_frame(grant.ticket, checksum, is_inline=False))
    return await rogue.next_refusal()


async def with_a_wrong_checksum(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    data, checksum = make_slab(rogue)
    await rogue.send_frame(rogue.write_frame(grant.ticket, checksum ^ 1), data)
    return await rogue.next_refusal()


async def of_another_geometry(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    await rogue.send_frame(rogue.open_frame(grant.ticket, num_layers=rogue.layout.num_layers + 1))
    return await rogue.next_refusal()


async def of_another_protocol(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    await rogue.send_frame(rogue.open_frame(grant.ticket, version=frames.PROTOCOL_VERSION + 1))
    return await rogue.next_refusal()


async def sealed_with_nothing_written(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    await rogue.send_frame(rogue.seal_frame(grant.ticket))
    return await rogue.next_refusal()


async def sealed_with_a_wrong_manifest(
    rogue: RogueWriter, grant: RogueGrant
) -> frames.RefusedFrame:
    data, checksum = make_slab(rogue)
    for layer in range(rogue.layout.num_layers):
        for block in range(len(grant.ticket.block_offsets)):
            await rogue.send_frame(
                rogue.write_frame(
                    grant.ticket,
                    checksum,
                    first_layer=layer,
                    first_block=grant.ticket.first_block + block,
                ),
                data,
            )
    await rogue.send_frame(rogue.seal_frame(grant.ticket))
    return await rogue.next_refusal()


async def expired(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    """The decode node itself reports the expiry, on the link that the writer last used."""
    await rogue.send_frame(rogue.open_frame(grant.ticket))
    refused = await rogue.next_refusal()
    data, checksum = make_slab(rogue)
    await rogue.send_frame(rogue.write_frame(grant.ticket, checksum), data)
    assert (await rogue.next_refusal()).code == refused.code
    return refused


async def given_up_for_a_reason_of_its_own(
    rogue: RogueWriter, grant: RogueGrant
) -> frames.RefusedFrame:
    """The writer aborts with an error that must not reach the client."""
    await rogue.send_frame(
        frames.AbortFrame(*_ids(grant), "invalid_request", "the prompt is in bad taste")
    )
    return await rogue.next_refusal()


async def used_again_after_its_end(rogue: RogueWriter, grant: RogueGrant) -> frames.RefusedFrame:
    await rogue.send_frame(frames.AbortFrame(*_ids(grant), "cancelled", "changed its mind"))
    await rogue.next_refusal()
    data, checksum = make_slab(rogue)
    for frame, payload in (
        (rogue.open_frame(grant.ticket), None),
        (rogue.write_frame(grant.ticket, checksum), data),
    ):
        await rogue.send_frame(frame, payload)
        await rogue.next_refusal()
    await rogue.send_frame(rogue.seal_frame(grant.ticket))
    return await rogue.next_refusal()


def _ids(grant: RogueGrant) -> tuple[str, int, str, str]:
    ticket = grant.ticket
    return (
        ticket.id,
        ticket.key.attempt_number,
        ticket.writer_incarnation,
        ticket.decode_peer.incarnation,
    )


ERROR_BY_INVALID_TRANSFER: dict[InvalidTransfer, str] = {
    made_up: "stale",
    of_another_writer: "stale",
    of_an_earlier_life_of_decode: "stale",
    of_another_attempt: "stale",
    beyond_its_blocks: "layout_mismatch",
    beyond_its_layers: "layout_mismatch",
    longer_than_it_says: "checksum_mismatch",
    without_its_bytes: "checksum_mismatch",
    as_if_in_place: "checksum_mismatch",
    with_a_wrong_checksum: "checksum_mismatch",
    of_another_geometry: "layout_mismatch",
    of_another_protocol: "layout_mismatch",
    sealed_with_nothing_written: "incomplete",
    sealed_with_a_wrong_manifest: "incomplete",
    expired: "lease_expired",
    given_up_for_a_reason_of_its_own: "handoff_failed",
    used_again_after_its_end: "cancelled",
}


# What it hears of a ticket that has ended for another reason: it took too long over it, or was not
# heard of in time.
LATE_ERRORS = {"lease_expired", "node_gone", "peer_gone", "stale"}
MAX_TRIES = 5


async def check_answer(rogue: RogueWriter, grant: RogueGrant) -> None:
    await rogue.give_up_work(grant)
    operation = await grant.call.wait_end()
    assert operation.end == Closed(is_orderly=True), operation.events[-1]
    assert list(operation.tokens) == paced_reference_tokens(operation.call.prompt, 6)


async def test_invalid_transfers_are_refused(observed: ObservedCluster) -> None:
    """Each case has a request of its own, which is still answered correctly. A case that was
    late is repeated."""
    async with RogueWriter(observed) as rogue:
        for number, (misdeed, code) in enumerate(ERROR_BY_INVALID_TRANSFER.items()):
            for turn in range(MAX_TRIES):
                grant = await rogue.obtain_ticket(salt=number + 100 * turn)
                refused = await misdeed(rogue, grant)
                await check_answer(rogue, grant)
                if refused.code == code or refused.code not in LATE_ERRORS:
                    break
            assert refused.code == code, (misdeed.__name__, refused)


async def test_malformed_frames_are_dropped(observed: ObservedCluster) -> None:
    async with RogueWriter(observed) as rogue:
        for turn in range(MAX_TRIES):
            grant = await rogue.obtain_ticket(salt=50 + 100 * turn)
            for header in (
                b"",
                b"\x80\x04.",
                bytes(1 << 16),
                b"\xdd\xff\xff\xff\xff",
                b"\x91" * 5000,
            ):
                await rogue.send_bytes(header)
                await rogue.send_bytes(header, b"and a payload")
            await rogue.send_frame(rogue.open_frame(grant.ticket))
            answer = await rogue.next_frame()
            await check_answer(rogue, grant)
            if not isinstance(answer, frames.RefusedFrame) or answer.code not in LATE_ERRORS:
                break
        assert isinstance(answer, frames.CreditFrame), answer


async def test_unused_ticket_expires(observed: ObservedCluster) -> None:
    """Another node serves its request, although the writer never gives up."""
    async with RogueWriter(observed) as rogue:
        grant = await rogue.obtain_ticket(salt=60)
        assert (await grant.call.wait_end()).end == Closed(is_orderly=True)
