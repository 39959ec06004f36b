"""Two hosts in network namespaces; where the machine has none, these tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import symbiosis
from tests.faults.processes import Process, process
from tests.network.emulated_link import Conditions, EmulatedLink, why_unavailable

TOKEN = "a secret of ann's"


@pytest.fixture
def network() -> Iterator[EmulatedLink]:
    """Two hosts, 2 ms apart."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    with EmulatedLink(Conditions(round_trip_ms=2)) as link:
        yield link


class Remote:
    """Executors of the tiny model on one host, and a tenant on the other."""

    def __init__(self, network: EmulatedLink, stack: ExitStack) -> None:
        self.network = network
        self._here, self._there = network.hosts
        self._stack = stack
        self.executors: list[Process] = []
        self.addresses: list[str] = []

    def serve(self, seed: int = 0) -> str:
        """Start one more executor. Returns its address."""
        address = f"tcp://{self._there.ip}:{7001 + len(self.addresses)}"
        started = process("executor", address, str(seed), self._there.namespace, TOKEN)
        self.executors.append(self._stack.enter_context(started))
        self.addresses.append(address)
        return address

    def connect(self, address: str | list[str], **options: Any) -> Any:
        """A tenant's model. Its connections, later ones too, belong to the other host."""
        with self._here.entered():
            model = symbiosis.connect(address, token=TOKEN, name="ann", **options)
        self._stack.callback(model.symbiosis.close)
        return model


@pytest.fixture
def remote(network: EmulatedLink) -> Iterator[Remote]:
    with ExitStack() as stack:
        yield Remote(network, stack)


@pytest.fixture
def split_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Divide calls of any size, so that the tiny model has several in flight."""
    return lambda: monkeypatch.setattr("symbiosis.split.client.session._PART_BYTES", 1)
