"""Where a model comes from: a folder, a hub id or the default model. Checks that need no torch."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from symbiosis.errors import UnknownModel
from symbiosis.models.default_model import HUB_ID, NAME

_HUB_TIMEOUT_S = 5.0


def is_default(source: object) -> bool:
    """Whether a source is the default model: None, or its name or hub id in any case, unless a folder has that name."""
    if source is None:
        return True
    name = str(source).lower() if isinstance(source, str | os.PathLike) else ""
    return name in (NAME.lower(), HUB_ID.lower()) and not Path(str(source)).exists()


def check_found(name: str) -> None:
    """Raise `UnknownModel` for a folder without a model, a path without a folder, or a hub that cannot be reached."""
    path = Path(name)
    if path.exists() and not (path / "config.json").is_file():
        raise UnknownModel(f"{name} has no config.json: expected a folder as `save_pretrained` writes it")
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise UnknownModel(f"there is no folder {name}: pass one as `save_pretrained` writes it, or a hub id")
    if not path.exists():
        _check_hub(name)


def _check_hub(name: str) -> None:
    """The hub's own client would retry for half a minute."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        reason = str(error).partition(":")[0].rstrip(".")
        raise UnknownModel(f"{name!r} is neither a folder on this machine nor a hub id ({reason})") from None
    if is_cached or constants.HF_HUB_OFFLINE:
        return
    request = urllib.request.Request(f"{constants.ENDPOINT}/{name}/resolve/main/config.json", method="HEAD")  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()  # noqa: S310 - the endpoint of the hub
    except urllib.error.HTTPError:
        return  # the hub replies, and its client explains
    except (OSError, ValueError) as error:
        cause: object = getattr(error, "reason", None) or error
        if isinstance(cause, ssl.SSLError):
            return  # the hub's client may have other certificates
        why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise UnknownModel(
            f"{name!r} is not a folder on this machine, and the hub {constants.ENDPOINT} cannot be reached ({why}): pass a "
            "folder as `save_pretrained` writes it, or nothing for the default model"
        ) from None
