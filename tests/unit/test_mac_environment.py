"""The variables that a launchd agent is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from pooled_mlx.mac.environment import record

HOME = Path("/Users/me")


def test_only_what_decides_something_is_taken() -> None:
    environment = {
        **{
            "PATH": "/opt/homebrew/bin:/bin",
            "TERM": "xterm",
            "HF_ENDPOINT": "https://mirror",
            "no_proxy": "localhost",
            "SSL_CERT_FILE": "/etc/c.pem",
        },
        **{"POOLED_MLX_PORT": "8090", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "", "HOME": "/x"},
    }
    recorded = record(environment, HOME)
    assert recorded.variables == {
        **{"SSL_CERT_FILE": "/etc/c.pem", "no_proxy": "localhost", "HF_ENDPOINT": "https://mirror", "HF_HUB_OFFLINE": "1"},
        **{"PATH": "/opt/homebrew/bin:/bin", "POOLED_MLX_PORT": "8090"},
    }
    assert recorded.warnings == ()


def test_a_home_folder_is_written_out_since_launchd_takes_a_tilde_literally() -> None:
    assert record({"HF_HOME": "~/models"}, HOME).variables == {"HF_HOME": "/Users/me/models"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("models", "is relative to this folder"),
        ("/Volumes/big/hf", "may not be there yet"),
        ("/tmp/hf", "the system empties"),
        ("/var/folders/ab/T/hf", "the system empties"),
    ],
)
def test_what_will_not_hold_is_told(value: str, words: str) -> None:
    (warning,) = record({"HF_HOME": value}, HOME).warnings
    assert warning.startswith(f"HF_HOME={value} ")
    assert words in warning


def test_a_secret_is_written_down_but_never_shown() -> None:
    recorded = record({"HF_TOKEN": "hf_x", "PIP_INDEX_URL": "https://u:p@index/simple", "POOLED_TOKEN": "t"}, HOME)
    assert recorded.lines() == ["HF_TOKEN=…", "POOLED_TOKEN=…", "PIP_INDEX_URL=https://…@index/simple"]
    assert [warning.split()[0] for warning in recorded.warnings] == ["HF_TOKEN", "POOLED_TOKEN"]
    assert record({"POOLED_TOKEN": "t"}, HOME, without=("POOLED_TOKEN",)).variables == {}
