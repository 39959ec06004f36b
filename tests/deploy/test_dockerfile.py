"""The image: what it copies exists, and it runs without rights. It is linted, not built: that needs a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tomllib

from tests.deploy.chart import ROOT

FILE = ROOT / "deploy/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def values(name: str) -> list[str]:
    return [value for found, value in instructions() if found == name]


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    assert hadolint is not None
    done = subprocess.run([hadolint, "--failure-threshold", "style", FILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_copied_files_exist_and_are_in_the_context():
    allowed = {line[1:] for line in FILE.with_name("Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    copied = {source for value in values("COPY") if not value.startswith("--from") for source in value.split()[:-1]}
    assert copied == allowed
    for source in copied:
        listed = subprocess.run(["git", "ls-files", "--", source], cwd=ROOT, capture_output=True, text=True, check=True)
        assert listed.stdout, f"{source} is not in the repository"


def test_it_runs_the_command_without_rights_and_has_no_secret():
    assert values("USER")[-1] == "1000:1000"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert values("ENTRYPOINT") == ['["symbiosis"]']
    assert "symbiosis" in project["scripts"]
    assert any("'.[cluster,store]'" in value and "-c constraints.txt" in value for value in values("RUN"))
    assert {"cluster", "store"} <= project["optional-dependencies"].keys()
    variables = [*values("ARG"), *values("ENV")]
    assert not [each for each in variables if re.search("secret|token|key|password", each, re.IGNORECASE)]


def test_the_device_is_a_build_argument():
    assert values("ARG").count("TORCH=cpu") == 2  # of both stages
    assert any("download.pytorch.org/whl/${TORCH}" in value for value in values("RUN"))
