"""One contract for every link: the plain model's numbers, one reply to every call, a clean end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

from symbiosis.errors import Closed, SymbiosisError
from symbiosis.split.executor import loop, service
from symbiosis.transport.inproc import PendingReply
from symbiosis.transport.messages import Kind, Message
from symbiosis.transport.zmq_client import Connection
from symbiosis.types import Direction
from tests.conftest import LINKS, Serve, Served, tiny_config
from tests.lora import with_random_lora
from tests.policies import NeverPolicy


def adapted(model):
    return with_random_lora(model, ("q_proj", "v_proj", "down_proj"), seed=3)


def gradients(model, ids) -> dict[str, torch.Tensor]:
    model(ids, labels=ids).loss.backward()
    return {name.split("model.", 1)[1]: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_copy(tiny: LlamaForCausalLM) -> LlamaForCausalLM:
    model = LlamaForCausalLM(tiny_config()).eval()
    model.load_state_dict(tiny.state_dict())
    return model


def test_logits_equal_those_of_the_plain_model(link: Served, tiny, ids):
    torch.testing.assert_close(link.connect()(ids).logits, tiny(ids).logits, rtol=0, atol=1e-6)


def test_gradients_equal_those_of_the_plain_model(link: Served, tiny, ids):
    expected = gradients(adapted(plain_copy(tiny)), ids)
    actual = gradients(adapted(link.connect()), ids)
    assert expected.keys() == actual.keys()
    assert expected
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-5, atol=1e-8)


def test_generated_tokens_equal_those_of_the_plain_model(link: Served, tiny, ids):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(link.connect().generate(ids, **options), tiny.generate(ids, **options))


def test_several_threads_share_one_session(link: Served, tiny):
    model = link.connect()
    inputs = [torch.randint(0, 128, (1, 5 + i)) for i in range(8)]
    with ThreadPoolExecutor(4) as pool, torch.no_grad():
        results = list(pool.map(lambda x: model(x).logits, inputs * 3))
    for x, logits in zip(inputs * 3, results, strict=True):
        torch.testing.assert_close(logits, tiny(x).logits, rtol=0, atol=1e-5)


def test_many_sessions_at_once(link: Served, tiny):
    names = ["ann", "bob"] * 4
    models = [link.connect(name) for name in names]
    start = threading.Barrier(len(models))

    def work(model) -> torch.Tensor:
        x = torch.randint(0, 128, (2, 6), generator=torch.Generator().manual_seed(id(model) % 1000))
        start.wait()
        for _ in range(3):
            logits = model(x).logits
        torch.testing.assert_close(logits, tiny(x).logits, rtol=0, atol=1e-5)
        return logits

    with ThreadPoolExecutor(len(models)) as pool:
        assert len(list(pool.map(work, models))) == len(models)
    stats = link.executor.stats()
    assert set(stats["tenants"]) == {"ann", "bob"}
    assert stats["tenants"]["ann"]["calls"] + stats["tenants"]["bob"]["calls"] == stats["calls"]


def test_several_forwards_can_precede_the_backwards_in_any_order(link: Served, tiny, ids):
    model, plain = adapted(link.connect()), adapted(plain_copy(tiny))
    for each in (model, plain):
        losses = [each(ids[i : i + 1], labels=ids[i : i + 1]).loss for i in (0, 1)]
        losses[1].backward()
        losses[0].backward()
    ours = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for name, p in plain.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("limits", [{"max_rows": 5}, {"max_bytes": 1 << 16}])
def test_calls_beyond_the_executors_limits_are_split(serve: Serve, kind: str, limits: dict[str, int], tiny):
    served = serve(kind, limits=limits)
    ids = torch.randint(0, 128, (3, 70))
    expected, actual = gradients(adapted(plain_copy(tiny)), ids), gradients(adapted(served.connect()), ids)
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-4, atol=1e-7)
    most = limits.get("max_rows", (1 << 16) // (64 * 4))
    assert served.executor.stats()["mean_rows"] <= most


def test_stats_are_the_same_from_both_ends(link: Served, ids):
    model = link.connect()
    model(ids)
    here, there = link.executor.stats(), model.symbiosis.stats()
    for figure in ("calls", "batches", "rows", "tokens", "bytes_held", "layers"):
        assert here[figure] == there[figure]
    assert here["tokens"] == ids.numel()
    assert here["tenants"]["ann"]["sessions"] == 1
    assert here["tenants"]["ann"]["errors"] == 0


def test_a_closed_session_raises_closed_and_the_executor_forgets_it(link: Served, ids):
    model, other = link.connect("ann"), link.connect("bob")
    model.symbiosis.close()
    model.symbiosis.close()
    with pytest.raises(Closed, match="connect again"):
        model(ids)
    while link.executor.stats()["tenants"]["ann"]["sessions"]:
        other(ids)  # the executor handles BYE in its own loop
    assert link.executor.stats()["sessions"] == 1


def test_a_closed_executor_accepts_no_session(link: Served):
    link.executor.close()
    with pytest.raises(Closed):
        link.executor.listen("tcp://127.0.0.1:0")
    if link.kind == "inproc":
        with pytest.raises(Closed):
            link.connect()


def test_the_call_after_an_interrupt_gets_the_right_reply(link: Served, tiny, ids, monkeypatch):
    """Like Ctrl-C in a notebook, at every point of a request."""
    model = link.connect()
    raw = model.symbiosis._link

    class Interrupt(BaseException):
        pass

    for name in ("send", "_receive") if link.kind != "inproc" else ("wait",):
        target = Connection if link.kind != "inproc" else PendingReply
        real = getattr(target, name)
        hits = iter(range(10))

        def interrupted(*args, real=real, hits=hits):
            if next(hits, 0) == 1:
                raise Interrupt
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(target, name, interrupted)
            with pytest.raises(Interrupt):
                model(ids)
        torch.testing.assert_close(model(ids).logits, tiny(ids).logits, rtol=0, atol=1e-6)
    assert raw.request(Message(Kind.STATS)).body["queued"] == 0


def test_closing_a_session_unblocks_its_other_threads(link: Served):
    policy = NeverPolicy()
    link.executor.use_policy(policy)
    raw = link.raw()
    failed: list[SymbiosisError] = []

    def wait() -> None:
        try:
            raw.request(Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(3, 64),)))
        except SymbiosisError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert policy.called.wait(20)
    raw.close()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(failed[0], Closed)


def test_closing_the_executor_unblocks_its_tenants(link: Served):
    policy = NeverPolicy()
    link.executor.use_policy(policy)
    raw = link.raw(grace_s=0.5)
    failed: list[SymbiosisError] = []

    def wait() -> None:
        try:
            raw.request(Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(3, 64),)))
        except SymbiosisError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert policy.called.wait(20)
    link.executor.close()
    thread.join(20)
    assert not thread.is_alive()
    assert failed[0].code in ("closed", "executor_lost")


def test_a_dead_loop_leaves_no_tenant_waiting(link: Served, monkeypatch):
    raw = link.raw(grace_s=0.5)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    class Fatal(BaseException):
        pass

    def step() -> None:
        if link.executor._service.batcher.queue:
            raise Fatal

    monkeypatch.setattr(link.executor._service.batcher, "step", step)
    with pytest.raises(SymbiosisError) as caught:
        raw.request(Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(3, 64),)))
    assert caught.value.code in ("closed", "executor_lost")
    with pytest.raises(Closed):
        link.executor.listen("tcp://127.0.0.1:0")


def test_a_message_that_fails_does_not_affect_the_next(link: Served, tiny, ids, monkeypatch):
    model = link.connect()
    service = link.executor._service
    with monkeypatch.context() as patch:
        patch.setattr(service.batcher.validator, "_check", lambda *a: 1 / 0)
        with pytest.raises(SymbiosisError, match="ZeroDivisionError"):
            model(ids)
    with monkeypatch.context() as patch:
        patch.setattr(service.batcher, "policy", None)
        with pytest.raises(SymbiosisError, match="policy failed"):
            model(ids)
    torch.testing.assert_close(model(ids).logits, tiny(ids).logits, rtol=0, atol=1e-6)


def test_a_call_leaves_nothing_in_the_executor(link: Served, ids):
    model = adapted(link.connect())
    before = link.executor.stats()["bytes_held"]
    model(ids, labels=ids).loss.backward()
    stats = link.executor.stats()
    assert stats["bytes_held"] == before
    assert stats["queued"] == 0
    assert link.executor._service.batcher.queued_bytes == 0


def test_backward_needs_no_state_of_forward(link: Served, tiny):
    """The executor gets a backward call without a forward call before."""
    raw = link.raw()
    handle = next(s.handle for s in link.executor.manifest().layers if s.paths[0].endswith("layers.0.mlp.down_proj"))
    grad = torch.randn(4, 64)
    reply = raw.request(Message(Kind.CALL, layers=(handle,), direction=Direction.BACKWARD, tensors=(grad,)))
    torch.testing.assert_close(reply.tensors[0], grad @ tiny.model.layers[0].mlp.down_proj.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", LINKS)
def test_a_session_forgotten_for_silence_works_again(serve: Serve, kind, tiny, ids, monkeypatch):
    monkeypatch.setattr(loop, "_TIDY_EVERY_S", 0.02)
    served = serve(kind)
    model = served.connect()
    for _ in range(2):
        torch.testing.assert_close(model(ids).logits, tiny(ids).logits, rtol=0, atol=1e-6)
        with monkeypatch.context() as impatient:  # not during calls, which on a slow machine would count as silence
            impatient.setattr(service, "_LOOK_AFTER_S", 0.0)
            impatient.setattr(service, "_FORGET_AFTER_S", 0.0)
            while served.executor.stats()["sessions"]:
                time.sleep(0.01)  # until the executor's loop has forgotten the session
