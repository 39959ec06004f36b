"""The file with a cluster's secret."""

from __future__ import annotations

import re

import pytest

from symbiosis.app.cluster.secret_file import read_or_create_secret, read_secret
from symbiosis.errors import SymbiosisError


def test_a_missing_file_is_created_for_its_owner_only(tmp_path):
    file = tmp_path / "state" / "secret"
    secret = read_or_create_secret(file)
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert read_or_create_secret(file) == secret
    assert read_secret(file) == secret


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"q" * 40, 0o644, "expected mode 600. Run: chmod 600"),
        (b"short\n", 0o600, "has 5 characters: expected at least 16"),
        (b"\xff" * 40, 0o600, "it is not text"),
    ],
)
def test_a_file_that_is_no_secret_is_one_line(tmp_path, content, mode, says):
    file = tmp_path / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    for read in (read_secret, read_or_create_secret):
        with pytest.raises(SymbiosisError, match=says) as caught:
            read(file)
        assert "qqq" not in str(caught.value)


def test_a_file_that_cannot_be_there_is_one_line(tmp_path):
    with pytest.raises(SymbiosisError, match="there is no secret file"):
        read_secret(tmp_path / "none")
    with pytest.raises(SymbiosisError, match="cannot create the secret file /proc/none/secret"):
        read_or_create_secret(type(tmp_path)("/proc/none/secret"))
