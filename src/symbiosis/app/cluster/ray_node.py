"""A Ray node on this host: `ray start`, which ends when the process that started it does.

`python -m symbiosis.app.cluster.ray_node FOLDER ARGUMENTS` is that process. Ray's token comes from the cluster's secret: only
holders of the secret can add a node or an actor. The secret itself never passes through Ray: each node names its own file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from symbiosis.app.child_process import wait_or_kill
from symbiosis.errors import AddressInUse, BadAddress, EngineLost, Unauthorized, Unreachable, VersionMismatch

SECRET_FILE = "SYMBIOSIS_CLUSTER_SECRET_FILE"  # noqa: S105 - the name of a variable
"""Variable of a node: the file with the cluster's secret there."""
NODE_FOLDER = "SYMBIOSIS_RAY_NODE"
"""Variable of a node: its folder."""
ENGINE_SLOT = "engine"
"""Ray's name for the place of one engine on a node."""
_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum: no tensor and no token goes through it
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_KILL_S = 15.0
_CONNECT_S = 5.0
_STARTED = "Ray runtime started"
_STDIN = 0


class RayNode:
    """The head of a new Ray cluster, or a node of the one at `join`. Returns when it runs."""

    def __init__(
        self, secret: str, secret_file: Path, *, host: str, port: int = 0, join: str | None = None, slots: int, gpus: int | None
    ) -> None:
        """`slots`: most engines here. `gpus` None: as many as Ray finds.

        Raises `Unreachable`, `Unauthorized`, `VersionMismatch`, `AddressInUse` or `EngineLost`.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="symbiosis-ray-", dir="/tmp"))
        self._lines: deque[str] = deque(maxlen=40)
        self._started = threading.Event()
        try:
            self.environment = _ray_environment(secret, self.folder / "token")
            arguments = _arguments(self.folder, host, slots, gpus)
            if join is None:
                port = port or _free_port(host)
                arguments += ["--head", f"--port={port}", "--include-dashboard=false"]
            else:
                check_reachable(join)
                arguments += [f"--address={join}"]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.folder), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={**os.environ, **self.environment, SECRET_FILE: str(secret_file.resolve()), NODE_FOLDER: str(self.folder)},
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._reader = threading.Thread(target=self._read, name="symbiosis-ray", daemon=True)
        self._reader.start()
        try:
            self._wait(join)
        except BaseException:
            self.close()
            raise
        self.address = join or f"{self._found_host() or host}:{port}"
        """Where other nodes join."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.strip())
            if _STARTED in line:
                self._started.set()
        self._started.set()

    def _wait(self, join: str | None) -> None:
        if not self._started.wait(_START_TIMEOUT_S):
            raise EngineLost(f"the Ray node did not start within {_START_TIMEOUT_S:g} s: {self._last_line()}")
        if any(_STARTED in line for line in self._lines):
            return
        self._reader.join(_CONNECT_S)
        text = "\n".join(self._lines)
        if "AuthToken" in text or "AuthenticationError" in text:
            raise Unauthorized(f"the Ray cluster at {join} has another secret: copy the file of `symbiosis cluster up`")
        if "ersion mismatch" in text:
            raise VersionMismatch(
                f"the Ray cluster at {join} has another version of Ray or Python: {_line_with(text, 'ersion')}"
            )
        if "ddress already in use" in text or ("port" in text.lower() and "in use" in text):
            raise AddressInUse(f"Ray cannot start here: {self._last_line()}")
        raise EngineLost(f"the Ray node did not start: {self._last_line()}")

    def _found_host(self) -> str:
        """Ray replaces a loopback address by one of this host."""
        return next((line.rpartition("Local node IP: ")[2] for line in self._lines if "Local node IP: " in line), "")

    def _last_line(self) -> str:
        return next((line for line in reversed(self._lines) if line), "no output")[-300:]

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises `EngineLost` if the node has ended."""
        if self._process.poll() is not None:
            raise EngineLost(f"the Ray node of this host has ended: {self._last_line()}")

    def close(self) -> None:
        """End Ray's processes of this node, and engines on it."""
        if self._process.poll() is None:
            self._process.terminate()
        wait_or_kill(self._process, _STOP_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ray_environment(secret: str, file: Path) -> dict[str, str]:
    """Ray's settings, for its processes and for those that connect to it."""
    token = hashlib.blake2b(secret.encode(), digest_size=32, person=b"symb ray").hexdigest()
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(token)
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(file),
        "RAY_memory_monitor_refresh_ms": "0",  # it would end engines; their memory is planned
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0))),  # Ray would set 1
    }


def _arguments(folder: Path, host: str, slots: int, gpus: int | None) -> list[str]:
    arguments = ["--block", f"--node-ip-address={host}", f"--temp-dir={folder}", "--disable-usage-stats"]
    arguments += [f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--resources={json.dumps({ENGINE_SLOT: slots})}"]
    return arguments if gpus is None else [*arguments, f"--num-gpus={gpus}"]


def split_address(address: str) -> tuple[str, int]:
    """Raises `BadAddress` unless it is HOST:PORT."""
    host, mark, port = address.removeprefix("tcp://").rpartition(":")
    if not mark or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise BadAddress(f"{address!r} is not the address of a cluster: expected HOST:PORT")
    return host.strip("[]"), int(port)


def check_reachable(address: str) -> None:
    """Ray itself tries for a minute. Raises `BadAddress` or `Unreachable`."""
    try:
        socket.create_connection(split_address(address), _CONNECT_S).close()
    except OSError as error:
        raise Unreachable(
            f"no Ray cluster at {address} ({error.strerror or error}): expected the address that `symbiosis cluster up` printed"
        ) from None


def _free_port(host: str) -> int:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise BadAddress(f"{host} is not an address of this host: {error.strerror}") from None


def leaving_file(folder: Path) -> Path:
    """It is there once the node of this folder leaves."""
    return folder / "leaving"


def _line_with(text: str, part: str) -> str:
    return next((line for line in text.splitlines() if part in line), "")[-300:]


def main(arguments: list[str]) -> int:
    """`ray start`, until SIGTERM or the end of stdin. Its exit status. The first argument is a folder to remove then."""
    folder, *arguments = arguments
    process = subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", "start", *arguments], start_new_session=True)

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def stop() -> None:
        with suppress(OSError):
            leaving_file(Path(folder)).touch()  # engines end: Ray waits for them
        process.terminate()
        timer = threading.Timer(_KILL_S, kill)
        timer.daemon = True
        timer.start()

    def follow_launcher() -> None:
        while os.read(_STDIN, 4096):
            pass
        stop()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop())
    threading.Thread(target=follow_launcher, daemon=True).start()
    status = process.wait()
    kill()  # what it may have left
    shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
