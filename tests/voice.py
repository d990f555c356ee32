"""Rejects prose that needs a second reading: `python -m tests.voice`, part of `make check`.

Reads the Markdown pages, and the docstrings, comments and string literals of four words and more of every Python file.
Counts the phrases of PHRASES and the replaced terms of tests.names, for each folder. The number of each folder may only
fall: the check fails above the ceiling in voice_ceilings.json, and below the ceiling until it is lowered.

`python -m tests.voice --lower` lowers the ceilings. `python -m tests.voice PATH...` lists every place below the paths.
"""

from __future__ import annotations

import ast
import collections
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests import names

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_name("voice_ceilings.json")

README_LINES = 120
DOCS_WORDS = 40_000
LITERAL_WORDS = 4  # shorter string literals are names or keys

# A clause that starts a sentence, or follows one of these words, stands for a noun.
_PREPOSITIONS = ("of", "by", "for", "to", "from", "than", "but", "and", "or", "at", "with")


def _noun(word: str) -> str:
    """Return the pattern of a word that does not follow a noun; a literal prefix makes the search fast."""
    before = ["^", r"[.;:!?,(]\s", *(rf"\b{each}\s" for each in _PREPOSITIONS)]
    return word + "(?:" + "|".join(f"(?<={each}{word})" for each in before) + ")"


_BE = r"\b(?:am|is|are|was|were|be|been|being)"

# Phrase in lower case: plain alternative.
PHRASES = {
    _noun("who") + r"(?:ever)?\s(?!else\b)(?![^.;]*\?)\w+": "name the subject: a client that, a process that",
    _noun("what") + r"\s(?!if\b)(?![^.;]*\?)\w+": "name the thing: the value that, the requests that",
    r"\b(?:nobody|no one|somebody|someone|whoever)\b": "name the subject: no client, the process",
    _BE + r" told\b": "log, report, reply, notify or raise",
    r"\b(?:tells?|told|says?|said|knows?|known|hears?|heard) of\b": "report, describe, detect",
    r"\bso (?:many|much|few|long)\b(?! (?:as|that)\b)": "give the number: that number of, N seconds",
    r"\bof (?:its|their|his|one's) own\b": "separate, private, or the owner's name",
    r"\bin (?:its|their|whose) place\b": "instead of, or replaces",
    r"\b(?:that|those) (?:of|which|who|that)\b": "repeat the noun",
    r"\bthere (?:is|are|was|were) none\b": "no, without, is missing",
    r"\b(?:for want of|as need be|come[s]? to nothing|in vain)\b": "without, as needed, fails",
    r"\b(?:of late|ere|thereof|therein|whereupon|henceforth|whither|wherewith)\b": "recently, before, then",
    r"\bcome[s]? and go(?:es)?\b": "connects and disconnects, starts and exits",
}  # fmt: skip

# Replaced terms that are plain English in a sentence.
_ENGLISH = frozenset({
    "blame", "company", "crowd", "crew", "gate", "gates", "guest", "guests", "heard", "job", "jobs", "keeper",
    "outlook", "seldom", "stray", "suspects", "tell", "tells", "told", "upkeep", "verb", "verbs", "whoever", "wish",
})  # fmt: skip
_TERMS = {word: term for word, term in names.WORDS.items() if word not in _ENGLISH}

_PATTERNS = [(re.compile(phrase), advice) for phrase, advice in PHRASES.items()]


class Block(NamedTuple):
    """One paragraph of prose on a single line, and the line of the file where it starts."""

    line: int
    text: str


class Found(NamedTuple):
    """A phrase, its place and its plain alternative."""

    path: str
    line: int
    phrase: str
    advice: str


def paragraphs(line: int, text: str) -> Iterator[Block]:
    """Split text at blank lines, list items and cells of tables; join the lines of each paragraph."""
    block: list[str] = []
    start = line
    for number, each in enumerate([*text.splitlines(), ""], line):
        if block and (not each.strip() or re.match(r"\s*(?:[-*|#>]|\d+\.)\s*", each)):
            yield from (Block(start, cell.strip()) for cell in " ".join(block).split("|") if cell.strip())
            block = []
        if each.strip():
            start = start if block else number
            block.append(each.strip().lstrip("-*#> "))


def markdown(text: str) -> Iterator[Block]:
    """Yield the paragraphs of a Markdown page without blocks of code."""
    return paragraphs(1, re.sub(r"^\s*```.*?^\s*```", lambda code: "\n" * code[0].count("\n"), text, flags=re.M | re.S))


def _literals(tree: ast.AST) -> Iterator[Block]:
    """Yield the strings of a module, an f-string as one text with {} for each value."""
    nodes = [tree]
    docstrings = set[int]()
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstrings.update(id(each.value) for each in node.body[:1] if isinstance(each, ast.Expr))
        if isinstance(node, ast.JoinedStr):
            parts = [str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values]
            nodes += [each for each in node.values if not isinstance(each, ast.Constant)]
            text = "".join(parts)
        else:
            nodes += ast.iter_child_nodes(node)
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            text = node.value
        if id(node) in docstrings or len(text.split()) >= LITERAL_WORDS:
            yield from paragraphs(node.lineno, text)


def python(text: str) -> Iterator[Block]:
    """Yield the docstrings, comments and longer string literals of a Python file."""
    yield from _literals(ast.parse(text))
    start, comment = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != start + len(comment):
                yield from paragraphs(start, "\n".join(comment))
                comment = []
            start = start if comment else token.start[0]
            comment.append(token.string.lstrip("#!: "))
    yield from paragraphs(start, "\n".join(comment))


def phrases(path: str, text: str) -> Iterator[Found]:
    """Yield each phrase of a file that has a plain alternative."""
    for block in python(text) if path.endswith(".py") else markdown(text):
        lower = block.text.lower()
        for pattern, advice in _PATTERNS:
            for match in pattern.finditer(lower):
                yield Found(path, block.line, match[0], advice)
        for word in re.findall(r"[a-z]+", lower):
            if word in _TERMS:
                yield Found(path, block.line, word, _TERMS[word])


def folder(path: str) -> str:
    """Return the row of the table that a file belongs to: its folder, one level deeper in tests."""
    parts = Path(path).parts
    return "/".join(parts[: 2 if parts[0] == "tests" and len(parts) > 2 else 1])


def files() -> list[str]:
    """Return the Markdown and Python files that git tracks, or would track, without the engines' stubs."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return sorted(each for each in set(found) if not each.startswith("typings/") and (ROOT / each).is_file())


def excesses(counts: Mapping[str, int], ceilings: Mapping[str, int]) -> Iterator[str]:
    """Yield the folders whose number of phrases is not the ceiling."""
    for each in sorted({*counts, *ceilings}):
        count, ceiling = counts.get(each, 0), ceilings.get(each, 0)
        if count > ceiling:
            yield f"{each}: expected at most {ceiling} phrases, got {count}; to list them: python -m tests.voice {each}"
        elif count < ceiling:
            yield f"{each}: {count} phrases, ceiling {ceiling}; to lower the ceiling: python -m tests.voice --lower"


def oversize(readme_lines: int, docs_words: int, ceiling: int) -> Iterator[str]:
    """Yield the pages that are too long. The ceiling of docs applies until docs are below DOCS_WORDS."""
    limit = max(DOCS_WORDS, ceiling)
    if readme_lines > README_LINES:
        yield f"README.md: expected at most {README_LINES} lines, got {readme_lines}"
    if docs_words > limit:
        yield f"docs: expected at most {limit} words, got {docs_words}"


def main(arguments: list[str]) -> int:
    """Print each folder and page above its ceiling, or each phrase below the given paths; return the exit status."""
    texts = {path: (ROOT / path).read_text() for path in files()}
    found = [each for path, text in texts.items() for each in phrases(path, text)]
    if arguments and arguments != ["--lower"]:
        paths = [Path(each) for each in arguments]
        for each in found:
            if any(Path(each.path) == path or path in Path(each.path).parents for path in paths):
                sys.stdout.write(f"{each.path}:{each.line}: {each.phrase!r}: use {each.advice}\n")
        return 0

    table = json.loads(CEILINGS.read_text())
    counts = collections.Counter(folder(each.path) for each in found)
    words = sum(len(text.split()) for path, text in texts.items() if folder(path) == "docs" and path.endswith(".md"))
    if arguments:
        lower = {each: min(count, counts[each]) for each, count in table["phrases"].items() if counts[each]}
        table = {"docs_words": max(DOCS_WORDS, min(table["docs_words"], words)), "phrases": lower}
        CEILINGS.write_text(json.dumps(table, indent=2) + "\n")
    lines = texts["README.md"].count("\n")
    errors = [*excesses(counts, table["phrases"]), *oversize(lines, words, table["docs_words"])]
    sys.stdout.writelines(f"{each}\n" for each in errors)
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
