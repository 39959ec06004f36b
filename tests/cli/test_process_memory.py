"""Memory of processes: what they share counts once."""

from __future__ import annotations

import os
import subprocess
import sys

from symbiosis.cli.process_memory import ProcessMemory, _parse_mappings, descendants, measure_processes

SMAPS = """\
aaaa0000-aaaa1000 r-xp 00000000 fe:00 15 /usr/lib/libx.so (deleted)
Rss:                  40 kB
Anonymous:             0 kB
aaaa1000-aaaa2000 rw-p 00000000 fe:00 15 /usr/lib/libx.so (deleted)
Rss:                  10 kB
Anonymous:             4 kB
bbbb0000-bbbb1000 rw-p 00000000 00:00 0                                  [heap]
Rss:                   8 kB
Anonymous:             8 kB
cccc0000-cccc1000 rw-p 00000000 00:00 0 
Rss:                   2 kB
Anonymous:             2 kB
"""

HOLD = """
import mmap, sys
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
own = bytearray(b"x") * int(sys.argv[2])
sum(mapped[::4096])
print("ready", flush=True)
sys.stdin.read()
"""


def test_changed_pages_of_a_file_are_the_processes_own():
    assert _parse_mappings(SMAPS) == (14 << 10, {"/usr/lib/libx.so (deleted)": 46 << 10})


def test_a_file_of_two_processes_counts_once_and_their_own_pages_twice(tmp_path):
    size = 32 << 20
    (tmp_path / "file").write_bytes(os.urandom(size))
    command = [sys.executable, "-c", HOLD, str(tmp_path / "file"), str(size)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first, second = (subprocess.Popen(command, **pipes) for _ in range(2))
    try:
        assert all(process.stdout.readline() == "ready\n" for process in (first, second))
        one, two = measure_processes([first.pid]), measure_processes([first.pid, second.pid])
        assert one.files >= size
        assert one.own >= size
        assert abs(two.files - one.files) < size / 8
        assert abs(two.own - 2 * one.own) < size / 8
        assert {first.pid, second.pid} < set(descendants(os.getpid()))
    finally:
        for process in (first, second):
            process.communicate()


def test_copies_of_a_process_share_its_files():
    assert ProcessMemory(100, 30).times(3) == ProcessMemory(300, 30)
    assert ProcessMemory(100, 30).times(3).plus(ProcessMemory(50, 20)) == ProcessMemory(350, 30)


def test_a_process_that_has_exited_has_no_memory():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert measure_processes([done.pid]) == ProcessMemory()
