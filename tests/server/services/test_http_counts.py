"""Counts of HTTP processes over a real IPC server; the tests are the HTTP processes."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from symbiosis.errors import SymbiosisError
from symbiosis.models.loading import shared_copy
from symbiosis.server.services.http_counts import HttpCounts
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_service import EngineService
from symbiosis.transport.engine_ipc import EngineListener
from symbiosis.transport.shm import runtime_folder
from tests.app.service_harness import IpcPeer
from tests.finetuning.trainer_reference import base


@contextmanager
def running(collect=lambda deliver: deliver({"collected": True})):
    engine = EngineService(EngineCore(shared_copy(base())), EngineListener(runtime_folder()))
    counts, peers = HttpCounts(engine.rpc, collect), [IpcPeer(engine.address.messages) for _ in range(2)]
    try:
        yield engine, counts, peers
    finally:
        for peer in peers:
            peer.close()
        engine.rpc.close()


def tokens(count: int) -> list:
    return [["generated_tokens", ["ann"], [count]]]


def started(peer: IpcPeer, id: str = "7") -> None:
    """Reporting, and known to the server."""
    peer.send(op="report", id=id)
    peer.stats()


def answer(peer: IpcPeer, counted: list, **more) -> None:
    """Wait for the request to flush, and send what was counted."""
    peer.wait_for(lambda: peer.of("7"))
    peer.send(op="count", id="0", counted=counted, flush=peer.of("7")[-1]["flush"], **more)


def test_a_flush_waits_for_what_every_process_has_counted():
    with running() as (_, counts, peers):
        for peer in peers:
            started(peer)
        peers[0].send(op="count", id="0", counted=tokens(1))
        flush = threading.Thread(target=counts.flush)
        flush.start()
        answer(peers[0], tokens(10), jobs=[["ann", "running", 2]])
        answer(peers[1], tokens(100))
        flush.join()
        assert counts.tenants()["ann"]["generated_tokens"] == 111
        assert counts.jobs() == [("ann", "running", 2)]


def test_a_process_that_is_silent_or_lost_does_not_block_a_flush():
    with running() as (_, counts, peers):
        for peer in peers:
            started(peer)
        counts.flush()  # returns, although neither replies
        answer(peers[0], tokens(5))  # late, and counted all the same
        peers[0].stats()
        assert counts.tenants()["ann"]["generated_tokens"] == 5
        counts.drop_peer("1")
        counts.drop_peer("2")
        counts.flush()
        assert counts.tenants()["ann"]["generated_tokens"] == 5, "what a lost process counted stays"


def test_statistics_are_what_is_collected_or_why_not():
    with running() as (_, _, peers):
        peers[0].send(op="statistics", id="1")
        peers[0].wait("1")
        assert peers[0].of("1") == [{"id": "1", "settled": {"collected": True}}]
    with running(lambda deliver: deliver(SymbiosisError("not now"))) as (_, _, peers):
        peers[0].send(op="statistics", id="1")
        peers[0].wait("1")
        assert peers[0].of("1")[0]["refused"]["message"] == "not now"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"counted": 3},
        {"counted": [3]},
        {"counted": [], "jobs": [1]},
        {"counted": [], "jobs": 1},
        {"counted": [], "flush": "x"},
    ],
)
def test_malformed_counts_are_rejected(body):
    with running() as (_, counts, peers):
        peers[0].send(op="count", id="5", **body)
        peers[0].wait("5")
        assert peers[0].of("5")[0]["refused"]["code"] == "bad_message"
        assert not counts.tenants()
