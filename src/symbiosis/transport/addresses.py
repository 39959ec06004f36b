"""Addresses of executors: tcp://HOST:PORT and shm://NAME."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from pathlib import Path

from symbiosis.errors import BadAddress, Unreachable

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]\s]+):(?P<port>\d{1,5})/?")
_HTTP_TIMEOUT_S = 1.0
_NAME = re.compile(r"(?!.*\.lock$)[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


def address_scheme(address: object) -> str:
    """`tcp` or `shm` of an address; empty if it has none."""
    return address.partition("://")[0] if isinstance(address, str) and "://" in address else ""


def not_an_address(address: object) -> BadAddress:
    """The error for an address without the scheme of a link."""
    hint = ""
    if isinstance(address, str) and address.startswith("http"):
        hint = "; http:// is for OpenAI's API, `symbiosis serve` prints the address of its executor too"
    elif isinstance(address, str) and _TCP.fullmatch(f"tcp://{address}"):
        hint = f"; is it tcp://{address}?"
    return BadAddress(f"{address!r} is not an address: expected tcp://HOST:PORT or shm://NAME{hint}")


def parse_tcp_address(address: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`. Raises `BadAddress`."""
    match = _TCP.fullmatch(address)
    if not match or int(match["port"]) > 65535:
        raise BadAddress(f"{address!r} is not an address: expected tcp://HOST:PORT (0 to 65535), such as tcp://127.0.0.1:7777")
    host = "127.0.0.1" if match["host"] == "localhost" else match["host"]
    return host, int(match["port"])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def tcp_endpoint(address: str) -> str:
    """Where libzmq connects to. Raises `BadAddress`, `Unreachable`."""
    host, port = parse_tcp_address(address)
    if port == 0:
        raise BadAddress(f"{address!r} has port 0: use the address that the executor's listen() returned")
    try:
        socket.getaddrinfo(host.strip("[]"), port)
    except socket.gaierror as error:
        raise Unreachable(f"there is no host {host!r} ({error.strerror}): is {address} right?") from None
    return f"tcp://{host}:{port}"


def speaks_http(address: str) -> bool:
    """Whether the server at a tcp:// address replies to a request of HTTP. An executor sends a greeting of its own."""
    if address_scheme(address) != "tcp":
        return False
    host, port = parse_tcp_address(address)
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=_HTTP_TIMEOUT_S) as probe:
            probe.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            return probe.recv(5).startswith(b"HTTP")
    except OSError:
        return False


def parse_shm_address(address: str) -> str:
    """The name in `shm://NAME`; empty if the executor is to choose one. Raises `BadAddress`."""
    name = address.removeprefix("shm://").removesuffix("/")
    if not address.startswith("shm://") or (name and not _NAME.fullmatch(name)):
        raise BadAddress(f"{address!r} is not an address: expected shm://NAME, with letters, digits, '.', '_' and '-'")
    return name


def shm_endpoint(address: str) -> str:
    """Where libzmq connects to. Raises `BadAddress`."""
    name = parse_shm_address(address)
    if not name:
        raise BadAddress("shm:// needs the name that the executor's listen() returned")
    return f"ipc://{runtime_folder() / name}"


def runtime_folder() -> Path:
    """This user's folder for sockets, closed to all other users. Raises `BadAddress`."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - a folder of this user in it, checked below
    folder = Path(base) / f"symbiosis-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadAddress(f"{folder} belongs to another user or is open to others: remove it and try again")
    return folder
