"""The status page: one HTML file without data, external requests or a build step."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files


@lru_cache(maxsize=1)
def page_html() -> str:
    """The page for `GET /`. Its Content-Security-Policy names its one script and one style by their hashes."""
    source = files(__name__).joinpath("status.html").read_text(encoding="utf-8")
    for tag, mark in (("script", "{script}"), ("style", "{style}")):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        source = source.replace(mark, digest, 1)
    return source
