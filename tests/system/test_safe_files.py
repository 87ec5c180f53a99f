"""A directory of a run belongs to this user."""

import os
from pathlib import Path

import pytest

from ripstop.system import safe_files
from ripstop.system.safe_files import make_own_directory


def test_an_own_directory_is_accepted_on_a_disk_that_takes_no_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_inodes(directory: Path) -> int:
        raise OSError(28, "No space left on device", str(directory))

    monkeypatch.setattr(safe_files, "_owner_of_new_files", no_inodes)
    make_own_directory(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
def test_a_directory_of_the_user_that_a_file_server_maps_us_to_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 4242, 4242)
    with pytest.raises(PermissionError, match="belongs to user 4242"):
        make_own_directory(tmp_path)
    monkeypatch.setattr(safe_files, "_owner_of_new_files", lambda directory: 4242)
    make_own_directory(tmp_path)
