"""The director's process dies at bad moments, and its address is its own."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from symbiosis.app.cluster.director_process import DirectorProcess
from symbiosis.errors import AddressInUse


@pytest.fixture
def director(tmp_path):
    director = DirectorProcess({"host": "127.0.0.1", "secret": "s" * 40, "state": str(tmp_path)})
    yield director
    director.close()


def test_a_director_that_dies_while_it_starts_is_started_again(director):
    first, address = director.pid, director.address
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)

    def kill_the_next() -> None:
        while director.pid == first:
            time.sleep(0.001)
        os.kill(director.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_next)
    killer.start()
    director.check()
    killer.join()
    second = director.pid
    director.check()
    assert director.pid not in (first, second)
    assert director.address.messages == address.messages


def test_its_address_stays_reserved_while_it_is_gone(director):
    host, port = director.address.messages.removeprefix("tcp://").split(":")
    os.kill(director.pid, signal.SIGKILL)
    os.waitid(os.P_PID, director.pid, os.WEXITED | os.WNOWAIT)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    director.check()


def test_an_address_in_use_is_one_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"cannot listen at 127.0.0.1:{port}"):
            DirectorProcess({"host": "127.0.0.1", "port": port, "secret": "s" * 40, "state": str(tmp_path)})
