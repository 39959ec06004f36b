"""Over every link: a tenant's mistake is an error of that tenant alone."""

from __future__ import annotations

import threading

import pytest
import torch

from symbiosis.errors import BadCall, TooLarge, UnknownLayer
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import Direction
from tests.conftest import Serve, Served
from tests.policies import PairPolicy

BACK = Direction.BACKWARD
X = torch.zeros(3, 64)
LONG = torch.zeros(3, 64, dtype=torch.int64)

BAD = [
    (BadCall, Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(3, 63),))),
    (BadCall, Message(Kind.CALL, layers=(0,), tensors=(LONG,))),
    (BadCall, Message(Kind.CALL, layers=(0,), tensors=(LONG.to(torch.uint8),))),
    (UnknownLayer, Message(Kind.CALL, layers=(4_000,), tensors=(X,))),
    (TooLarge, Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(0, 64),))),
    (TooLarge, Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(8193, 64),))),
    (BadCall, Message(Kind.CALL, layers=(0,), tensors=())),
    (BadCall, Message(Kind.CALL, layers=(0,), tensors=(X, X))),
    (BadCall, Message(Kind.CALL, layers=(0,), tensors=(X, X[:2]))),
    (BadCall, Message(Kind.CALL, layers=(), tensors=(X,))),
    (BadCall, Message(Kind.CALL, layers=(0, 1, 2), direction=BACK, tensors=(X, X))),
    (BadCall, Message(Kind.CALL, layers=(0, 1), direction=BACK, tensors=(X, torch.zeros(2, 32)))),
    (BadCall, Message(Kind.WELCOME)),
    (BadCall, Message(Kind.REPLY)),
    (BadCall, Message(Kind.ERROR)),
    (BadCall, Message(Kind.BLOB, body={"sha256": "0" * 64, "offset": 0})),
    (BadCall, Message(Kind.BLOB)),
    (BadCall, Message(Kind.FETCH, layers=(0,), body={"name": "weight", "start": 1 << 40})),
    (BadCall, Message(Kind.FETCH, layers=(0,), body={"name": "bias", "start": 0})),
    (UnknownLayer, Message(Kind.FETCH)),
]


def test_a_bad_call_fails_only_its_own_tenant(link: Served, tiny, ids):
    good, bad = link.connect("ann"), link.raw("bob")
    stop, wrong = threading.Event(), []
    expected = tiny(ids).logits

    def work() -> None:
        while not stop.is_set():
            try:
                torch.testing.assert_close(good(ids).logits, expected, rtol=0, atol=1e-5)
            except BaseException as error:
                wrong.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for kind, message in BAD:
            with pytest.raises(kind):
                bad.request(message)
        reply = bad.request(Message(Kind.CALL, layers=(0,), tensors=(X,)))
        assert reply.tensors[0].shape[0] == 3
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    figures = link.executor.stats()["tenants"]
    assert figures["bob"]["errors"] == len(BAD)
    assert figures["ann"]["errors"] == 0


@pytest.mark.parametrize("kind", ["inproc", "shm", "tcp"])
def test_expert_indices_out_of_range_are_rejected_over_every_link(serve: Serve, kind: str):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    served = serve(kind, model=MixtralForCausalLM(config).eval())
    handle = next(s.handle for s in served.executor.manifest().layers if s.kind == "experts")
    raw, rows, weight = served.raw(), torch.zeros(3, 32), torch.ones(3, 2)
    for index in (4, -1, 2**40, -(2**63)):
        with pytest.raises(BadCall, match="indices"):
            raw.request(Message(Kind.CALL, layers=(handle,), tensors=(rows, torch.full((3, 2), index), weight)))
    good = raw.request(Message(Kind.CALL, layers=(handle,), tensors=(rows, torch.zeros(3, 2, dtype=torch.int64), weight)))
    assert good.tensors[0].shape == (3, 32)


def test_the_client_splits_calls_whose_rows_choose_many_experts(serve: Serve):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=16, num_experts_per_tok=12,
    )  # fmt: skip
    plain = MixtralForCausalLM(config).eval().requires_grad_(False)
    served = serve("inproc", model=plain, limits={"max_rows": 16})
    model, ids = served.connect(), torch.arange(30).reshape(2, 15)
    found, expected = (torch.ones(32, requires_grad=True) for _ in range(2))
    for one, scale in ((model, found), (plain, expected)):
        rows = one.get_input_embeddings()(ids) * scale
        one(inputs_embeds=rows).logits.square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("direction", [Direction.FORWARD, BACK])
def test_denormal_numbers_count_as_zero(link: Served, direction: Direction):
    reply = link.raw().request(Message(Kind.CALL, layers=(0,), direction=direction, tensors=(torch.full((3, 64), 1e-40),)))
    assert not reply.tensors[0].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_poisoned_rows_do_not_change_other_rows_of_the_batch(link: Served, poison: float):
    link.executor.use_policy(PairPolicy())
    ann, eve = link.raw("ann"), link.raw("bob")
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(5))

    def run_together(guest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        replies: dict[str, torch.Tensor] = {}

        def call(name: str, link, rows: torch.Tensor) -> None:
            replies[name] = link.request(Message(Kind.CALL, layers=(0,), tensors=(rows,))).tensors[0]

        # eve first: her rows precede ann's
        first = threading.Thread(target=call, args=("eve", eve, guest))
        first.start()
        while not link.executor.stats()["queued"]:
            pass
        call("ann", ann, rows)
        first.join()
        return replies["ann"], replies["eve"]

    harmless, _ = run_together(torch.ones(3, 64))
    with_poison, poisoned = run_together(torch.full((3, 64), poison))
    assert torch.equal(harmless, with_poison)
    assert not (poisoned.abs() < 1e30).all()


def test_an_error_states_what_was_wrong_and_what_to_do(link: Served):
    raw = link.raw()
    with pytest.raises(TooLarge, match="1 to 8192 rows, got 9000: split the call"):
        raw.request(Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(9000, 64),)))
    with pytest.raises(BadCall, match=r"q_proj takes rows of width 64, got 63"):
        raw.request(Message(Kind.CALL, layers=(0,), tensors=(torch.zeros(2, 63),)))
