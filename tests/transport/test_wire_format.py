"""Rows on the wire: exact or bfloat16, one call or several parts in flight, and peers without the dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zmq

import symbiosis
from symbiosis.errors import BadCall, DtypeMissing, SymbiosisError, TooLarge
from symbiosis.models.device_dtype import check_dtype
from symbiosis.split.client import session as client_session
from symbiosis.transport.messages import DTYPE_NAMES, Kind, Message, decode, encode
from symbiosis.transport.tcp import TcpLink
from symbiosis.transport.wire_format import WireFormat
from symbiosis.types import Direction
from tests.conftest import Serve, Served
from tests.lora import ALL_LINEAR, with_random_lora

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def train_step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and the gradients of one step."""
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}}


def use_parts(monkeypatch: pytest.MonkeyPatch, model: Any, in_flight: int) -> None:
    """Divide every call into parts that are in flight together."""
    monkeypatch.setattr(client_session, "_PART_BYTES", 1)
    model.symbiosis._link.max_in_flight = in_flight


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_results_keep_the_dtype_of_the_rows(serve: Serve, dtype: torch.dtype, direction: Direction):
    served = serve("tcp")
    hello: dict[str, Any] = {"token": None, "hello": {}, "grace_s": 20.0}
    exact, rounded = (TcpLink(served.address, wire=wire, **hello) for wire in WireFormat)
    rows = torch.randn(2, 3, 64).to(dtype)
    message = {"kind": Kind.CALL, "layers": (0,), "direction": direction}
    (expected,), (found,) = (link.call(Message(**message, tensors=(rows,)), [64]) for link in (exact, rounded))
    assert (found.dtype, found.shape) == (dtype, (2, 3, 64))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    for link in (exact, rounded):
        link.close()


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), tuple(ALL_LINEAR)], ids=["q, v", "all"])
def test_a_step_with_bf16_on_the_wire_is_near_the_exact_one(serve: Serve, ids, targets):
    served = serve("tcp")
    exact, rounded = (with_random_lora(served.connect(wire=wire), targets) for wire in ("exact", "bf16"))
    expected, found = train_step(exact, ids), train_step(rounded, ids)
    assert not torch.equal(found["loss"], expected["loss"])
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        scale = float(tensor.abs().max()) + 1e-6
        torch.testing.assert_close(found[name] / scale, tensor / scale, rtol=0, atol=0.06)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), tuple(ALL_LINEAR)], ids=["q, v", "all"])
def test_calls_in_parts_give_the_results_of_whole_calls(serve: Serve, ids, targets, in_flight: int, monkeypatch):
    served = serve("tcp")
    whole = with_random_lora(served.connect("ann"), targets)
    expected = train_step(whole, ids)
    parts = with_random_lora(served.connect("bob"), targets)
    use_parts(monkeypatch, parts, in_flight)
    before = parts.symbiosis.traffic()
    found = train_step(parts, ids)
    after = parts.symbiosis.traffic()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    trips = after["round_trips"] - before["round_trips"]
    assert after["messages"] - before["messages"] == in_flight * trips
    assert served.executor.stats()["tenants"]["bob"]["errors"] == 0


def test_an_error_of_one_part_is_raised_once_and_the_session_goes_on(serve: Serve):
    link = serve("tcp").raw()
    link.max_in_flight = 3
    good, bad = torch.ones(2, 64), torch.ones(2, 63)
    with pytest.raises(BadCall, match="width 64, got 63"):
        link.call_all([Message(Kind.CALL, 0, (0,), tensors=(rows,)) for rows in (good, bad, good, good)], [64])
    replies = link.call_all([Message(Kind.CALL, 0, (0,), tensors=(n * good,)) for n in range(7)], [64])
    for number, (reply,) in enumerate(replies):
        torch.testing.assert_close(reply, number * replies[1][0])


def test_a_link_that_was_closed_refuses_calls_in_parts(serve: Serve):
    link = serve("tcp").raw()
    link.close()
    with pytest.raises(SymbiosisError, match="closed"):
        link.call_all([Message(Kind.CALL, 0, (0,), tensors=(torch.ones(2, 64),)) for _ in range(3)], [64])


def test_traffic_counts_round_trips_and_bytes(serve: Serve, ids):
    served = serve("tcp")
    model = served.connect()
    before = model.symbiosis.traffic()
    model(ids)
    after = model.symbiosis.traffic()
    assert after["round_trips"] > before["round_trips"]
    assert after["sent_bytes"] - before["sent_bytes"] > ids.numel() * 64 * 4
    assert after["received_bytes"] - before["received_bytes"] > ids.numel() * 64 * 4
    assert set(serve("inproc").connect().symbiosis.traffic().values()) == {0}


@pytest.mark.parametrize("wire", ["zip", "", "BF16", "fp16"])
def test_an_unknown_wire_format_is_refused(serve: Serve, wire: str):
    with pytest.raises(SymbiosisError, match=f"wire='{wire}': expected one of exact, bf16"):
        serve("tcp").connect(wire=wire)


@pytest.mark.parametrize("kind", ["inproc", "shm"])
def test_rounding_is_refused_where_rows_do_not_travel(serve: Serve, kind: str):
    with pytest.raises(SymbiosisError, match=r"wire='bf16' is for tcp:// addresses"):
        serve(kind).connect(wire="bf16")


BF16 = torch.zeros(3, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "layers", "tensors"),
    [
        (BadCall, (0,), (BF16[:, :63],)),
        (BadCall, (0,), (BF16, BF16)),
        (BadCall, (0, 1), (BF16, BF16[:2])),
        (TooLarge, (0,), (BF16[:0],)),
        (TooLarge, (0,), (torch.zeros(8193, 64, dtype=torch.bfloat16),)),
    ],
)
def test_bad_calls_in_bf16_fail_as_others_do(serve: Serve, error, layers, tensors):
    link = serve("tcp").raw()
    with pytest.raises(error):
        link.request(Message(Kind.CALL, layers=layers, tensors=tensors))
    assert link.request(Message(Kind.CALL, layers=(0,), tensors=(BF16,))).tensors[0].dtype is torch.bfloat16


def test_rows_of_a_dtype_that_links_do_not_carry_are_refused(serve: Serve):
    rows = torch.zeros(3, 64).to(torch.float8_e4m3fn)
    with pytest.raises(BadCall, match=r"links carry float32, bfloat16, .* got rows of torch.float8_e4m3fn: cast them"):
        serve("tcp").raw().request(Message(Kind.CALL, layers=(0,), tensors=(rows,)))


def test_dtypes_that_this_host_does_not_have_are_named():
    with pytest.raises(DtypeMissing, match=r"computes in float7_e3m3, which torch .* of this host does not have"):
        check_dtype("float7_e3m3", torch.device("cpu"))
    with pytest.raises(DtypeMissing, match=r"computes in int4, and device 'cpu' of this host does not"):
        check_dtype("int4", torch.device("cpu"))
    with pytest.raises(DtypeMissing):
        check_dtype("nn", torch.device("cpu"))
    for name in ("float32", "bfloat16", "float16", "float64"):
        check_dtype(name, torch.device("cpu"))


@contextmanager
def foreign_executor(served: Served, *, dtypes: list[str], dtype: str) -> Iterator[str]:
    """An executor of another build: it reads `dtypes` and computes in `dtype`."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind("tcp://127.0.0.1:*")
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if not router.poll(50):
                continue
            key, frame = router.recv_multipart()
            asked = decode(memoryview(frame), max_bytes=1 << 20)
            body: dict[str, Any] = {"model": "m", "dtypes": dtypes, "limits": served.executor.limits.to_json()}
            if asked.kind is Kind.MANIFEST:
                body = {**served.executor.manifest().to_json(), "dtype": dtype}
            kind = Kind.WELCOME if asked.kind is Kind.HELLO else Kind.REPLY
            router.send_multipart([key, encode(Message(kind, asked.request, body=body))])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield router.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


def test_an_executor_that_does_not_read_bf16_is_reported_in_one_line(serve: Serve):
    with foreign_executor(serve("tcp"), dtypes=["float32", "float16"], dtype="float32") as address:
        with pytest.raises(DtypeMissing) as found:
            symbiosis.connect(address, wire="bf16")
    text = str(found.value)
    assert "\n" not in text
    assert text.endswith("reads float32, float16: connect with wire='exact'")


def test_an_executor_in_a_dtype_of_another_torch_is_reported_in_one_line(serve: Serve):
    with foreign_executor(serve("tcp"), dtypes=list(DTYPE_NAMES), dtype="float6_e3m2") as address:
        with pytest.raises(DtypeMissing, match="float6_e3m2") as found:
            symbiosis.connect(address)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("dtypes", [None, "bfloat16", 7, {"a": 1}])
def test_a_malformed_list_of_dtypes_counts_as_the_usual_one(dtypes: object):
    WireFormat.BF16.check_peer("tcp://somewhere:1", dtypes)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8", "nothing", torch.int64])
def test_executors_take_only_dtypes_that_links_carry(tiny, name):
    with pytest.raises(SymbiosisError, match="expected float32, bfloat16 or float16"):
        symbiosis.Executor(tiny, dtype=name)
