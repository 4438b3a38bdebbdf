"""Settings of agents, SDKs and tools for this server: pure functions from a server's facts to exact settings."""

from pooled_mlx.connect.registry import AGENTS, banner_lines, profile_of
from pooled_mlx.connect.target import CannotMerge, FileChange, Launch, Profile, Target

__all__ = ["AGENTS", "CannotMerge", "FileChange", "Launch", "Profile", "Target", "banner_lines", "profile_of"]
