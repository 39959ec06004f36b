"""Two network namespaces and the link between them, with delay, rate and packet loss. Tests and benchmarks share it.

With `tc netem` in the kernel the link is a pair of veth devices. Without it, a relay in user space (packet_relay.c)
forwards the packets between two tun devices. Both need root.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_CLONE_NEWNET = 0x40000000
_MTU = 1500
_NETEM_LIMIT = 100_000  # packets in its queue
_RELAY = Path(__file__).with_name("packet_relay.c")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the link does to packets. The default is as fast as this machine forwards."""

    round_trip_ms: float = 0.0
    """Half of it in each direction."""
    gbit_per_s: float = 0.0
    """In each direction; 0 is unlimited."""
    loss: float = 0.0
    """Share of the packets of each direction that are lost."""


@dataclass(frozen=True)
class Counts:
    """Of both directions: packets, bytes with all headers, and packets that were lost on purpose."""

    packets: int
    bytes: int
    lost: int


class UnavailableError(RuntimeError):
    """This machine cannot emulate a link; the text says why."""


@functools.cache
def why_unavailable() -> str | None:
    """Why this machine has no emulated links; None if it has."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    if _run("ip", "netns", "list", check=False).returncode:
        return "this kernel has no network namespaces"
    if not _has_netem():
        if not os.path.exists("/dev/net/tun"):
            return "this kernel has neither netem nor /dev/net/tun"
        if shutil.which("cc") is None:
            return "this kernel has no netem, and there is no C compiler for the relay"
    return None


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done


@functools.cache
def _has_netem() -> bool:
    name = f"probe-{os.getpid()}"
    if shutil.which("tc") is None or _run("ip", "netns", "add", name, check=False).returncode:
        return False
    try:
        return _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", check=False).returncode == 0
    finally:
        _run("ip", "netns", "del", name, check=False)


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    ip: str

    def enter(self) -> None:
        """Move this thread, and threads that it starts from now on, into the namespace."""
        _set_namespace(f"/run/netns/{self.namespace}")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that are opened inside belong to this host, for as long as they live."""
        with open("/proc/thread-self/ns/net") as before:
            self.enter()
            try:
                yield
            finally:
                _set_namespace(before.fileno())


def _set_namespace(place: str | int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(place, os.O_RDONLY) if isinstance(place, str) else place
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {place}")
    finally:
        if isinstance(place, str):
            os.close(descriptor)


class EmulatedLink:
    """Two hosts and their link. A context manager.

    `offload`: packets of up to 64 KiB, as between a kernel and a network card. A loss then takes all segments of one, so
    leave it off where packets are lost.
    """

    def __init__(self, conditions: Conditions | None = None, *, offload: bool = False) -> None:
        reason = why_unavailable()
        if reason is not None:
            raise UnavailableError(reason)
        name = f"link-{os.getpid()}-{os.urandom(3).hex()}"
        self.hosts = (Host(f"{name}-a", "10.77.0.1"), Host(f"{name}-b", "10.77.0.2"))
        self._offload, self._conditions = offload, conditions or Conditions()
        self._relay: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="relay-")

    def __enter__(self) -> EmulatedLink:
        try:
            for host in self.hosts:
                _run("ip", "netns", "add", host.namespace)
            if _has_netem():
                self._join_by_netem()
            else:
                self._join_by_relay()
            for host, other in zip(self.hosts, reversed(self.hosts), strict=True):
                inside = ("ip", "-n", host.namespace)
                _run(*inside, "link", "set", "lo", "up")
                peer = () if self._relay is None else ("peer", other.ip)
                _run(*inside, "address", "add", host.ip if peer else f"{host.ip}/24", *peer, "dev", "link0")
                _run(*inside, "link", "set", "link0", "mtu", str(_MTU), "txqueuelen", "10000", "up")
            self.set(self._conditions)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
        for host in self.hosts:
            _run("ip", "netns", "del", host.namespace, check=False)
        self._folder.cleanup()

    @property
    def kind(self) -> str:
        return "tc netem" if _has_netem() else "relay in user space"

    def set(self, conditions: Conditions) -> None:
        """Change the conditions. Connections stay open."""
        delay_us = round(500 * conditions.round_trip_ms)
        if self._relay is not None:
            self._command(f"set {delay_us} {round(conditions.gbit_per_s * 1e9)} {round(conditions.loss * 1e6)}", "set")
            return
        netem = ["netem", "limit", str(_NETEM_LIMIT), "delay", f"{delay_us}us", "loss", f"{100 * conditions.loss}%"]
        if conditions.gbit_per_s:
            netem += ["rate", f"{round(conditions.gbit_per_s * 1000)}mbit"]
        for host in self.hosts:
            _run("tc", "-n", host.namespace, "qdisc", "replace", "dev", "link0", "root", *netem)

    def counts(self) -> Counts:
        """Since the start."""
        if self._relay is not None:
            found = [int(number) for number in self._command("count").split()]
            return Counts(found[0] + found[3], found[1] + found[4], found[2] + found[5])
        totals = [self._qdisc_totals(host) for host in self.hosts]
        return Counts(*[sum(column) for column in zip(*totals, strict=True)])

    @staticmethod
    def _qdisc_totals(host: Host) -> tuple[int, int, int]:
        words = _run("tc", "-n", host.namespace, "-s", "qdisc", "show", "dev", "link0").stdout.split()
        at = words.index("Sent")
        lost = int(words[words.index("(dropped") + 1].rstrip(","))
        return int(words[at + 3]) + lost, int(words[at + 1]), lost

    def _join_by_netem(self) -> None:
        one, other = (host.namespace for host in self.hosts)
        veth = ("link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", other)
        _run("ip", "-n", one, *veth)
        if not self._offload and shutil.which("ethtool"):
            for name in (one, other):
                _run("ip", "netns", "exec", name, "ethtool", "-K", "link0", "tso", "off", "gso", "off", check=False)

    def _join_by_relay(self) -> None:
        binary = f"{self._folder.name}/packet_relay"
        _run("cc", "-O2", "-o", binary, str(_RELAY))
        command = [binary, *[host.namespace for host in self.hosts], str(int(self._offload))]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._relay = subprocess.Popen(command, text=True, **pipes)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise UnavailableError(self._relay.communicate()[1].strip())

    def _command(self, line: str, expected: str | None = None) -> str:
        assert self._relay is not None
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(f"{line}\n")
        self._relay.stdin.flush()
        reply = self._relay.stdout.readline().strip()
        if not reply or (expected is not None and reply != expected):
            raise RuntimeError(f"the relay answered {reply!r} to {line!r}")
        return reply
