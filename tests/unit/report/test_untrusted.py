"""Untrusted text stays text in a terminal."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from headrace.report.untrusted import bordered, visible, word

TEXT = st.text(st.characters(exclude_categories=()), max_size=200)


@given(TEXT)
def test_nothing_that_a_terminal_acts_on_is_left(text):
    shown = visible(text)
    assert {unicodedata.category(c) for c in shown if c != "\n"}.isdisjoint(
        {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    )
    shown.encode()


@given(TEXT, st.integers(1, 60))
def test_every_line_has_a_border_and_no_more_than_its_width(text, width):
    from rich.cells import cell_len

    lines = bordered(text, width)
    assert all(line[:2] in {"│ ", "┊ "} for line in lines)
    assert all(cell_len(line) <= max(width, 10) for line in lines)
    assert "".join(line[2:] for line in lines) == visible(text).replace("\n", "")


@given(TEXT)
def test_a_word_is_on_one_line(text):
    assert len(word(text).splitlines()) <= 1


def test_printable_text_of_any_script_is_left_as_it_is():
    text = 'x = "日本 é 🙂"\n\\n'
    assert visible(text) == text
