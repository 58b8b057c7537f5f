"""mdBook's preprocessor of this book, and a check of a built book.

A chapter outside of `docs`, such as `../README.md`, gets a place in the book, and links follow it. A link to a file that
is no chapter and no picture keeps its text alone.

    python3 docs/book.py check target/book
"""

import json
import os
import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)


def place(page):
    """Path in the book of a page, which is named from the repository's root."""
    return page.removeprefix("docs/") if page.startswith("docs/") else f"repository/{page}"


def from_root(source, target):
    """Path from the repository's root of what a page links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def follow(text, source, pages):
    """The text with its links as they are from the page's place in the book."""
    here = posixpath.dirname(place(source))

    def link(match):
        mark, words, target = match.groups()
        path, _, heading = target.partition("#")
        if urlsplit(target).scheme or not path:
            return match.group(0)
        found = from_root(source, path)
        found = f"{found}/README.md" if f"{found}/README.md" in pages else found
        if not os.path.exists(found):
            return match.group(0)  # Code that looks like a link: a test of the repository finds the others.
        if found not in pages and not (found.startswith("docs/") and os.path.isfile(found)):
            return words
        there = posixpath.relpath(place(found), here or ".")
        return f"{mark}[{words}]({there}{'#' + heading if heading else ''})"

    kept = FENCE.findall(text)
    parts = FENCE.split(text)
    parts = [LINK.sub(link, part) for part in parts]
    return "".join(part + fence for part, fence in zip(parts, [*kept, ""]))


def chapters(items):
    """All chapters, also nested ones."""
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            yield item["Chapter"]
            yield from chapters(item["Chapter"]["sub_items"])


def preprocess():
    """Reads mdBook's context and book, and writes the book."""
    _, book = json.load(sys.stdin)
    found = list(chapters(book["items"]))
    sources = {id(chapter): from_root("docs/SUMMARY.md", chapter["source_path"]) for chapter in found}
    for chapter in found:
        source = sources[id(chapter)]
        chapter["content"] = follow(chapter["content"], source, set(sources.values()))
        chapter["path"] = place(source)
    json.dump(book, sys.stdout)


class Page(HTMLParser):
    """Targets of a page's links, and the names that links may lead to."""

    def __init__(self, path):
        super().__init__()
        self.targets, self.names = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id":
                self.names.add(value)


def check(book):
    """Names each link of the built book that leads nowhere. Returns their number."""
    pages = {path.resolve(): Page(path) for path in Path(book).rglob("*.html")}
    # Written to be shown under any address: its links begin at the site's root.
    pages.pop((Path(book) / "404.html").resolve(), None)
    broken = 0
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            to = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchor = unquote(url.fragment)
            if not to.exists() or (anchor and to in pages and anchor not in pages[to].names):
                print(f"{path.relative_to(Path(book).resolve())}: a link leads nowhere: {target}", file=sys.stderr)
                broken += 1
    print(f"{len(pages)} pages, {sum(len(page.targets) for page in pages.values())} links, {broken} lead nowhere")
    return broken


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", book]:
            sys.exit(check(book) > 0)
        case ["supports", _]:
            pass
        case _:
            preprocess()
