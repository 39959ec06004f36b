"""Sessions of the service: closed when silent, bounded in number, evicted within a tenant first."""

from __future__ import annotations

import torch

from symbiosis.split.executor.policies import Opportunistic
from symbiosis.transport.messages import Kind
from tests.split.executor.service_bench import WIDTH, ServiceBench


def test_silent_sessions_are_closed_and_lost_ones_sooner():
    bench = ServiceBench()
    ann, bob, eve = bench.connect("ann"), bench.connect("bob"), bench.connect("eve")
    bench.port.unreachable.add(eve)
    bench.clock.now += 30
    bench.send(bob, Kind.STATS)
    bench.service.tidy()
    assert bench.service.stats()["sessions"] == 2
    assert eve in bench.port.forgotten
    bench.clock.now += 100
    bench.service.tidy()
    assert bench.port.forgotten == [eve, ann]
    bench.call(ann, torch.ones(1, WIDTH))
    assert bench.replies_to(ann)[-1].body["code"] == "hello_first"


def test_a_session_with_a_queued_call_is_not_closed():
    bench = ServiceBench(Opportunistic())
    ann = bench.connect()
    bench.call(ann, torch.ones(1, WIDTH))
    bench.clock.now += 1000
    bench.service.tidy()
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY


def test_a_tenant_that_opens_many_sessions_evicts_its_own():
    bench = ServiceBench(max_sessions=8)
    ann, bob = bench.connect("ann"), bench.connect("bob")
    for _ in range(100):
        bench.clock.now += 0.001
        bench.connect("eve")
    assert bench.service.stats()["sessions"] == 8
    bench.call(ann, torch.ones(1, WIDTH))
    bench.call(bob, torch.ones(1, WIDTH))
    bench.run()
    assert bench.reply_to(ann).kind is bench.reply_to(bob).kind is Kind.REPLY
    assert bench.connect("carol").session is not None


def test_one_more_session_is_rejected_if_all_are_busy():
    bench = ServiceBench(max_sessions=2)
    for peer in (bench.connect(), bench.connect()):
        bench.call(peer, torch.ones(1, WIDTH))
    third = bench.new_peer()
    bench.send(third, Kind.HELLO)
    assert bench.reply_to(third).body["code"] == "too_many_calls"


def test_the_tenant_with_the_most_sessions_evicts_none_of_others():
    bench = ServiceBench(max_sessions=4)
    bob = bench.connect("bob")
    for peer in (bench.connect("eve"), bench.connect("eve"), bench.connect("eve")):
        bench.call(peer, torch.ones(1, WIDTH))
    more = bench.new_peer()
    bench.send(more, Kind.HELLO, body={"name": "eve"})
    assert bench.reply_to(more).body["code"] == "too_many_calls"
    assert bob.session is not None
    assert bench.connect("carol").session is not None  # evicts bob's session: eve's are busy
    assert bob.session is None


def test_sessions_of_an_authenticated_tenant_are_bounded_and_one_more_evicts_its_own():
    bench = ServiceBench(max_tenant_sessions=3)
    bob = bench.connect("bob")
    mine = [bench.new_peer("eve") for _ in range(4)]
    for peer in mine[:3]:
        bench.send(peer, Kind.HELLO)
        bench.clock.now += 1
    bench.call(mine[0], torch.ones(1, WIDTH))
    bench.send(mine[3], Kind.HELLO)
    assert [peer.session is not None for peer in mine] == [True, False, True, True]
    for peer in mine[2:]:
        bench.call(peer, torch.ones(1, WIDTH))
    bench.send(mine[1], Kind.HELLO)
    refused = bench.replies_to(mine[1])[-1].body
    assert refused["code"] == "too_many_calls"
    assert "of this tenant" in refused["message"]
    assert bob.session is not None
