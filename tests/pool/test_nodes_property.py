"""Nodes on one pool under random orders, steps, publications, evictions, late answers, cancels: every token is right,
every table names blocks that hold what they should, and every ledger balances."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton import wire
from baton.errors import Cancelled
from baton.types import AttemptKey, TicketId, Work
from node_engine.core.messages import Cancel, GiveTicket, Prefill, Submit
from tests.pool.nodes import DecodeNode, Host, reference
from tests.unit.roles.bench import WRITER, work

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
        self.host = Host(
            Path(self.folder.name), prefill=2, decode=2, pool_blocks=pool, num_blocks=own, in_place=in_place
        )
        self.in_place = in_place
        self.jobs: dict[AttemptKey, Work] = {}
        self.got: dict[AttemptKey, list[int]] = {}
        self.minted = 0

    # what the coordinator does

    @rule(prompt=prompts, length=st.integers(1, 40), node=st.integers(0, 1), writer=st.sampled_from([None, 0, 1]))
    def decode(self, prompt: tuple[int, ...], length: int, node: int, writer: int | None) -> None:
        job = self.mint(prompt, length)
        self.host.decode[node].tell(Submit(job, None if writer is None else WRITER))
        if writer is not None:
            self.host.prefill[writer].tell(Prefill(job, alone=False))

    @rule(prompt=prompts, node=st.integers(0, 1))
    def prefill_alone(self, prompt: tuple[int, ...], node: int) -> None:
        self.host.prefill[node].tell(Prefill(self.mint(prompt, 1), alone=True))

    def mint(self, prompt: tuple[int, ...], length: int) -> Work:
        self.minted += 1
        job = work(prompt, request=f"r{self.minted}", max_tokens=length)
        self.jobs[job.key] = job
        return job

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.jobs)))
        self.end(key)

    def end(self, key: AttemptKey) -> None:
        self.jobs.pop(key, None)
        for node in self.host.nodes:
            node.tell(Cancel(key, Cancelled("the client left")))
        self.answer_planes()

    def answer_planes(self) -> None:
        for sender in self.host.prefill:
            sender.let_go()
        for receiver in self.host.decode:
            receiver.drop_revoked()

    # what the pool does

    @rule(node=st.integers(0, 3))
    def publish(self, node: int) -> None:
        if self.host.pool.ports[node].step():
            self.host.nodes[node].receive()

    @precondition(lambda self: any(port.queue for port in self.host.pool.ports))
    @rule()
    def refuse(self) -> None:
        next(port for port in self.host.pool.ports if port.queue).refuse()

    @rule(node=st.integers(0, 3), slow=st.booleans())
    def slow(self, node: int, slow: bool) -> None:
        self.host.pool.ports[node].slow = slow

    @rule(node=st.integers(0, 3))
    def answer(self, node: int) -> None:
        port = self.host.pool.ports[node]
        if port.lookups:
            port.lookups.popleft()()
            self.host.nodes[node].receive()

    @rule(node=st.integers(0, 3), attached=st.booleans())
    def attach(self, node: int, attached: bool) -> None:
        self.host.pool.ports[node].attached = attached

    # what the nodes do

    @rule(node=st.integers(0, 3), steps=st.integers(1, 6))
    def step(self, node: int, steps: int) -> None:
        for _ in range(steps):
            self.host.nodes[node].step()
        self.read()

    @rule()
    def hand_over(self) -> None:
        """Tickets reach their writers, and what is computed lands."""
        for receiver in self.host.decode:
            for told in receiver.take("reserved"):
                key = wire.key_from_pb(told.key)
                if key in self.jobs and not told.HasField("ticket"):
                    for sender in self.host.prefill:
                        sender.tell(Cancel(key, Cancelled("decode has all of it")))
                elif key in self.jobs:
                    ticket = receiver.plane.granted[TicketId(told.ticket.id)]
                    next(each for each in self.host.prefill if key in each.plane.opened).tell(GiveTicket(ticket))
        self.answer_planes()
        for sender in self.host.prefill:
            for key in tuple(sender.plane.sealed):
                receiver = self.receiver(key)
                if receiver is not None:
                    self.host.land(sender, receiver, key)
                    del sender.plane.sealed[key]
        self.read()

    def receiver(self, key: AttemptKey) -> DecodeNode | None:
        """Whoever waits for that hand-off."""
        for node in self.host.decode:
            for ticket in node.plane.granted.values():
                if ticket.key == key and key in self.jobs and ticket.id not in node.plane.committed:
                    return node
        return None

    def read(self) -> None:
        for node in self.host.nodes:
            for message in node.take("tokens"):
                for token in message.tokens:
                    key = wire.key_from_pb(token.key)
                    self.got.setdefault(key, []).append(token.token)
                    if token.finish:  # perhaps by the first token, which prefill draws: decode waits in vain
                        self.end(key)
            for kind in ("failed", "refused"):
                for told in node.take(kind):
                    self.end(wire.key_from_pb(told.key))

    # what has to hold

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "host"):
            self.host.check(idle=False)

    @invariant()
    def tokens_are_right(self) -> None:
        if hasattr(self, "host"):
            for key, job in self.jobs.items():
                got = self.got.get(key, [])
                assert got == reference(job)[: len(got)]

    @invariant()
    def tables_name_what_they_should(self) -> None:
        if not hasattr(self, "host"):
            return
        index = self.host.pool.core.memory.index
        for node in self.host.nodes:
            assert node.port is not None
            for sequence in node.scheduler.sequences():
                borrowed = [block for block in sequence.block_table if not node.pool.owns(block)]
                assert len(borrowed) == sequence.num_borrowed
                assert self.in_place or not borrowed
                assert bool(sequence.holds) >= bool(borrowed)
                for number, block in enumerate(sequence.block_table):
                    if not node.pool.owns(block):
                        assert index.name(block - node.port.start) == sequence.chain.name(number)

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for port in self.host.pool.ports:
            port.slow = False
            while port.lookups:
                port.lookups.popleft()()
        for _ in range(400):
            self.hand_over()
            stepped = [node.step() for node in self.host.nodes]
            self.read()
            self.host.settle()
            if not any(stepped):
                break
        for key in tuple(self.jobs):  # whose other half was refused
            self.end(key)
        self.host.settle()
        self.host.check()
        self.host.close()
        self.folder.cleanup()


NodesOnOnePool.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestNodesOnOnePool = NodesOnOnePool.TestCase
