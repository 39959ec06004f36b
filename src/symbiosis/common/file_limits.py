"""How many files and connections this process may have open at once."""

from __future__ import annotations

import resource

_MOST = 65536


def raise_open_file_limit() -> int:
    """As many as the host allows, up to a bound, and never fewer than now: connections take them, and then nobody gets in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
