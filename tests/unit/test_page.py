"""The status page as a file: self-contained, without data, and what its policy says it may do."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

from pooled_mlx.page import page_html

ROOT = Path(__file__).parents[2]


class Reader(HTMLParser):
    """Collects tags with their attributes, and the text of script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.blocks: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in self.blocks:
            self.blocks[self._inside].append(data)
            self._inside = ""


def read() -> Reader:
    reader = Reader()
    reader.feed(page_html())
    return reader


def policy() -> dict[str, list[str]]:
    metas = [attributes for tag, attributes in read().tags if tag == "meta"]
    (content,) = [meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy"]
    assert content is not None
    return {words.split()[0]: words.split()[1:] for words in content.split(";")}


def test_the_policy_allows_its_own_script_and_style_and_nothing_else() -> None:
    blocks = read().blocks
    hashes = {}
    for name in ("script", "style"):
        (block,) = blocks[name]
        hashes[name] = f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
    assert policy() == {
        "default-src": ["'none'"],
        "script-src": [hashes["script"]],
        "style-src": [hashes["style"]],
        "img-src": ["data:"],
        "connect-src": ["'self'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }


def test_nothing_is_loaded_from_anywhere() -> None:
    reader = read()
    for tag, attributes in reader.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), f"<{tag} {name}={value}>"
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    text = page_html()
    assert set(re.findall(r"https?://[\w.-]+", text)) == {"http://www.w3.org"}, "the name space of SVG is no request"
    assert "@import" not in text
    assert "url(" not in text


def test_nothing_is_ever_written_as_markup() -> None:
    script = read().blocks["script"][0]
    for way in ("innerHTML", "outerHTML =", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert way not in script, way


def test_ids_are_unique_and_those_that_the_script_asks_for_exist() -> None:
    reader = read()
    assert len(reader.ids) == len(set(reader.ids))
    asked = set(re.findall(r"\$\(\"([\w-]+)\"\)", reader.blocks["script"][0]))
    assert len(asked) > 10
    assert asked <= set(reader.ids)


def test_the_page_is_made_once_and_small() -> None:
    assert page_html() is page_html()
    assert len(page_html().encode()) < 64 * 1024


def test_importing_the_page_is_cheap() -> None:
    code = "import sys, pooled_mlx.page; print(len([m for m in sys.modules if m.startswith('pooled_mlx')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) == 2
