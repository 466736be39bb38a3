"""Tickets that are stale, expired, used twice, made up or overstepped: decode refuses, nothing of it is ever looked at,
and the request is served by somebody else."""

from collections.abc import Awaitable, Callable

import pytest
import xxhash

from baton.types import Incarnation, TicketId, mint_id
from kv_transfer.core import frames
from node_engine.paced import paced_reference
from tests.faults.rogue import Grant, Rogue, forged
from tests.faults.scene import Scene
from tests.history import Closed

pytestmark = pytest.mark.asyncio(loop_scope="session")

Misdeed = Callable[[Rogue, Grant], Awaitable[frames.Refused]]


def slab(rogue: Rogue) -> tuple[bytes, int]:
    data = bytes(rogue.layout.slab_bytes)
    return data, xxhash.xxh3_64_intdigest(data)


async def made_up(rogue: Rogue, grant: Grant) -> frames.Refused:
    await rogue.send(rogue.open(forged(grant.ticket, id=TicketId(mint_id()))))
    return await rogue.refused()


async def of_another_writer(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, checksum = slab(rogue)
    await rogue.send(rogue.write(forged(grant.ticket, writer=Incarnation(mint_id(64))), checksum), data)
    return await rogue.refused()


async def of_an_earlier_life_of_decode(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, checksum = slab(rogue)
    await rogue.send(rogue.write(grant.ticket, checksum, decode=mint_id(64)), data)
    return await rogue.refused()


async def of_another_attempt(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, checksum = slab(rogue)
    await rogue.send(rogue.write(grant.ticket, checksum, attempt=grant.ticket.key.attempt + 1), data)
    return await rogue.refused()


async def beyond_its_blocks(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, checksum = slab(rogue)
    last = grant.ticket.first_block + len(grant.ticket.offsets)
    await rogue.send(rogue.write(grant.ticket, checksum, block=last), data)
    return await rogue.refused()


async def beyond_its_layers(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, checksum = slab(rogue)
    await rogue.send(rogue.write(grant.ticket, checksum, layer=rogue.layout.num_layers), data)
    return await rogue.refused()


async def longer_than_it_says(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, _ = slab(rogue)
    data += b"more"
    await rogue.send(rogue.write(grant.ticket, xxhash.xxh3_64_intdigest(data)), data)
    return await rogue.refused()


async def without_its_bytes(rogue: Rogue, grant: Grant) -> frames.Refused:
    _, checksum = slab(rogue)
    await rogue.send(rogue.write(grant.ticket, checksum))
    return await rogue.refused()


async def as_if_in_place(rogue: Rogue, grant: Grant) -> frames.Refused:
    """The ticket is not for shared memory."""
    _, checksum = slab(rogue)
    await rogue.send(rogue.write(grant.ticket, checksum, inline=False))
    return await rogue.refused()


async def with_a_wrong_checksum(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, checksum = slab(rogue)
    await rogue.send(rogue.write(grant.ticket, checksum ^ 1), data)
    return await rogue.refused()


async def of_another_geometry(rogue: Rogue, grant: Grant) -> frames.Refused:
    await rogue.send(rogue.open(grant.ticket, num_layers=rogue.layout.num_layers + 1))
    return await rogue.refused()


async def of_another_protocol(rogue: Rogue, grant: Grant) -> frames.Refused:
    await rogue.send(rogue.open(grant.ticket, version=frames.PROTOCOL_VERSION + 1))
    return await rogue.refused()


async def sealed_with_nothing_written(rogue: Rogue, grant: Grant) -> frames.Refused:
    await rogue.send(rogue.seal(grant.ticket))
    return await rogue.refused()


async def sealed_with_a_wrong_manifest(rogue: Rogue, grant: Grant) -> frames.Refused:
    data, checksum = slab(rogue)
    for layer in range(rogue.layout.num_layers):
        for block in range(len(grant.ticket.offsets)):
            await rogue.send(
                rogue.write(grant.ticket, checksum, layer=layer, block=grant.ticket.first_block + block), data
            )
    await rogue.send(rogue.seal(grant.ticket))
    return await rogue.refused()


async def expired(rogue: Rogue, grant: Grant) -> frames.Refused:
    """Told of by decode itself, on the link that the writer last used."""
    await rogue.send(rogue.open(grant.ticket))
    refused = await rogue.refused()
    data, checksum = slab(rogue)
    await rogue.send(rogue.write(grant.ticket, checksum), data)
    assert (await rogue.refused()).code == refused.code
    return refused


async def given_up_for_a_reason_of_its_own(rogue: Rogue, grant: Grant) -> frames.Refused:
    """Not one that may reach the client."""
    await rogue.send(frames.Abort(*_ids(grant), "invalid_request", "the prompt is in bad taste"))
    return await rogue.refused()


async def used_again_after_its_end(rogue: Rogue, grant: Grant) -> frames.Refused:
    await rogue.send(frames.Abort(*_ids(grant), "cancelled", "changed its mind"))
    await rogue.refused()
    data, checksum = slab(rogue)
    for frame, payload in ((rogue.open(grant.ticket), None), (rogue.write(grant.ticket, checksum), data)):
        await rogue.send(frame, payload)
        await rogue.refused()
    await rogue.send(rogue.seal(grant.ticket))
    return await rogue.refused()


def _ids(grant: Grant) -> tuple[str, int, str, str]:
    ticket = grant.ticket
    return ticket.id, ticket.key.attempt, ticket.writer, ticket.decode.incarnation


MISDEEDS: dict[Misdeed, str] = {
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


# What it hears of a ticket that has ended for another reason: it took too long over it, or was not heard of in time.
LATE = {"lease_expired", "node_gone", "peer_gone", "stale"}
TRIES = 5


async def answered_rightly(rogue: Rogue, grant: Grant) -> None:
    await rogue.give_up(grant)
    operation = await grant.asked.over()
    assert operation.end == Closed(in_order=True), operation.events[-1]
    assert list(operation.tokens) == paced_reference(operation.call.prompt, 6)


async def test_no_misdeed_is_ever_served(scene: Scene) -> None:
    """One after the other, each with a request of its own, which is answered rightly all the same. One that was late is
    done again."""
    async with Rogue(scene) as rogue:
        for number, (misdeed, code) in enumerate(MISDEEDS.items()):
            for turn in range(TRIES):
                grant = await rogue.grant(salt=number + 100 * turn)
                refused = await misdeed(rogue, grant)
                await answered_rightly(rogue, grant)
                if refused.code == code or refused.code not in LATE:
                    break
            assert refused.code == code, (misdeed.__name__, refused)


async def test_bytes_that_are_no_frames_are_dropped(scene: Scene) -> None:
    async with Rogue(scene) as rogue:
        for turn in range(TRIES):
            grant = await rogue.grant(salt=50 + 100 * turn)
            for header in (b"", b"\x80\x04.", bytes(1 << 16), b"\xdd\xff\xff\xff\xff", b"\x91" * 5000):
                await rogue.send_bytes(header)
                await rogue.send_bytes(header, b"and a payload")
            await rogue.send(rogue.open(grant.ticket))
            answer = await rogue.answer()
            await answered_rightly(rogue, grant)
            if not isinstance(answer, frames.Refused) or answer.code not in LATE:
                break
        assert isinstance(answer, frames.Credit), answer


async def test_a_ticket_that_is_never_used_runs_out(scene: Scene) -> None:
    """Its request is served by somebody else, although the writer never gives up."""
    async with Rogue(scene) as rogue:
        grant = await rogue.grant(salt=60)
        assert (await grant.asked.over()).end == Closed(in_order=True)
