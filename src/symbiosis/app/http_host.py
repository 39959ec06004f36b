"""Hosted serving, wired: the engine in this process, HTTP in one of its own, a line between the two."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from symbiosis.adapters.names import owned
from symbiosis.app.training_service import NoTrainingService, TrainingService
from symbiosis.device_sharing.cpu_turns import CpuTimeShare
from symbiosis.device_sharing.gpu_partition import turns_on
from symbiosis.errors import (
    AddressInUse,
    BadAdapter,
    BadAddress,
    CannotTrain,
    EngineLost,
    InsecureListen,
    SymbiosisError,
    UnsupportedAdapter,
)
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.trainer import Trainer
from symbiosis.jobs.queue import JobLimits
from symbiosis.models.loading import shared_copy
from symbiosis.server import adapter_store
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.server.settings import Settings
from symbiosis.serving.engine import EngineCore
from symbiosis.serving.ipc_server import IpcServer
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.transport.shm import runtime_folder

_START_S = 120.0
_FINISH_S = 40.0
_SOON_S, _DEATHS = 30.0, 3
_TEMPORARY = "symbiosis-uploads-"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
_log = logging.getLogger("symbiosis")


class HttpHost:
    """Answers OpenAI's API at `url` until closed. Owns the model from now on. A context manager.

    `keys` are tenants' secrets by name; without any, only this machine may ask.
    `adapters` are folders by name, loaded before anybody is served;
    `adapter_root` is where the admin may load more from. Adapters that tenants
    upload are kept in `uploads` and served again by the next server with that
    folder; without one they are gone when this is closed. Fine-tuning jobs are kept in
    `jobs`, by default in a folder beside `uploads`. Clients have
    `patience_s` to send a request's head. `training` are the limits of hosted
    fine-tuning over the same weights; None: nothing is trained. A model that
    cannot be trained in shared passes is served all the same. `turns` are taken
    by all who compute on this device. `engine` are other settings of `EngineCore`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        tokenizer: Path | None,
        address: str,
        *,
        keys: Mapping[str, str] | None = None,
        admin_key: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        adapter_root: str | Path | None = None,
        uploads: str | Path | None = None,
        jobs: str | Path | None = None,
        job_limits: JobLimits | None = None,
        store_limits: adapter_store.StoreLimits | None = None,
        requests: RequestLimits | None = None,
        residency: AdapterCacheConfig | None = None,
        patience_s: float = 20.0,
        training: TrainerConfig | None = TrainerConfig(),  # noqa: B008 - frozen
        turns: CpuTimeShare | None = None,
        **engine: Any,
    ) -> None:
        base = Path(name).name if Path(name).is_dir() else name
        model.name_or_path = model.config._name_or_path = base  # adapters and messages name it so, never by our path
        _check_names(base, adapters or {})
        if adapter_root is not None and not Path(adapter_root).is_dir():
            raise SymbiosisError(f"there is no folder {adapter_root}: --adapter-root is where the admin may load adapters from")
        with ExitStack() as undo:
            self._socket = undo.enter_context(closing(_listen(address, keys or {})))
            self._uploads = undo.enter_context(closing(_Uploads(uploads)))
            beside = None if uploads is None else Path(uploads).with_name(f"{Path(uploads).resolve().name}-jobs")
            if jobs is not None and Path(jobs).resolve() == self._uploads.folder:
                raise SymbiosisError(f"--uploads and --jobs are both {jobs}: give each a folder of its own")
            self._jobs = undo.enter_context(closing(_Kept(jobs or beside, "fine-tuning jobs", "--jobs")))
            host, port = self._socket.getsockname()[:2]
            settings = Settings(
                base=base,
                keys=dict(keys or {}),
                admin_key=admin_key,
                adapter_root=None if adapter_root is None else str(Path(adapter_root).resolve()),
                uploads=str(self._uploads.folder),
                jobs=str(self._jobs.folder),
                job_limits=job_limits or JobLimits(),
                store=store_limits or adapter_store.StoreLimits(),
                requests=requests or RequestLimits(),
                patience_s=patience_s,
                hosts=None if keys else tuple({"127.0.0.1", "localhost", "[::1]", host}),
            )
            undo.pop_all()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._process = _Process(self._socket)  # it takes seconds to import what it needs: begin now
        self._deaths = 0
        self._window: IpcServer | None = None
        self._trains: Trainer | SymbiosisError | None = None
        turns = turns or turns_on(model.device)
        try:
            self._trains = _training(model, training, turns)
            core = EngineCore(model, residency=residency or AdapterCacheConfig(), turns=turns, **engine)
            for adapter, folder in (adapters or {}).items():
                try:
                    core.add_adapter(adapter, folder)
                except (BadAdapter, UnsupportedAdapter) as error:
                    raise type(error)(f"the adapter {adapter} in {folder}: {error}") from None
            self._uploads.serve(core)
            self._window = IpcServer(core, runtime_folder())
            trained = _workshop(self._window, core, self._trains)
            self._told = {
                "line": str(self._window.path),
                "tokenizer": None if tokenizer is None else str(tokenizer),
                "settings": {**asdict(settings), "longest": core.scheduler.longest, **trained},
            }
            self._process.tell(self._told)
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        assert self._window is not None
        until = time.monotonic() + _START_S
        while not self._window.joined.wait(0.05):
            if not self._process.is_alive() or time.monotonic() > until:
                raise EngineLost("the HTTP process did not start; the log above says why")

    def check(self) -> None:
        """Start the HTTP process again if it died. Raises `EngineLost` if it dies at once, or a loop here has failed."""
        assert self._window is not None
        if not self._window.is_alive():
            raise EngineLost("the engine's loop has failed, as the log above says")
        if isinstance(self._trains, Trainer) and not self._trains.is_alive():
            raise EngineLost("the device has failed hosted training: start again, and jobs go on from their checkpoints")
        if not self._process.is_alive():
            self._deaths = self._deaths + 1 if time.monotonic() - self._process.started < _SOON_S else 1
            if self._deaths >= _DEATHS:
                raise EngineLost(f"the HTTP process died {_DEATHS} times within seconds; the log above says why")
            _log.warning("the HTTP process is gone: starting another")
            self._process = _Process(self._socket)
            self._process.tell(self._told)

    def close(self) -> None:
        """No new requests; running answers may finish for half a minute; then everything ends."""
        self._process.stop()
        if self._window is not None:
            self._window.close()
        if isinstance(self._trains, Trainer):
            self._trains.close()
        self._uploads.close()
        self._jobs.close()
        self._socket.close()

    def __enter__(self) -> HttpHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Kept:
    """A folder that things are kept in: the provider's, or one of our own for as long as we serve.

    Errors say `what` is kept, and the `option` that the folder is given with.
    """

    def __init__(self, folder: str | Path | None, what: str, option: str) -> None:
        self._is_ours = folder is None
        if folder is None:
            adapter_store.remove_deserted(Path(tempfile.gettempdir()), f"{_TEMPORARY}*")
        self.folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY) if folder is None else folder).resolve()
        self._lock = adapter_store.lock(self.folder, what, option)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)


class _Uploads(_Kept):
    """Of adapters that tenants uploaded, or that were trained for them."""

    def __init__(self, folder: str | Path | None) -> None:
        super().__init__(folder, "adapters", "--uploads")
        adapter_store.remove_left_over(self.folder)

    def serve(self, core: EngineCore) -> None:
        """What is kept from another time; what does not fit this model stays where it is."""
        for each in adapter_store.kept(self.folder):
            try:
                core.add_adapter(owned(each.owner, each.name), each.folder)
            except SymbiosisError as error:
                _log.warning("the adapter %s in %s is not served: %s", each.name, each.folder, error)


class _Process:
    def __init__(self, listening: socket.socket) -> None:
        self._fd = listening.fileno()
        self.started = time.monotonic()
        # its own session: Ctrl-C in the terminal comes to us, and we tell it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "symbiosis.server"],
            stdin=subprocess.PIPE,
            pass_fds=[self._fd],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def tell(self, told: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**told, "fd": self._fd}).encode() + b"\n")
            self._process.stdin.close()
        except OSError:
            raise EngineLost("the HTTP process did not start; the log above says why") from None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_FINISH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _training(model: PreTrainedModel, config: TrainerConfig | None, turns: CpuTimeShare) -> Trainer | SymbiosisError:
    """Hosted training over the model's weights, in modules of its own; or why there is none."""
    if config is None:
        return CannotTrain("this server does not train")
    try:
        return Trainer(shared_copy(model), config, turns)
    except CannotTrain as error:
        _log.warning("nothing can be trained here: %s", error)
        return error
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything, and it is served all the same
        _log.warning("nothing can be trained here", exc_info=error)
        return CannotTrain(f"{type(model).__name__} cannot be trained here: {type(error).__name__}")


def _workshop(window: IpcServer, core: EngineCore, trains: Trainer | SymbiosisError) -> dict[str, Any]:
    """Put the room of jobs behind the window; what the HTTP process is told of it."""
    if isinstance(trains, Trainer):
        TrainingService(window, core, trains)
        return {"training": {"longest": trains.longest}}
    NoTrainingService(window, trains)
    return {"training": {"why": str(trains)}}


def _check_names(base: str, adapters: Mapping[str, Any]) -> None:
    for name in adapters:
        if name == base:
            raise SymbiosisError(f"an adapter is named {base!r}, like the base model: give it another name")
        if not re.fullmatch(_NAME, name):
            raise SymbiosisError(f"an adapter is named {name!r}: expected letters, digits, dots, dashes and underscores")


def check_http(address: str, keys: Mapping[str, str]) -> None:
    """Raise what listening there would raise now."""
    _listen(address, keys).close()


def _listen(address: str, keys: Mapping[str, str]) -> socket.socket:
    """A socket at `HOST:PORT` (port 0: any). Raises `BadAddress`, `AddressInUse` or `InsecureListen`."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadAddress(f"{address!r} is not an address for HTTP: expected HOST:PORT, such as 127.0.0.1:8000")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError:
        raise BadAddress(f"{host!r} is no address of this machine") from None
    if not keys and not ipaddress.ip_address(where[0]).is_loopback:
        raise InsecureListen(
            f"{address} can be reached from other machines and no keys are set: anybody could ask. "
            "Give keys (--key NAME=SECRET), or listen at 127.0.0.1"
        )
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if isinstance(error, PermissionError):
            raise BadAddress(f"cannot listen at {address}: {error.strerror}") from None
        raise AddressInUse(f"{address} is taken, or not of this machine: choose another (port 0: any)") from None
    return listening
