"""Folders and ports that one process holds: what a second one is told, and that a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from qerld_kernels.exclusive import FolderError, FolderLock, PortError, require_free_port, require_unheld

HOLDER = """
import sys, time
from pathlib import Path
from qerld_kernels.exclusive import FolderLock
lock = FolderLock(Path(sys.argv[1]), "state_dir", "qerld learner")
print("held", flush=True)
time.sleep(600)
"""


def test_the_second_is_told_who_holds_a_folder_until_that_one_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        said = rf"state_dir: {folder} is in use by qerld learner, process {holder.pid}; stop it or give another folder"
        for attempt in (lambda: FolderLock(folder, "state_dir", "x"), lambda: require_unheld(folder, "state_dir")):
            with pytest.raises(FolderError, match=said):
                attempt()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    require_unheld(folder, "state_dir")
    with FolderLock(folder, "state_dir", "qerld learner"), pytest.raises(FolderError, match=f"process {os.getpid()}"):
        FolderLock(folder, "state_dir", "x")


def test_looking_makes_nothing(tmp_path: Path) -> None:
    require_unheld(tmp_path / "none", "state_dir")
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"state_dir: .*file/state: Not a directory; give another folder"):
        FolderLock(tmp_path / "file" / "state", "state_dir", "x")


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("[::1]", socket.AF_INET6)]
)
def test_ports(host: str, family: socket.AddressFamily) -> None:
    with socket.create_server((host.strip("[]"), 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=r"port: cannot listen on .* \(Address already in use\); give another"):
            require_free_port("port", host, port)
    require_free_port("port", host, port)
    require_free_port("port", host, 0)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(PortError, match="Cannot assign requested address"):
        require_free_port("port", "192.0.2.1", 0)
