"""Text that is shortened for people."""

from ripstop.model.text_formatting import truncate_columns


def test_text_is_cut_by_columns() -> None:
    assert truncate_columns("abc", 3) == "abc"
    assert truncate_columns("abcd", 3) == "ab…"
    assert truncate_columns("漢漢漢", 4) == "漢…"
    assert truncate_columns(" a \n b ", 9) == "a b"
