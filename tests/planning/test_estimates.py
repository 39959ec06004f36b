"""Parts of estimates that depend on the machine."""

from __future__ import annotations

import pytest

from symbiosis.planning import estimates


@pytest.mark.parametrize(
    ("library", "has_holes"),
    [(("glibc", "2.36"), True), (("glibc", "2.38"), False), (("glibc", "2.41.1"), False), (("", ""), False)],
)
def test_only_old_heaps_have_holes(monkeypatch, library, has_holes):
    monkeypatch.setattr(estimates.platform, "libc_ver", lambda: library)
    assert (estimates.heap_share() > 0) == has_holes
