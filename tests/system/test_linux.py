"""Process attributes that Linux has one of for the whole process."""

import os
import subprocess

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
        assert linux.has_processes({leader.pid})
        leader.kill()
    assert not linux.has_processes({leader.pid})
    assert linux.has_processes({os.getsid(0)})
