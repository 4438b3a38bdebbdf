"""Weights from the Hugging Face hub, through `huggingface_hub`: its cache, its resume, its hashes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pooled_mlx.catalog import EMBEDDED_CARD
from pooled_mlx.store.errors import StoreError
from pooled_mlx.store.folder import check_folder
from pooled_mlx.store.paths import check_disk
from pooled_mlx.store.progress import Meter, Report, no_report

PATTERNS = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl"]
"""What is downloaded of a repo. Python files are not, so that none can ever be run."""

_POLL_SECONDS = 0.5


def _api() -> Any:
    """huggingface_hub, without progress bars of its own."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return huggingface_hub


def cached_repo(repo: str, revision: str | None) -> Path | None:
    """The folder of a repo that is already whole in the cache, None otherwise. No network."""
    try:
        folder = Path(_api().snapshot_download(repo, revision=revision, allow_patterns=PATTERNS, local_files_only=True))
        check_folder(folder)
    except (StoreError, OSError, ValueError):
        return None
    return folder


def ensure_repo(
    repo: str,
    revision: str | None,
    *,
    report: Report = no_report,
    check_fit: Callable[[int], None] = lambda weights_bytes: None,
    refresh: bool = False,
) -> Path:
    """The model folder of a repo, downloaded where it is not whole in the cache; an interrupted download goes on.

    `check_fit` is called with the bytes of the weights before a download and may raise `StoreError`. `refresh` asks the hub
    for a newer revision although the cache is whole. Raises `StoreError`.
    """
    if not refresh and (folder := cached_repo(repo, revision)) is not None:
        return folder
    hub = _api()
    with _plain_errors(repo, revision):
        plan = hub.snapshot_download(repo, revision=revision, allow_patterns=PATTERNS, dry_run=True)
        weights = sum(entry.file_size or 0 for entry in plan if entry.filename.endswith(".safetensors"))
        if not weights:
            raise StoreError(f"{repo} has no weights in mlx-lm's format (model*.safetensors). Look for its MLX conversion")
        check_fit(weights)
        missing = sum(entry.file_size or 0 for entry in plan if entry.will_download)
        blobs = Path(hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
        check_disk(blobs, max(missing - _partial_bytes(blobs), 0), repo)
        with _watch(blobs, Meter("downloading", repo, missing, report)):
            folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    check_folder(folder)
    return folder


@contextlib.contextmanager
def _watch(blobs: Path, meter: Meter) -> Iterator[None]:
    """Report the growth of the cache folder while the body runs: the same for every transfer method of the hub's client."""
    before = _all_bytes(blobs) - _partial_bytes(blobs)
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(_POLL_SECONDS):
            meter.set_done(max(_all_bytes(blobs) - before, 0))

    meter.set_done(_partial_bytes(blobs))
    watcher = threading.Thread(target=poll, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
        meter.set_done(meter.total_bytes or 0)
    finally:
        ended.set()
        watcher.join()


def _all_bytes(blobs: Path) -> int:
    return sum(_written_bytes(path) for path in blobs.glob("*"))


def _partial_bytes(blobs: Path) -> int:
    return sum(_written_bytes(path) for path in blobs.glob("*.incomplete"))


def _written_bytes(path: Path) -> int:
    """Bytes of a file that are really on disk: a transfer in pieces may have written its end first."""
    try:
        facts = path.stat()
    except OSError:
        return 0
    return min(facts.st_size, facts.st_blocks * 512)


@contextlib.contextmanager
def _plain_errors(repo: str, revision: str | None) -> Iterator[None]:
    """The hub client's many errors as one `StoreError` that names the way on."""
    from huggingface_hub import errors

    embedded = f"--model {EMBEDDED_CARD} needs no hub"
    try:
        yield
    except errors.GatedRepoError as error:
        raise StoreError(
            f"{repo} is gated: accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StoreError(f"{repo} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise StoreError(f"the Hugging Face hub has no {repo} (or it is private: log in with `hf auth login`)") from error
    except errors.HFValidationError as error:
        raise StoreError(f"{repo!r} is no repo id: write owner/name") from error
    except errors.LocalEntryNotFoundError as error:
        raise StoreError(f"{repo} is not on this disk and the hub is switched off (HF_HUB_OFFLINE). {embedded}") from error
    except StoreError:
        raise
    except OSError as error:
        reason = error.__cause__ or error
        if getattr(reason, "errno", None) == 28:
            raise StoreError(f"the disk is full: {repo} needs more room. What was downloaded is kept; run it again") from error
        raise StoreError(
            f"cannot reach the Hugging Face hub for {repo}: {_first_line(reason)}. What was downloaded is kept; run it again "
            f"when the network is back. {embedded}"
        ) from error
    except Exception as error:
        # The client's transport raises classes of whichever HTTP library it uses.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "huggingface_hub"):
            raise
        raise StoreError(
            f"the download of {repo} broke off: {_first_line(error)}. What was downloaded is kept; run it again. {embedded}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def remove_repo(repo: str) -> int:
    """Delete every revision of a repo from the hub's cache; bytes freed."""
    found = [entry for entry in _api().scan_cache_dir().repos if entry.repo_id == repo and entry.repo_type == "model"]
    if not found:
        return 0
    strategy = _api().scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in found[0].revisions))
    freed = strategy.expected_freed_size
    strategy.execute()
    return freed


def repo_bytes(repo: str) -> int:
    """Bytes of a repo in the hub's cache, whole or partial."""
    return _all_bytes(Path(_api().constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs")
