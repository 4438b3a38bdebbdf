"""Fill the Homebrew formula with a release: python packaging/fill_formula.py ARCHIVE URL [HOMEPAGE] > pooled-mlx.rb

ARCHIVE is the source archive that `python -m build --sdist` made, URL the address it can be downloaded from.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from urllib.parse import urlsplit

TEMPLATE = Path(__file__).with_name("pooled-mlx.rb")


def fill(archive: Path, url: str, homepage: str | None = None) -> str:
    """The formula. Raises ValueError for an address that Homebrew could not use."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "file") or '"' in url or "#" in url or not parts.path.endswith(".tar.gz"):
        raise ValueError(f"{url!r} must be an https address that ends with .tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    homepage = homepage or f"{parts.scheme}://{parts.netloc}/"
    text = TEMPLATE.read_text(encoding="utf-8")
    text = "".join(text.splitlines(keepends=True)[1:])
    for mark, value in (("@URL@", url), ("@SHA256@", digest), ("@HOMEPAGE@", homepage)):
        text = text.replace(mark, value)
    return text


def main(arguments: list[str]) -> int:
    """Run the script; returns the exit code."""
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(fill(Path(arguments[0]), *arguments[1:]), end="")
    except (OSError, ValueError) as error:
        print(f"fill_formula: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
