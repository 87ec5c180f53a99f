"""Process attributes that Linux has one of for the whole process."""

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
