"""The limit on open files and connections of this process."""

from __future__ import annotations

import resource

_MAX_FILES = 65536


def raise_open_file_limit() -> int:
    """Raise the soft limit to what the host allows, at most `_MAX_FILES`; it is never lowered. Returns the target."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return target
