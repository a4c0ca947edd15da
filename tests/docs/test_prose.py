"""How long sentences are in README, docs and CHANGELOG: readers who learned English later read them, too."""

import re
import statistics
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORDS_MAX = 40
MEAN_MAX = 20
WORDS_MIN = 4  # Less is a cell or a label, and would lower the mean.
END = re.compile(r"""(?<=[.!?])[")\]]*\s+(?=["(\[]*[A-Z0-9`])""")

MARKDOWN = MarkdownIt().enable("table")


def sentences(text):
    """Return a page's sentences: of paragraphs, items, headings and cells, and of no code."""
    blocks = (_plain(token.children or []) for token in MARKDOWN.parse(text) if token.type == "inline")
    return [sentence for block in blocks for sentence in END.split(block) if sentence]


def _plain(tokens):
    """A piece of code is one word; a link is its text."""
    return "".join(
        f"`{token.content.replace(' ', '_')}`" if token.type == "code_inline" else token.content or " "
        for token in tokens
        if token.type in ("text", "code_inline", "softbreak", "hardbreak")
    )


def words(sentence):
    return len(sentence.split())


def test_sentences_end_at_a_stop_before_a_capital_and_code_is_one_word():
    page = "# Head\n\nOne of 0.5 s. `a b` is two\nwords. [Three](x.md) here.\n\n| a | b c. D e |\n|---|---|\n"
    page += "\n```\nno. No\n```\n"
    assert sentences(page) == ["Head", "One of 0.5 s.", "`a_b` is two words.", "Three here.", "a", "b c.", "D e"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_is_long(page):
    found = sentences(page.read_text())
    assert [sentence for sentence in found if words(sentence) > WORDS_MAX] == []
    assert statistics.fmean(words(one) for one in found if words(one) >= WORDS_MIN) <= MEAN_MAX
