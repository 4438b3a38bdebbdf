"""Weights from the Hugging Face hub, through `huggingface_hub` and in its cache."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pooled_mlx.catalog import EMBEDDED_CARD
from pooled_mlx.store.errors import StoreError
from pooled_mlx.store.fetch import fetch, partial_bytes
from pooled_mlx.store.folder import check_folder, not_whole
from pooled_mlx.store.network import chain_of, explain_connection
from pooled_mlx.store.paths import check_disk
from pooled_mlx.store.progress import Meter, Report, no_report
from pooled_mlx.store.whole import find_faults

_log = logging.getLogger("pooled.store")

PATTERNS = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl"]
"""What is downloaded of a repo. Python files are not, so that none can ever be run."""

_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "huggingface_hub")


_REFUSALS = {
    401: "the token is not valid. Log in anew with `hf auth login`, or correct HF_TOKEN",
    403: "the token may not read it. Use one that may: `hf auth login`, or HF_TOKEN",
    451: "it is not available for legal reasons. Choose another model",
}
_LATER = {
    429: "it has had too many requests from this address (429). Wait some minutes; `hf auth login` raises the limit",
    **dict.fromkeys((500, 502, 503, 504), "it has troubles of its own: try again later"),
}


def _api() -> Any:
    """huggingface_hub, without progress bars of its own."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return huggingface_hub


def cached_repo(repo: str, revision: str | None) -> Path | None:
    """The folder of a repo that is already whole in the cache, None otherwise. No network."""
    return look(repo, revision)[0]


def look(repo: str, revision: str | None) -> tuple[Path | None, str]:
    """The folder of a repo that is whole in the cache; or None and what is wrong with it, "" where nothing is there."""
    try:
        folder = Path(_api().snapshot_download(repo, revision=revision, allow_patterns=PATTERNS, local_files_only=True))
        check_folder(folder)
    except StoreError as error:
        return None, str(error)
    except (OSError, ValueError) as error:
        there = getattr(error, "snapshot_path", None)  # of a snapshot that is known to lack files
        faults = find_faults(Path(there)) if there else None
        return None, not_whole(Path(there), faults) if there and faults else ""
    return folder, ""


def ensure_repo(
    repo: str,
    revision: str | None,
    *,
    report: Report = no_report,
    check_fit: Callable[[int], None] = lambda weights_bytes: None,
    refresh: bool = False,
) -> Path:
    """The model folder of a repo, downloaded where it is not whole in the cache; an interrupted download goes on.

    A damaged file is fetched again, and no other. `check_fit` is called with the bytes of the weights before a download and
    may raise `StoreError`. `refresh` asks the hub for a newer revision although the cache is whole. Raises `StoreError`.
    """
    folder, wrong = look(repo, revision)
    if folder is not None and not refresh:
        return folder
    with _plain_errors(repo, revision, wrong):
        folder = _download(repo, revision, report, check_fit)
        if damaged := find_faults(folder).wrong:
            # The hub's client takes a file that is there for whole.
            for name in damaged:
                _log.warning("%s: %s %s; it is fetched again", repo, name, damaged[name])
                _discard(folder / name)
            folder = _download(repo, revision, report, check_fit)
    if faults := find_faults(folder):
        raise StoreError(f"{repo} is not whole on the Hugging Face hub itself: {faults}. Look for another conversion of it")
    check_folder(folder)
    return folder


def _download(repo: str, revision: str | None, report: Report, check_fit: Callable[[int], None]) -> Path:
    """Fetch what of a repo is not in the cache."""
    hub = _api()
    plan = hub.snapshot_download(repo, revision=revision, allow_patterns=PATTERNS, dry_run=True)
    weights = [entry for entry in plan if entry.filename.endswith(".safetensors")]
    if not weights:
        raise StoreError(f"{repo} has no weights in mlx-lm's format (model*.safetensors). Look for its MLX conversion")
    check_fit(sum(entry.file_size or 0 for entry in weights))
    meter = Meter("downloading", repo, sum(entry.file_size or 0 for entry in plan if entry.will_download), report)
    files = _large_files(repo, [entry for entry in weights if entry.will_download])
    here = sum(partial_bytes(file.target) for file in files)
    check_disk(_blobs(repo), max((meter.total_bytes or 0) - here, 0), repo)
    _fetch_all(files, meter)
    hub.close_session()  # a connection that the server closes right now would break the next request, which has one try
    folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    meter.set_done(meter.total_bytes or 0)
    return folder


def _discard(path: Path) -> None:
    """Delete a file of the cache and all that it is a link to."""
    while True:
        below = path.parent / path.readlink() if path.is_symlink() else None
        path.unlink(missing_ok=True)
        if below is None:
            return
        path = below


def _blobs(repo: str) -> Path:
    """The folder of the hub's cache that holds a repo's files, named by their hashes."""
    return Path(_api().constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"


@dataclass(frozen=True, slots=True)
class _File:
    """A weight file on the hub and its place in the cache. `sha256` is None where the hub names it by another hash."""

    url: str
    target: Path
    size: int
    sha256: str | None


def _large_files(repo: str, entries: Sequence[Any]) -> list[_File]:
    """Where the weight files are to be had; files that the hub tells too little about are left to its own client."""
    hub, files = _api(), []
    for entry in entries:
        url = hub.hf_hub_url(repo, entry.filename, revision=entry.commit_hash)
        facts = hub.get_hf_file_metadata(url)
        if facts.etag and facts.size:
            sha256 = facts.etag if re.fullmatch(r"[0-9a-f]{64}", facts.etag) else None
            files.append(_File(url, _blobs(repo) / facts.etag, facts.size, sha256))
    return files


def _fetch_all(files: Sequence[_File], meter: Meter) -> None:
    """Fetch the files one after the other, so that a killed process has at most one of them in pieces."""
    import huggingface_hub
    from huggingface_hub.utils import build_hf_headers

    session, done = huggingface_hub.get_session(), 0
    transport = next(kind for kind in type(session).__mro__ if kind.__name__ == "Client").__module__.partition(".")[0]
    error = sys.modules[transport].HTTPError
    for file in files:
        if not file.target.exists():
            fetch(
                session,
                file.url,
                file.target,
                size=file.size,
                sha256=file.sha256,
                headers=build_hf_headers(),
                transport_errors=(error,),
                advance=lambda count, before=done: meter.set_done(before + count),
            )
        done += file.size
        meter.set_done(done)


@contextlib.contextmanager
def _plain_errors(repo: str, revision: str | None, wrong: str) -> Iterator[None]:
    """The hub client's many errors as one `StoreError` that names the way on, and what is wrong with the model here."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        known = _explain(error, repo, revision, wrong)
        if known is None:
            raise
        raise known from error


def _explain(error: Exception, repo: str, revision: str | None, wrong: str) -> StoreError | None:
    """What an error of the hub client means for the user, None for one that is no trouble of the hub, network or disk.

    `wrong` says what the model on this disk lacks.
    """
    from huggingface_hub import errors

    chain = list(chain_of(error))

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(entry, kinds) for entry in chain)

    kept = f"What was downloaded is kept; run it again. --model {EMBEDDED_CARD} needs no hub"
    here = f" ({wrong.partition('. ')[0]})" if wrong else ""
    if has(errors.GatedRepoError):
        return StoreError(f"{repo} is gated: accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN")
    if has(errors.RevisionNotFoundError):
        return StoreError(f"{repo} has no revision {revision!r} on the Hugging Face hub")
    if has(errors.RepositoryNotFoundError):
        return StoreError(f"the Hugging Face hub has no {repo}, or it is private: log in with `hf auth login` or set HF_TOKEN")
    if has(errors.HFValidationError):
        return StoreError(f"{repo!r} is no repo id: write owner/name")
    if has(errors.OfflineModeIsEnabled):
        return StoreError(
            f"{repo} is not whole on this disk{here} and the hub is switched off (HF_HUB_OFFLINE). What is there is kept; "
            f"unset HF_HUB_OFFLINE to complete it: pooled-mlx models pull {repo}. --model {EMBEDDED_CARD} needs no hub"
        )
    if any(getattr(entry, "errno", None) == errno.ENOSPC for entry in chain):
        return StoreError(f"the disk is full: {repo} needs more room. {kept}")
    status = next((code for entry in chain if (code := getattr(getattr(entry, "response", None), "status_code", None))), None)
    if status in _REFUSALS:
        return StoreError(f"the Hugging Face hub refuses {repo} ({status}): {_REFUSALS[status]}")
    if status in _LATER:
        return StoreError(f"cannot download {repo} from the Hugging Face hub: {_LATER[status]}. {kept}", temporary=True)
    if (reason := explain_connection(error)) is None:
        # The client's transport raises the classes of whichever HTTP library it uses.
        if not (isinstance(error, OSError) or any(type(entry).__module__.partition(".")[0] in _TRANSPORTS for entry in chain)):
            return None
        reason = (str(chain[-1]).splitlines() or [type(chain[-1]).__name__])[0].rstrip(". ")
    end = "" if reason.endswith("?") else "."
    return StoreError(f"cannot download {repo}{here} from the Hugging Face hub: {reason}{end} {kept}", temporary=True)


def remove_repo(repo: str) -> int:
    """Delete a repo from the hub's cache, every revision and broken-off downloads too; bytes freed."""
    freed, folder = repo_bytes(repo), _blobs(repo).parent
    if folder.exists():
        shutil.rmtree(folder)
    return freed


def repo_bytes(repo: str) -> int:
    """Bytes of a repo in the hub's cache, whole or partial."""
    return sum(path.stat().st_size for path in _blobs(repo).glob("*"))
