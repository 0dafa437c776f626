"""Files of lines that are too large to be read whole."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.runlog.files import cut_after, lines_from_end, read_objects, step_of


@settings(deadline=None)
@given(lines=st.lists(st.binary(max_size=9).map(lambda text: text.replace(b"\n", b"")), max_size=9), torn=st.booleans())
def test_lines_from_the_end_are_the_whole_lines_whatever_is_read_at_once(tmp_path_factory, lines, torn):
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(b"".join(text + b"\n" for text in lines) + b"torn" * torn)
    ends = [sum(len(text) + 1 for text in lines[: index + 1]) for index in range(len(lines))]
    for block_bytes in (1, 2, 3, 7, 1000):
        assert list(lines_from_end(path, block_bytes)) == list(zip(ends, lines, strict=True))[::-1]


def test_only_what_is_cut_is_read(tmp_path):
    """A file with more than any memory holds, most of which is a hole."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert cut_after(path, lambda line: step_of(path, line) <= 2) == b'{"step": 2}'
    assert path.stat().st_size == 2**40 + 1 + 2 * 12
    path.unlink()


def test_what_is_torn_is_cut_and_what_is_damaged_is_told(tmp_path):
    path = tmp_path / "file"
    assert cut_after(path) is None
    for text, rest in (("", ""), ("a", ""), ("a\n", "a\n"), ("a\nb", "a\n")):
        path.write_text(text)
        cut_after(path)
        assert path.read_text() == rest
    path.write_text('{"step": 1}\nwhat?\n')
    for read in (lambda: list(read_objects(path)), lambda: cut_after(path, lambda line: step_of(path, line) <= 1)):
        with pytest.raises(SettingError, match="is damaged: not a JSON object"):
            read()
