"""Addresses of executors: wrong ones give clear errors, within seconds."""

from __future__ import annotations

import gc
import os
import socket
import weakref

import pytest

import symbiosis
from symbiosis.errors import AddressInUse, BadAddress, InsecureListen, Unreachable
from symbiosis.transport import zmq_client
from symbiosis.transport.addresses import is_loopback, runtime_folder
from symbiosis.transport.shm import ShmPort
from symbiosis.transport.tcp import TcpPort
from tests.conftest import Serve

INVALID = [
    "", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x", "tcp://127.0.0.1:70000", "tcp://:7777",
    "tcp://127.0.0.1:1/path", "tcp://a:b@host:1", "tcp://::1:7", "tcp://127.0.0.1:1;tcp://x:2", "udp://127.0.0.1:1",
    "ipc:///tmp/x", "inproc://x", "http://127.0.0.1:1", "127.0.0.1:7777", "shm:///etc", "shm://a/b", "shm://../x", "shm://..",
    "shm://.x", "shm://x.lock", "shm://" + "x" * 49, "shm://a b",
]  # fmt: skip


@pytest.mark.parametrize("address", INVALID)
def test_both_ends_reject_an_invalid_address(serve: Serve, address: str):
    with pytest.raises(BadAddress):
        symbiosis.connect(address)
    if address.startswith(("tcp", "shm")):
        with pytest.raises(BadAddress):
            (TcpPort if address.startswith("tcp") else ShmPort)(address, tokens={}, max_bytes=1 << 20)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "shm://", "tcp://a b:1"])
def test_an_address_without_a_target_is_rejected(address: str):
    with pytest.raises(BadAddress):
        symbiosis.connect(address)


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://no.such.host.invalid:0"])
def test_an_address_that_cannot_be_bound_is_rejected(address: str):
    with pytest.raises(BadAddress, match="cannot listen"):
        TcpPort(address, tokens={"ann": "secret"}, max_bytes=1 << 20)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.168.1.7", "[::]", "example.com", "10.0.0.1"])
def test_listening_beyond_this_machine_needs_tokens(host: str):
    with pytest.raises(InsecureListen, match="--token"):
        TcpPort(f"tcp://{host}:0", tokens={}, max_bytes=1 << 20)


def test_loopback_is_more_than_one_address():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "[::]", "*", "127.0.0.1.example.com"))


def test_with_tokens_an_executor_can_listen_on_all_interfaces():
    port = TcpPort("tcp://0.0.0.0:0", tokens={"ann": "secret"}, max_bytes=1 << 20)
    assert port.address.startswith("tcp://0.0.0.0:")
    port.close()


def test_a_port_in_use_is_an_error(serve: Serve):
    served = serve("tcp")
    with pytest.raises(AddressInUse, match=r"choose another \(port 0: any\)"):
        served.executor.listen(served.address)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(AddressInUse):
            served.executor.listen(f"tcp://127.0.0.1:{other.getsockname()[1]}")
    assert served.connect().symbiosis.stats()["sessions"] == 1


def test_a_name_in_use_is_an_error_until_its_executor_closes(serve: Serve):
    served = serve("shm")
    with pytest.raises(AddressInUse, match="choose another name"):
        served.executor.listen(served.address)
    served.connect()
    served.executor.close()
    port = ShmPort(served.address, tokens={}, max_bytes=1 << 20)
    port.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "shm://absent"])
def test_a_wrong_address_fails_within_seconds(address: str, monkeypatch):
    monkeypatch.setattr(zmq_client, "_CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(Unreachable, match="is the executor running there"):
        symbiosis.connect(address)


def test_an_unknown_host_is_an_error():
    with pytest.raises(Unreachable, match="there is no host"):
        symbiosis.connect("tcp://no-such-host.invalid:7777")


def test_another_service_at_the_address_fails_within_seconds(monkeypatch):
    monkeypatch.setattr(zmq_client, "_CONNECT_TIMEOUT_S", 0.5)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(Unreachable):
            symbiosis.connect(f"tcp://127.0.0.1:{mute.getsockname()[1]}")


def test_ipv6_works(serve: Serve, tiny, ids):
    served = serve("tcp")
    try:
        address = served.executor.listen("tcp://[::1]:0")
    except BadAddress:
        pytest.skip("this machine has no IPv6")
    model = symbiosis.connect(address)
    assert (model(ids).logits - tiny(ids).logits).abs().max() < 1e-6
    model.symbiosis.close()


def test_the_runtime_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(BadAddress, match="open to others"):
        runtime_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"symbiosis-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadAddress):
        runtime_folder()


def test_a_link_that_was_never_closed_is_collected_without_waiting(serve):
    served = serve("tcp")
    model = symbiosis.connect(served.address)
    model.loop = model  # a cycle: the collector chooses the order
    collected = weakref.ref(model)
    del model
    gc.collect()
    assert collected() is None
