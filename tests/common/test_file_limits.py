"""A process that serves may have as many files open as its host allows."""

from __future__ import annotations

import resource

import pytest

from symbiosis.common.file_limits import raise_open_file_limit


@pytest.mark.parametrize("before", [64, 256])
def test_the_limit_is_raised_as_far_as_it_may_be(before):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
        most = raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        assert most > before
        assert raise_open_file_limit() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
