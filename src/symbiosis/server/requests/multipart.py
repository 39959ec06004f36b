"""multipart/form-data, read strictly as it arrives: known fields only, each once, nothing before or between them.

What a field is called is all that counts in its head. A file's name on the
sender's disk may be shown to it again, and leads nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import Enum, auto

from symbiosis.server.openai.errors import BadRequest

_MAX_HEAD = 4096
_BOUNDARY = re.compile(r'(?i)multipart/form-data\s*;.*\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))(?:\s*;.*)?')
_NAME = re.compile(rb'(?i)form-data\s*;\s*name="([^"\r\n]*)"(?:\s*;.*)?')
_FILENAME = re.compile(rb'(?i);\s*filename="([^"\r\n]*)"')


class _At(Enum):
    FIELD = auto()
    MARK = auto()
    """Just behind a boundary."""
    HEAD = auto()
    END = auto()


class MultipartForm:
    """Bytes in, pieces of fields out. Raises `BadRequest` where it is no such form."""

    def __init__(self, content_type: str, fields: Collection[str]) -> None:
        found = _BOUNDARY.fullmatch(content_type.strip())
        if found is None:
            raise BadRequest(f"the body must be multipart/form-data with {' and '.join(fields)}", status=415)
        self._mark = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
        self._fields = list(fields)
        self._left = set(fields)
        self._field: str | None = None
        self.filename: str | None = None
        """What the sender calls the last file: to be shown, never opened."""
        self._at, self._held = _At.FIELD, bytearray(b"\r\n")  # so that the first boundary is one like the others

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Whatever of each field is certain now."""
        self._held += data
        while True:
            if self._at is _At.FIELD:
                at = self._held.find(self._mark)
                content = self._taken(at if at >= 0 else max(0, len(self._held) - len(self._mark) + 1))
                if content:
                    if self._field is None:
                        raise BadRequest("the form does not begin with its boundary")
                    yield self._field, content
                if at < 0:
                    return
                self._taken(len(self._mark))
                self._at = _At.MARK
            elif self._at is _At.MARK:
                if len(self._held) < 2:
                    return
                following = self._taken(2)
                if following not in (b"\r\n", b"--"):
                    raise BadRequest("a boundary of the form is followed by something else than a field")
                self._at = _At.HEAD if following == b"\r\n" else _At.END
            elif self._at is _At.HEAD:
                at = self._held.find(b"\r\n\r\n")
                if max(at, 0 if at >= 0 else len(self._held)) > _MAX_HEAD:
                    raise BadRequest(f"the head of a field has more than {_MAX_HEAD} bytes")
                if at < 0:
                    return
                self._field = self._named(self._taken(at + 4))
                self._at = _At.FIELD
            else:
                if bytes(self._held) not in (b"", b"\r", b"\r\n"):
                    raise BadRequest("there is something behind the end of the form")
                return

    def finish(self) -> None:
        """There is no more. Raises `BadRequest` if there should be."""
        if self._at is not _At.END:
            raise BadRequest("the form ends before its last boundary")
        if self._left:
            missing = next(field for field in self._fields if field in self._left)
            raise BadRequest(f"the form has no field {missing}", field=missing)

    def _taken(self, count: int) -> bytes:
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken

    def _named(self, head: bytes) -> str:
        name: str | None = None
        for line in head.split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key.strip().lower() == b"content-disposition":
                found = _NAME.fullmatch(value.strip())
                name = None if found is None else found[1].decode("latin-1")
                called = _FILENAME.search(value)
                self.filename = self.filename if called is None else called[1].decode("utf-8", "replace")
            elif key.strip().lower() == b"content-transfer-encoding":
                raise BadRequest("a field is encoded: send files as they are")
        if name not in self._left:
            raise BadRequest(f"a field is named {name!r:.60}: expected {' and '.join(self._fields)}, each once")
        self._left.discard(name)
        return name
