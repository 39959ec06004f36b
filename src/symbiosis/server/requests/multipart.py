"""Strict incremental parser of multipart/form-data: known fields only, each once, nothing before or between them.

Of a field's head only the name counts. The file name may be shown again and is never used as a path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import Enum, auto

from symbiosis.server.openai.errors import BadRequest

_MAX_HEAD_BYTES = 4096
_BOUNDARY = re.compile(r'(?i)multipart/form-data\s*;.*\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))(?:\s*;.*)?')
_NAME = re.compile(rb'(?i)form-data\s*;\s*name="([^"\r\n]*)"(?:\s*;.*)?')
_FILENAME = re.compile(rb'(?i);\s*filename="([^"\r\n]*)"')


class _State(Enum):
    CONTENT = auto()
    BOUNDARY = auto()
    """After a boundary."""
    HEAD = auto()
    END = auto()


class MultipartForm:
    """Receives bytes, yields chunks of fields. Raises `BadRequest` for an invalid form."""

    def __init__(self, content_type: str, fields: Collection[str]) -> None:
        found = _BOUNDARY.fullmatch(content_type.strip())
        if found is None:
            raise BadRequest(f"the body must be multipart/form-data with {' and '.join(fields)}", status=415)
        self._boundary = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
        self._fields = list(fields)
        self._missing = set(fields)
        self._field: str | None = None
        self.filename: str | None = None
        """Name of the last file, to be shown and never opened."""
        self._state, self._buffer = _State.CONTENT, bytearray(b"\r\n")  # lets the first boundary match like the others

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """The content of fields that is complete so far."""
        self._buffer += data
        while True:
            if self._state is _State.CONTENT:
                at = self._buffer.find(self._boundary)
                content = self._take(at if at >= 0 else max(0, len(self._buffer) - len(self._boundary) + 1))
                if content:
                    if self._field is None:
                        raise BadRequest("the form must begin with its boundary")
                    yield self._field, content
                if at < 0:
                    return
                self._take(len(self._boundary))
                self._state = _State.BOUNDARY
            elif self._state is _State.BOUNDARY:
                if len(self._buffer) < 2:
                    return
                following = self._take(2)
                if following not in (b"\r\n", b"--"):
                    raise BadRequest("a boundary of the form must be followed by a field or the end")
                self._state = _State.HEAD if following == b"\r\n" else _State.END
            elif self._state is _State.HEAD:
                at = self._buffer.find(b"\r\n\r\n")
                if (at if at >= 0 else len(self._buffer)) > _MAX_HEAD_BYTES:
                    raise BadRequest(f"the head of a field has more than {_MAX_HEAD_BYTES} bytes")
                if at < 0:
                    return
                self._field = self._parse_head(self._take(at + 4))
                self._state = _State.CONTENT
            else:
                if bytes(self._buffer) not in (b"", b"\r", b"\r\n"):
                    raise BadRequest("the form has content after its end")
                return

    def finish(self) -> None:
        """Raises `BadRequest` if the form is incomplete."""
        if self._state is not _State.END:
            raise BadRequest("the form ends before its last boundary")
        if self._missing:
            missing = next(field for field in self._fields if field in self._missing)
            raise BadRequest(f"the form has no field {missing}", field=missing)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _parse_head(self, head: bytes) -> str:
        name: str | None = None
        for line in head.split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key.strip().lower() == b"content-disposition":
                found = _NAME.fullmatch(value.strip())
                name = None if found is None else found[1].decode("latin-1")
                filename = _FILENAME.search(value)
                self.filename = self.filename if filename is None else filename[1].decode("utf-8", "replace")
            elif key.strip().lower() == b"content-transfer-encoding":
                raise BadRequest("Content-Transfer-Encoding is not supported: send files unencoded")
        if name not in self._missing:
            raise BadRequest(f"a field is named {name!r:.60}: expected {' and '.join(self._fields)}, each once")
        self._missing.discard(name)
        return name
