"""Downloading a blob over a link into this host's blob store, once per host."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from symbiosis.errors import BadMessage
from symbiosis.models import blob_store
from symbiosis.transport.base import Link
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import BlobRef

_MIN_PROGRESS_BYTES = 8 << 20


def download(link: Link, ref: BlobRef) -> None:
    """Download `ref` unless the host has it. Raises `BadMessage` if the content does not match its hash."""
    if blob_store.has_blob(ref):
        return
    with blob_store.locked(f"blob-{ref.sha256[:16]}"):
        if blob_store.has_blob(ref):
            return
        with blob_store.new_file(blob_store.root() / "blobs") as path:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            with path.open("wb") as file, Progress(*columns, disable=ref.size < _MIN_PROGRESS_BYTES) as progress:
                task = progress.add_task("client part", total=ref.size)
                while file.tell() < ref.size:
                    body = {"sha256": ref.sha256, "offset": file.tell()}
                    reply = link.request(Message(Kind.BLOB, body=body))
                    if not reply.tensors or not reply.tensors[0].numel():
                        raise BadMessage("the executor ended a download early")
                    file.write(reply.tensors[0].view(-1).numpy().tobytes()[: int(reply.body["bytes"])])
                    progress.update(task, completed=file.tell())
            if blob_store.hash_file(path) != ref:
                raise BadMessage(f"the executor's blob {ref.sha256[:12]}… does not match its hash: not used")
            blob_store.adopt(path)
