"""Process attributes that Linux has one of for the whole process."""

import os
import subprocess
from pathlib import Path

from ripstop.system import linux


def test_the_process_is_a_subreaper_until_the_last_hold_is_released() -> None:
    linux.hold_subreaper()
    linux.hold_subreaper()
    linux.release_subreaper()
    assert linux.is_subreaper()
    linux.release_subreaper()
    assert not linux.is_subreaper()


def test_a_process_that_was_a_subreaper_before_stays_one() -> None:
    linux.become_subreaper()
    linux.hold_subreaper()
    linux.release_subreaper()
    assert linux.is_subreaper()


def test_a_session_has_processes_until_its_last_one_is_reaped() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as leader:
        assert linux.has_linux_processes({leader.pid})
        leader.kill()
    assert not linux.has_linux_processes({leader.pid})
    assert linux.has_linux_processes({os.getsid(0)})


def test_a_child_whose_parent_died_before_the_parent_death_signal_was_set_does_not_start(tmp_path: Path) -> None:
    mark = tmp_path / "began"
    orphan = subprocess.call(["touch", mark], preexec_fn=linux.exit_with_parent(os.getppid()))  # as if adopted
    child = subprocess.call(["true"], preexec_fn=linux.exit_with_parent(os.getpid()))
    assert (orphan, mark.exists(), child) == (1, False, 0)
