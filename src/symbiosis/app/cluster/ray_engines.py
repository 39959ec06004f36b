"""Keeps engines running as Ray actors, spread over the nodes of a Ray cluster. The one module that imports Ray.

Ray places engines and reports their deaths. Requests and tokens go over the engines' own links, and the cluster's secret is
read on each node from a file there: Ray never has it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from symbiosis.app.cluster.ray_node import ENGINE_SLOT, NODE_FOLDER, SECRET_FILE, RayNode, check_reachable, leaving_file
from symbiosis.app.cluster.secret_file import read_secret
from symbiosis.errors import EngineLost, SymbiosisError, Unreachable
from symbiosis.version import VERSION

_ENDED, _FAILED, _REFUSED = 0, 1, 2
"""As the exit status of `app.engine_process`."""
_MIN_UPTIME_S, _MAX_FAILURES = 60.0, 3
_BACKOFF_S = 1.0
_STOP_TIMEOUT_S = 30.0
_PENDING_S = 30.0
_FOLLOW_S = 0.5
_THREADS = 4  # of an actor: `run`, `stop` and `describe` at once
_log = logging.getLogger("symbiosis")


class RayMissing(SymbiosisError, code="ray_missing"):
    """The package of Ray is not installed."""


@dataclass(slots=True, eq=False)
class _Engine:
    actor: Any
    running: Any
    """Reference to the result of `run`."""
    description: Any
    created: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] | None = None
    """Where it runs, once Ray has placed it."""
    placed: float | None = None
    has_warned: bool = False


class RayEngines:
    """An `EngineLauncher`. `config` is that of `app.engine_process`, without a name.

    Without `address` it starts a Ray head on this host with room for `slots` engines; otherwise this host must be a node of the
    Ray cluster there. An engine takes a slot, and a GPU if its device is one; on a Ray cluster of others, which has no slots,
    it takes `cpus`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        secret_file: Path,
        slots: int = 1,
        port: int = 0,
        gpus: int | None = None,
        address: str | None = None,
        cpus: float = 1.0,
        prefix: str = "engine",
    ) -> None:
        """`gpus` of this host; None: those that Ray finds. Raises `RayMissing`, or an error of `RayNode`."""
        check_installed()
        host = str(config.get("host", "127.0.0.1"))
        is_on_gpu = str(config.get("device") or "cpu").startswith("cuda")
        self._config = {name: value for name, value in config.items() if name not in ("secret", "host")}
        self._config["device"] = "cuda" if is_on_gpu else "cpu"  # Ray chooses which
        self._host = host if host.startswith("127.") or host == "localhost" else None
        self._secret_file, self._prefix = secret_file.resolve(), prefix
        self._engines: dict[str, _Engine] = {}
        self._leaving: dict[str, _Engine] = {}
        self._wanted = self._failures = 0
        self._not_before = 0.0
        self.node: RayNode | None = None
        """The head on this host, if it was started here."""
        if address is None:
            local_gpus = gpus if is_on_gpu else 0
            self.node = RayNode(str(config["secret"]), secret_file, host=host, port=port, slots=slots, gpus=local_gpus)
            os.environ.update(self.node.environment)  # before the import of Ray, which reads them
        self.address = address if self.node is None else self.node.address
        """Of Ray, where other nodes join."""
        if address is not None:
            check_reachable(address)
        ray = self._ray = _import_ray()
        try:
            ray.init(
                address=self.address,
                namespace="symbiosis",
                logging_level=logging.ERROR,
                log_to_driver=True,
                configure_logging=False,
            )
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            if self.node is not None:
                self.node.close()
            raise Unreachable(f"cannot connect to Ray at {self.address}: {_first_line(error)}") from None
        needs: dict[str, Any] = {"num_gpus": int(is_on_gpu)}
        if ENGINE_SLOT in ray.cluster_resources():
            needs |= {"num_cpus": 0, "resources": {ENGINE_SLOT: 1}}
        else:
            needs |= {"num_cpus": cpus}
        self._actor_class = ray.remote(_EngineActor).options(
            **needs, scheduling_strategy="SPREAD", max_concurrency=_THREADS, max_restarts=0
        )

    @property
    def pids(self) -> dict[str, int]:
        """Of the engines that Ray has placed."""
        return {name: engine.facts["pid"] for name, engine in self._engines.items() if engine.facts is not None}

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """Host name, IP address and Ray's id of each engine's node."""
        return {
            name: {each: engine.facts[each] for each in ("hostname", "ip", "node")}
            for name, engine in self._engines.items()
            if engine.facts is not None
        }

    def keep(self, wanted: int, leave: Collection[str], hung: Collection[str] = ()) -> None:
        self._wanted = wanted
        for name in [name for name in hung if name in self._engines]:
            _log.warning("the engine %s does not answer: starting another", name)
            self._remove(self._engines.pop(name))
        for name in [name for name in leave if name in self._engines]:
            engine = self._leaving[name] = self._engines.pop(name)
            engine.actor.stop.remote()
        self.check()

    def check(self) -> None:
        if self.node is not None:
            self.node.check()
        for name in self._ended(self._leaving):
            self._remove(self._leaving.pop(name))
        for name in self._ended(self._engines):
            self._bury(name, self._engines.pop(name))
        for name, engine in self._engines.items():
            self._follow(name, engine)
        waiting = [name for name, engine in self._engines.items() if engine.facts is None]
        for name in waiting[: max(0, len(self._engines) - self._wanted)]:
            self._remove(self._engines.pop(name))
        while len(self._engines) < self._wanted and time.monotonic() >= self._not_before:
            self._start(f"{self._prefix}-{secrets.token_hex(4)}")

    def _ended(self, engines: Mapping[str, _Engine]) -> list[str]:
        if not engines:
            return []
        names = {engine.running: name for name, engine in engines.items()}
        ended, _ = self._ray.wait(list(names), num_returns=len(names), timeout=0)
        return [names[each] for each in ended]

    def _bury(self, name: str, engine: _Engine) -> None:
        """Raises `EngineLost` if the cluster does not take it, or if engines keep failing at their start."""
        try:
            status, reason = self._ray.get(engine.running)
        except self._ray.exceptions.RayError as error:  # killed, or its node is lost
            status, reason = _ENDED, _first_line(error)
        self._remove(engine)
        if status == _REFUSED:
            raise EngineLost(f"the cluster does not take the engine {name}: {reason}")
        if status == _FAILED:
            uptime_s = 0.0 if engine.placed is None else time.monotonic() - engine.placed
            self._failures = self._failures + 1 if uptime_s < _MIN_UPTIME_S else 1
            self._not_before = time.monotonic() + _BACKOFF_S
            if self._failures >= _MAX_FAILURES:
                raise EngineLost(f"engines failed {_MAX_FAILURES} times at their start: {reason}")
        _log.warning("the engine %s has ended (%s): starting another", name, reason)

    def _follow(self, name: str, engine: _Engine) -> None:
        if engine.facts is not None:
            return
        ready, _ = self._ray.wait([engine.description], timeout=0)
        if ready:
            try:
                engine.facts, engine.placed = self._ray.get(engine.description), time.monotonic()
            except self._ray.exceptions.RayError:
                return  # `running` ends too
        elif not engine.has_warned and time.monotonic() - engine.created > _PENDING_S:
            engine.has_warned = True
            _log.warning(
                "the engine %s waits for a node with room: add one with `symbiosis cluster join --ray %s`", name, self.address
            )

    def _start(self, name: str) -> None:
        actor = self._actor_class.remote()
        config = {**self._config, "name": name}
        running = actor.run.remote(config, VERSION, self._host, str(self._secret_file))
        self._engines[name] = _Engine(actor, running, actor.describe.remote())

    def _remove(self, engine: _Engine) -> None:
        self._ray.kill(engine.actor, no_restart=True)

    def close(self) -> None:
        everything = {**self._engines, **self._leaving}
        try:
            for engine in everything.values():
                if engine.facts is None:
                    self._remove(engine)
                else:
                    engine.actor.stop.remote()
            if everything:
                running = [engine.running for engine in everything.values()]
                self._ray.wait(running, num_returns=len(running), timeout=_STOP_TIMEOUT_S)
            for engine in everything.values():
                self._remove(engine)
        except self._ray.exceptions.RayError as error:
            _log.warning("Ray: %s", _first_line(error))
        finally:
            self._engines, self._leaving = {}, {}
            self._ray.shutdown()
            if self.node is not None:
                self.node.close()


class _EngineActor:
    """One engine, in the process of its actor."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._is_serving = False
        threading.Thread(target=self._follow_node, args=(os.getppid(),), name="symbiosis-node", daemon=True).start()

    def _follow_node(self, raylet: int) -> None:
        """End when the node leaves, or has died: Ray waits for engines, and does not end those of a dead node."""
        folder = os.environ.get(NODE_FOLDER)
        while os.getppid() == raylet and not (folder and leaving_file(Path(folder)).exists()):
            time.sleep(_FOLLOW_S)
        self._stopped.set()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while self._is_serving and time.monotonic() < deadline:
            time.sleep(_FOLLOW_S)
        os._exit(1)

    def describe(self) -> dict[str, Any]:
        import socket

        ray = _import_ray()
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "ip": ray.util.get_node_ip_address(), "hostname": socket.gethostname(), "node": node}

    def run(self, config: dict[str, Any], version: str, host: str | None, secret_file: str) -> tuple[int, str]:
        """Until `stop`. `host` None: listen at the address of the node. The status is that of `app.engine_process`."""
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        if version != VERSION:
            return _REFUSED, f"this node has Symbiosis {VERSION}, the cluster has {version}: install the same version"
        from symbiosis.app.cluster_membership import JoinRejected
        from symbiosis.app.engine_member import EngineMember, MemberConfig
        from symbiosis.common import file_limits

        try:
            secret = read_secret(Path(os.environ.get(SECRET_FILE) or secret_file))
            host = host or _import_ray().util.get_node_ip_address()
            file_limits.raise_open_file_limit()
            with EngineMember(MemberConfig.from_json({**config, "host": host, "secret": secret})) as member:
                self._is_serving = True
                member.run(self._stopped)
        except SymbiosisError as error:
            return (_REFUSED if isinstance(error, JoinRejected) else _FAILED), str(error)
        finally:
            self._is_serving = False
        return _ENDED, "its node leaves"

    def stop(self) -> None:
        """End `run`: the engine closes. Without an engine yet, the process ends."""
        self._stopped.set()
        if not self._is_serving:
            os._exit(0)


def is_installed() -> bool:
    return find_spec("ray") is not None


def check_installed() -> None:
    """Raises `RayMissing`."""
    if not is_installed():
        raise RayMissing("Ray is not installed: pip install 'symbiosis[cluster]', or choose --launcher processes")


def _import_ray() -> Any:
    import ray

    return ray


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
