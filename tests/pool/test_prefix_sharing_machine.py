"""Nodes on one pool under random orders, steps, publications, evictions, late answers and
cancellations.

Every token is correct, every table names blocks with the right content, and every ledger
balances."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.cluster_link.messages import CancelOrder, DecodeOrder, PrefillOrder, TicketOrder
from baton.cluster_link.order_codec import attempt_key_from_pb
from baton.errors import Cancelled
from baton.types import AttemptKey, AttemptSpec, TicketId
from tests.pool.in_process_nodes import InProcessDecodeNode, InProcessHost, reference_tokens
from tests.unit.node_roles.role_bench import WRITER, make_work

prompts = st.builds(
    lambda family, shared, rest: (*range(100 * family, 100 * family + shared), *rest),
    st.integers(1, 2),
    st.integers(0, 70),
    st.lists(st.integers(1, 3), min_size=1, max_size=20),
)


class NodesOnOnePool(RuleBasedStateMachine):
    @initialize(own=st.integers(8, 20), pool=st.integers(3, 24), in_place=st.booleans())
    def begin(self, own: int, pool: int, in_place: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.host = InProcessHost(
            Path(self.folder.name),
            prefill=2,
            decode=2,
            pool_blocks=pool,
            num_blocks=own,
            in_place=in_place,
        )
        self.in_place = in_place
        self.jobs: dict[AttemptKey, AttemptSpec] = {}
        self.tokens_by_attempt: dict[AttemptKey, list[int]] = {}
        self.minted = 0

    # what the coordinator does

    @rule(
        prompt=prompts,
        length=st.integers(1, 40),
        node=st.integers(0, 1),
        writer=st.sampled_from([None, 0, 1]),
    )
    def decode(self, prompt: tuple[int, ...], length: int, node: int, writer: int | None) -> None:
        job = self.make_job(prompt, length)
        self.host.decode[node].send_item(DecodeOrder(job, None if writer is None else WRITER))
        if writer is not None:
            self.host.prefill[writer].send_item(PrefillOrder(job, needs_no_decode=False))

    @rule(prompt=prompts, node=st.integers(0, 1))
    def prefill_alone(self, prompt: tuple[int, ...], node: int) -> None:
        self.host.prefill[node].send_item(
            PrefillOrder(self.make_job(prompt, 1), needs_no_decode=True)
        )

    def make_job(self, prompt: tuple[int, ...], length: int) -> AttemptSpec:
        self.minted += 1
        job = make_work(prompt, request=f"r{self.minted}", max_tokens=length)
        self.jobs[job.key] = job
        return job

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.jobs)))
        self.cancel_attempt(key)

    def cancel_attempt(self, key: AttemptKey) -> None:
        self.jobs.pop(key, None)
        for node in self.host.nodes:
            node.send_item(CancelOrder(key, Cancelled("the client left")))
        self.answer_planes()

    def answer_planes(self) -> None:
        for sender in self.host.prefill:
            sender.drop_aborted()
        for receiver in self.host.decode:
            receiver.drop_revoked()

    # what the pool does

    @rule(node=st.integers(0, 3))
    def publish(self, node: int) -> None:
        if self.host.pool.clients[node].run_publication():
            self.host.nodes[node].drain_inbox()

    @precondition(lambda self: any(port.publish_requests for port in self.host.pool.clients))
    @rule()
    def drop_publication(self) -> None:
        next(port for port in self.host.pool.clients if port.publish_requests).drop_publication()

    @rule(node=st.integers(0, 3), slow=st.booleans())
    def set_slow(self, node: int, slow: bool) -> None:
        self.host.pool.clients[node].is_slow = slow

    @rule(node=st.integers(0, 3))
    def answer_lookup(self, node: int) -> None:
        port = self.host.pool.clients[node]
        if port.lookups:
            port.lookups.popleft()()
            self.host.nodes[node].drain_inbox()

    @rule(node=st.integers(0, 3), attached=st.booleans())
    def attach(self, node: int, attached: bool) -> None:
        self.host.pool.clients[node].is_attached = attached

    # what the nodes do

    @rule(node=st.integers(0, 3), steps=st.integers(1, 6))
    def step(self, node: int, steps: int) -> None:
        for _ in range(steps):
            self.host.nodes[node].step()
        self.read_messages()

    @rule()
    def deliver_handoffs(self) -> None:
        """Deliver tickets to their writers, and land what is computed."""
        for receiver in self.host.decode:
            for message in receiver.pop_messages("reserved"):
                key = attempt_key_from_pb(message.key)
                if key in self.jobs and not message.HasField("ticket"):
                    for sender in self.host.prefill:
                        sender.send_item(CancelOrder(key, Cancelled("decode has all of it")))
                elif key in self.jobs:
                    ticket = receiver.plane.granted[TicketId(message.ticket.id)]
                    next(node for node in self.host.prefill if key in node.plane.opened).send_item(
                        TicketOrder(ticket)
                    )
        self.answer_planes()
        for sender in self.host.prefill:
            for key in tuple(sender.plane.sealed):
                found = self.find_receiver(key)
                if found is not None:
                    self.host.land_handoff(sender, found, key)
                    del sender.plane.sealed[key]
        self.read_messages()

    def find_receiver(self, key: AttemptKey) -> InProcessDecodeNode | None:
        """Return the node that waits for the hand-off."""
        for node in self.host.decode:
            for ticket in node.plane.granted.values():
                if ticket.key == key and key in self.jobs and ticket.id not in node.plane.committed:
                    return node
        return None

    def read_messages(self) -> None:
        for node in self.host.nodes:
            for message in node.pop_messages("tokens"):
                for token in message.tokens:
                    key = attempt_key_from_pb(token.key)
                    self.tokens_by_attempt.setdefault(key, []).append(token.token)
                    if (
                        token.finish
                    ):  # perhaps by the first token, which prefill draws: decode waits in vain
                        self.cancel_attempt(key)
            for kind in ("failed", "refused"):
                for message in node.pop_messages(kind):
                    self.cancel_attempt(attempt_key_from_pb(message.key))

    # what has to hold

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "host"):
            self.host.check(idle=False)

    @invariant()
    def tokens_are_right(self) -> None:
        if hasattr(self, "host"):
            for key, job in self.jobs.items():
                got = self.tokens_by_attempt.get(key, [])
                assert got == reference_tokens(job)[: len(got)]

    @invariant()
    def tables_name_what_they_should(self) -> None:
        if not hasattr(self, "host"):
            return
        index = self.host.pool.block_pool.memory.index
        for node in self.host.nodes:
            assert node.pool_client is not None
            for sequence in node.scheduler.sequences:
                borrowed = [
                    block for block in sequence.block_table if not node.pool.is_own_block(block)
                ]
                assert len(borrowed) == sequence.pool_use.num_blocks
                assert self.in_place or not borrowed
                assert bool(sequence.pool_use.pins) >= bool(borrowed)
                for number, block in enumerate(sequence.block_table):
                    if not node.pool.is_own_block(block):
                        assert index.block_hash(
                            block - node.pool_client.first_global_block
                        ) == sequence.chain.block_hash(number)

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for port in self.host.pool.clients:
            port.is_slow = False
            while port.lookups:
                port.lookups.popleft()()
        for _ in range(400):
            self.deliver_handoffs()
            stepped = [node.step() for node in self.host.nodes]
            self.read_messages()
            self.host.run_publications()
            if not any(stepped):
                break
        for key in tuple(self.jobs):  # whose other half was refused
            self.cancel_attempt(key)
        self.host.run_publications()
        self.host.check()
        self.host.close()
        self.folder.cleanup()


NodesOnOnePool.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestNodesOnOnePool = NodesOnOnePool.TestCase
