"""The limit on open files is raised to what the host allows."""

from __future__ import annotations

import resource

import pytest

from symbiosis.common.file_limits import raise_open_file_limit


@pytest.mark.parametrize("before", [64, 256])
def test_the_limit_is_raised_to_the_hosts_maximum(before):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
        most = raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        assert most > before
        assert raise_open_file_limit() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
