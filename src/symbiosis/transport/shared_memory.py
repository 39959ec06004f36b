"""Host memory shared by two processes: a sealed anonymous file, which leaves nothing behind if either is killed."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from typing import Any

from symbiosis.errors import BadMessage
from symbiosis.transport.zmq_client import ConnectionCut

_PATH = re.compile(r"/proc/(\d+)/fd/\d+")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A sealed anonymous file, created here and mapped by one other process."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("symbiosis-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise

    def reference(self) -> dict[str, Any]:
        """How the other process opens it (`open_shared`)."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "bytes": len(self.memory)}

    def close(self) -> None:
        os.close(self._fd)  # the mapping ends with its last view


def open_shared(reference: Any) -> tuple[mmap.mmap, int]:
    """The memory that an executor's reference names, and the executor's process id.

    Raises `BadMessage`, or `ConnectionCut` if the executor is gone.
    """
    try:
        path, size = str(reference["path"]), int(reference["bytes"])
    except (KeyError, TypeError, ValueError):
        raise BadMessage("the executor names no shared memory") from None
    match = _PATH.fullmatch(path)
    if match is None:
        raise BadMessage(f"the executor names {path!r} as shared memory, which is none")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConnectionCut from None  # killed meanwhile, or in another pid namespace
    except OSError as error:
        raise BadMessage(f"the executor's shared memory cannot be opened: {error}") from None
    try:
        # Only a sealed anonymous file: this process must never write to another file that an impostor names.
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size or size <= 0:
            raise BadMessage(f"{path} is no arena of {size} bytes")
        return mmap.mmap(fd, size), int(match[1])
    except OSError as error:
        raise BadMessage(f"{path} is no arena: {error}") from None
    finally:
        os.close(fd)
