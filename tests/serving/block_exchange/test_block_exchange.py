"""Requests that go on at another engine, with blocks of the first: the tokens of an undisturbed run, whatever fails."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from symbiosis.serving.block_exchange import messages
from symbiosis.serving.scheduling.sequence import Sampling, SequenceState
from symbiosis.transport.shm import runtime_folder
from tests.lora import with_random_lora
from tests.serving.block_exchange.nodes import BLOCK_BYTES, BLOCK_SIZE, Node, complete, exchange_until

GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = Sampling(seed=5, max_tokens=24, ignore_eos=True)
CUT = 13


def make_prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


PROMPT = make_prompt(101)


@pytest.fixture
def nodes(tiny):
    made = []

    def make(count=2, **options):
        made.extend(Node(tiny, **options) for _ in range(count))
        return made[-count:]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(messages, "PIECE_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(messages, "MIN_PIECES", 1)
    monkeypatch.setattr(messages, "WINDOW_BYTES", 6 * BLOCK_BYTES)


def is_over(node):
    return not node.core.block_fetches._fetches and not node.core.block_fetches._waiting


def move(source, target, prompt, sampling, n=1, *, cut=CUT, **more):
    """A request leaves `source` after `cut` tokens of each completion: its sequences at `target`."""
    sequences = source.add(prompt, sampling, n, **more)
    while any(sequence.output_length < cut for sequence in sequences):
        source.step()
    delivered = [sequence.outputs[:cut] for sequence in sequences]
    for sequence in sequences:
        source.core.cancel(sequence)
    return target.add(prompt, sampling, n, resume=delivered, source=source.address, **more)


LINKS = {"folder": {}, "host": {"on_host": True}, "local": {"on_host": True, "is_local": True}}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_moved_request_has_the_tokens_of_an_undisturbed_one(nodes, small_pieces, sampling, link):
    plain, source, target = nodes(3, **LINKS[link])
    expected = complete(plain, PROMPT, sampling)
    target.limit(BLOCK_SIZE)
    (moved,) = move(source, target, PROMPT, sampling)
    target.step()
    rows = target.core.num_rows
    exchange_until(lambda: is_over(target), source, target)
    assert moved.num_computed_tokens == (len(PROMPT) + CUT - 1) // BLOCK_SIZE * BLOCK_SIZE
    target.finish()
    assert [moved.outputs] == expected
    assert target.core.num_rows - rows < BLOCK_SIZE + 24 - CUT
    assert target.blocks.num_received == source.blocks.num_sent == (len(PROMPT) + CUT - 1) // BLOCK_SIZE - 1


@pytest.mark.parametrize(
    "local", ["ipc:///nowhere/ipc-1-blocks", "ipc://{folder}/ipc-1-blocks", "ipc://{folder}", "tcp://127.0.0.1:1"]
)
def test_blocks_come_over_tcp_if_the_engine_is_not_on_this_host(nodes, local):
    source, target = nodes(2, on_host=True)
    expected = complete(source, PROMPT, GREEDY)
    target.limit(BLOCK_SIZE)
    address = replace(source.address, local=local.format(folder=runtime_folder()))
    (asked,) = target.add(PROMPT, GREEDY, source=address)
    target.step()
    exchange_until(lambda: is_over(target), source, target)
    target.finish()
    assert [asked.outputs] == expected
    assert target.blocks.num_received == 24


def test_the_two_meet_while_both_go_on(nodes, small_pieces):
    plain, source, target = nodes(3)
    target.limit(2 * BLOCK_SIZE)
    (moved,) = move(source, target, PROMPT, GREEDY)
    while not is_over(target):
        target.step()
        before = target.blocks.num_received
        exchange_until(lambda: target.blocks.num_received > before or is_over(target), source, target)  # noqa: B023
    target.finish()
    assert [moved.outputs] == complete(plain, PROMPT, GREEDY)
    assert 0 < target.blocks.num_received < len(PROMPT) // BLOCK_SIZE


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_several_completions_of_a_prompt_move_together(nodes, small_pieces, sampling):
    plain, source, target = nodes(3)
    expected = complete(plain, PROMPT, sampling, 4)
    target.limit(BLOCK_SIZE)
    moved = move(source, target, PROMPT, sampling, 4)
    while not target.core.is_idle():
        target.step()
        exchange_until(lambda: not target.core.block_fetches._fetches, source, target)
    assert [sequence.outputs for sequence in moved] == expected
    assert 24 < target.blocks.num_received < 24 + 4 * 4, "the prompt comes once"


def test_blocks_of_an_adapter_move(nodes, small_pieces, tiny, tmp_path):
    import copy

    with_random_lora(copy.deepcopy(tiny)).save_pretrained(tmp_path)
    plain, source, target = nodes(3)
    for node in (plain, source, target):
        node.core.add_adapter("pirate", tmp_path)
    expected = complete(plain, PROMPT, GREEDY, adapter="pirate")
    assert expected != complete(plain, PROMPT, GREEDY)
    target.limit(BLOCK_SIZE)
    (moved,) = move(source, target, PROMPT, GREEDY, adapter="pirate")
    while moved.state is not SequenceState.RUNNING:
        target.step()
    exchange_until(lambda: is_over(target), source, target)
    target.finish()
    assert [moved.outputs] == expected
    assert target.blocks.num_received > 10


def test_a_new_request_fetches_the_prefix_that_another_engine_has(nodes):
    source, target = nodes(2)
    expected = complete(source, PROMPT, GREEDY, 3)
    target.limit(BLOCK_SIZE)
    asked = target.add(PROMPT, GREEDY, 3, source=source.address)
    target.step()
    exchange_until(lambda: not target.core.block_fetches._fetches, source, target)
    target.finish()
    assert [sequence.outputs for sequence in asked] == expected
    assert target.blocks.num_received == source.blocks.num_sent == 24


def test_another_tenant_gets_no_block(nodes):
    source, target = nodes(2)
    complete(source, PROMPT, GREEDY, tenant="ann")
    target.limit(BLOCK_SIZE)
    target.add(PROMPT, GREEDY, tenant="bob", source=source.address)
    target.step()
    exchange_until(lambda: is_over(target), source, target)
    target.finish()
    assert target.blocks.num_received == source.blocks.num_sent == 0


def test_blocks_in_host_memory_are_sent(nodes, small_pieces):
    plain, target = nodes(2)
    (source,) = nodes(1, pages=40, host_cache_bytes=200 * BLOCK_BYTES)
    source.core.host_tier.copy_s = 0.0
    expected = complete(plain, PROMPT, GREEDY)
    complete(source, PROMPT, GREEDY)
    complete(source, make_prompt(120, seed=1), GREEDY)  # evicts the first
    assert source.blocks.host.num_stored > 10
    target.limit(BLOCK_SIZE)
    (asked,) = target.add(PROMPT, GREEDY, source=source.address)
    target.step()
    exchange_until(lambda: is_over(target), source, target)
    target.finish()
    assert [asked.outputs] == expected
    assert target.blocks.num_received > 20


# Faults


@pytest.mark.parametrize("cut", range(4))
def test_the_source_ends_in_mid_copy(nodes, small_pieces, monkeypatch, cut):
    monkeypatch.setattr("symbiosis.serving.block_exchange.block_client._SILENCE_S", 0.2)
    plain, source, target = nodes(3)
    target.limit(BLOCK_SIZE)
    (moved,) = move(source, target, PROMPT, GREEDY)
    target.step()
    exchange_until(lambda: target.blocks.num_received >= 3 * cut, source, target)
    source.close()
    exchange_until(lambda: is_over(target), target)
    target.finish()
    assert [moved.outputs] == complete(plain, PROMPT, GREEDY)


def test_there_is_no_source(nodes, small_pieces, monkeypatch):
    monkeypatch.setattr("symbiosis.serving.block_exchange.block_client._SILENCE_S", 0.2)
    plain, source, target = nodes(3)
    source.close()
    (asked,) = target.add(PROMPT, GREEDY, source=source.address)
    target.finish()  # without waiting for it
    assert [asked.outputs] == complete(plain, PROMPT, GREEDY)


def test_the_source_evicts_blocks_in_mid_copy(nodes, small_pieces):
    plain, target = nodes(2)
    (source,) = nodes(1, pages=40)
    target.limit(BLOCK_SIZE)
    (moved,) = move(source, target, PROMPT, GREEDY)
    target.step()
    exchange_until(lambda: target.blocks.num_received >= 6, source, target)
    complete(source, make_prompt(120, seed=2), GREEDY)
    exchange_until(lambda: is_over(target), source, target)
    assert target.blocks.num_received < 20
    target.finish()
    assert [moved.outputs] == complete(plain, PROMPT, GREEDY)


def test_the_source_has_lost_the_last_blocks(nodes, small_pieces):
    plain, target = nodes(2)
    (source,) = nodes(1, pages=40)
    complete(source, PROMPT, GREEDY)
    source.core.add(make_prompt(60, seed=2), GREEDY)
    source.step()
    source.core.cancel(next(iter(source.core.scheduler._sequences.values())))
    target.limit(BLOCK_SIZE)
    (asked,) = target.add(PROMPT, GREEDY, source=source.address)
    target.step()
    exchange_until(lambda: is_over(target), source, target)
    assert 0 < target.blocks.num_received < 24
    target.finish()
    assert [asked.outputs] == complete(plain, PROMPT, GREEDY)


@pytest.mark.parametrize("how", ["cancel", "preempt", "fail"])
def test_a_sequence_loses_its_blocks_in_mid_copy(nodes, small_pieces, how):
    plain, source, target = nodes(3)
    target.limit(BLOCK_SIZE)
    (moved,) = move(source, target, PROMPT, GREEDY)
    target.step()
    exchange_until(lambda: target.blocks.num_received >= 3, source, target)
    if how == "cancel":
        target.core.cancel(moved)
    elif how == "preempt":
        target.core.scheduler.preempt(target.core.scheduler.schedule(0.0))
    else:
        target.core._fail(moved, RuntimeError("a test"))
    exchange_until(lambda: not target.core.block_fetches._fetches, source, target)
    target.finish()
    if how == "preempt":
        exchange_until(lambda: is_over(target), source, target)
        assert [moved.outputs] == complete(plain, PROMPT, GREEDY)
    exchange_until(lambda: not source.exchange._server._sendings, source, target)
    target.core.scheduler.check_integrity()
    assert target.blocks.num_free_blocks == target.blocks.num_blocks


def test_no_more_is_sent_than_the_target_takes(nodes, small_pieces):
    source, target = nodes(2)
    target.limit(BLOCK_SIZE)
    move(source, target, PROMPT, GREEDY)
    target.step()
    exchange_until(lambda: source.blocks.num_sent >= 6, source)
    for _ in range(10):
        source.run_calls(0.01)
    assert source.blocks.num_sent == 6
    target.core.cancel(next(iter(target.core.scheduler._sequences.values())))


def test_sequences_of_the_source_go_on_while_it_sends(nodes, small_pieces):
    plain, source, target = nodes(3)
    other = make_prompt(30, seed=4)
    expected = complete(plain, other, GREEDY)
    target.limit(BLOCK_SIZE)
    (moved,) = move(source, target, PROMPT, GREEDY)
    (running,) = source.add(other, GREEDY)
    target.step()
    while not is_over(target):
        source.step()
        sent = source.blocks.num_sent
        source.run_calls(0.005)
        assert source.blocks.num_sent - sent <= 6, "two pieces between two steps"
        target.run_calls(0.005)
    source.finish()
    target.finish()
    assert [running.outputs] == expected
    assert [moved.outputs] == complete(plain, PROMPT, GREEDY)


def test_engines_with_another_layout_or_model_exchange_nothing(nodes, tiny):
    (source,) = nodes(1)
    for options in ({"fingerprint": "another model"}, {"dtype": torch.bfloat16}):
        model = tiny
        if dtype := options.pop("dtype", None):
            import copy

            model = copy.deepcopy(tiny).to(dtype)
        target = Node(model, **options)
        complete(source, PROMPT, GREEDY)
        target.limit(BLOCK_SIZE)
        target.add(PROMPT, GREEDY, source=source.address)
        target.step()
        exchange_until(lambda: is_over(target), source, target)  # noqa: B023
        target.finish()
        target.close()
        assert source.blocks.num_sent == target.blocks.num_received == 0


def test_short_prefixes_are_computed(nodes):
    source, target = nodes(2)
    target.core.block_fetches.start_s = 0.01
    complete(source, PROMPT, GREEDY)
    target.add(PROMPT, GREEDY, source=source.address)
    target.finish()
    assert is_over(target)
    assert source.blocks.num_sent == 0


def test_threads_end(tiny):
    node = Node(tiny)
    node.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("symbiosis-blocks")]
