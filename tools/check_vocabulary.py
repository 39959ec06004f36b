"""Report retired words in names and prose: CONTRIBUTING.md has the glossary and the word to use instead.

python tools/check_vocabulary.py [PATH ...]    # exit status 1 if a retired word is found
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCANNED = (
    "src",
    "tests",
    "deploy",
    "benchmarks",
    "examples",
    "docs",
    "tools",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
)
SUFFIXES = {".py", ".md", ".c", ".h", ".yaml", ".tpl", ""}

# Components are not people.
PEOPLE = r"nobody|somebody|whoever|anybody|everybody|everyone|someone|is told|are told|may know|who has|who is"
# Class and module names that the field's words replaced.
NAMES = (
    r"Desk|Forerunner|Carrier|Residency|Workshop|NoWorkshop|Favourites|Portions|Wishes|Halves|AsMade|WayHome|Beside|"
    r"ONWARD|HOMEWARD|RoomyLayer|UsualLayer|PagePool|"
    r"forerunner|workshop|favourites|homeward|computes_late|_bank|_forerunner|_lengths|_pace"
)
# Metaphors: in names and in prose.
WORDS = r"beside|dearest|glance|haltingly|company|carrier|at work"

RETIRED = re.compile(rf"(?<![A-Za-z])(?:{PEOPLE}|{NAMES}|{WORDS})(?![A-Za-z])")
ALLOWED = re.compile(r"check_vocabulary|retired words:")


def scanned_files(paths: list[str]) -> list[Path]:
    """Tracked files with code or prose; this file and the history are left out."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines()]
    return [file for file in files if file.suffix in SUFFIXES and file.is_file() and file != Path(__file__).resolve()]


def main(paths: list[str]) -> int:
    found = 0
    for file in scanned_files(paths or list(SCANNED)):
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            words = {match.group() for match in RETIRED.finditer(line)}
            if words and not ALLOWED.search(line):
                found += 1
                print(f"{file.relative_to(ROOT)}:{number}: {', '.join(sorted(words))}: {line.strip():.100}")
    print(f"retired words: {found}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
