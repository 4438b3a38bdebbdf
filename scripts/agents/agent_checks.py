"""The agents that `run_agents.py` starts: where they come from, how they run without a person, what must come of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Agent:
    """One agent.

    `profile` is its name for `pooled-mlx connect`. `package` is an npm package, or a PyPI project when `pypi`; its newest
    release that was checked stands in it. `arguments` follow the profile's own. `answers` are the scripted answers.
    """

    name: str
    profile: str
    api: str
    program: str
    package: str
    arguments: Callable[[str], list[str]]
    answers: list[dict[str, str]]
    pypi: bool = False

    @property
    def file_name(self) -> str:
        """The file that exists when the agent did its work."""
        return f"made-by-{self.name}.txt"

    @property
    def word(self) -> str:
        """What must be in that file."""
        return f"done-by-{self.name}"

    @property
    def prompt(self) -> str:
        """What the agent is asked. The scripted answers are found by its last word."""
        return f"Please make the file {self.file_name} for me. CHECK-{self.name}"

    @property
    def last_words(self) -> str:
        """The agent's final answer."""
        return f"The file of {self.name} is made."


def _call(tool: str, parameter: str, value: str) -> str:
    return f"<tool_call>\n<function={tool}>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def _shell(name: str, tool: str, parameter: str, many: bool = False, thinks: bool = False) -> list[dict[str, str]]:
    """A call of the agent's shell tool, then the last words once its output is back. `thinks`: the agent asks for thinking."""
    command = f"echo done-by-{name} > made-by-{name}.txt && cat made-by-{name}.txt"
    value = json.dumps([command]) if many else command
    thought = "The shell can do this.\n</think>\n\n" if thinks else ""
    return [
        {"match": f"CHECK-{name}", "text": f"{thought}I will make it.\n\n{_call(tool, parameter, value)}"},
        {"match": f"done-by-{name}", "text": f"{thought}The file of {name} is made."},
    ]


_AIDER = [
    {"match": "CHECK-aider", "text": "made-by-aider.txt\n```\ndone-by-aider\n```\n\nThe file of aider is made."},
    {"match": "done-by-aider", "text": "feat: add made-by-aider.txt"},
]
_AIDER_OPTIONS = (
    "--yes-always --no-analytics --no-check-update --no-show-release-notes --no-gitignore --no-pretty --no-fancy-input --no-git"
)

AGENTS: tuple[Agent, ...] = (
    Agent(
        name="pi",
        profile="pi",
        api="Chat",
        program="pi",
        package="@mariozechner/pi-coding-agent@0.73.1",
        arguments=lambda prompt: ["-p", prompt],
        answers=_shell("pi", "bash", "command", thinks=True),
    ),
    Agent(
        name="opencode",
        profile="opencode",
        api="Chat",
        program="opencode",
        package="opencode-ai@1.18.33",
        arguments=lambda prompt: ["run", prompt],
        answers=_shell("opencode", "bash", "command"),
    ),
    Agent(
        name="codex",
        profile="codex",
        api="Responses",
        program="codex",
        package="@openai/codex@0.171.0",
        arguments=lambda prompt: ["exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", prompt],
        answers=_shell("codex", "exec_command", "cmd"),
    ),
    Agent(
        name="claude",
        profile="claude",
        api="Messages",
        program="claude",
        package="@anthropic-ai/claude-code@2.1.332",
        arguments=lambda prompt: ["-p", prompt, "--allowedTools", "Bash"],
        answers=_shell("claude", "Bash", "command", thinks=True),
    ),
    Agent(
        name="qwen",
        profile="qwen",
        api="Chat",
        program="qwen",
        package="@qwen-code/qwen-code@0.24.4",
        arguments=lambda prompt: ["--yolo", "-p", prompt],
        answers=_shell("qwen", "run_shell_command", "command"),
    ),
    Agent(
        name="cline",
        profile="cline",
        api="Chat",
        program="cline",
        package="cline@3.0.65",
        arguments=lambda prompt: ["-t", "120", prompt],
        answers=_shell("cline", "run_commands", "commands", many=True),
    ),
    Agent(
        name="continue",
        profile="continue",
        api="Chat",
        program="cn",
        package="@continuedev/cli@1.5.47",
        arguments=lambda prompt: ["--auto", "-p", prompt],
        answers=_shell("continue", "Bash", "command"),
    ),
    Agent(
        name="aider",
        profile="aider",
        api="Chat",
        program="aider",
        package="aider-chat==0.86.2",
        arguments=lambda prompt: [*_AIDER_OPTIONS.split(), "--message", prompt, "made-by-aider.txt"],
        answers=_AIDER,
        pypi=True,
    ),
)


def answers_text() -> str:
    """The script of `pooled-mlx serve --replay`: each agent's answers.

    There is no line that fits everything: a request for a title would use up the agent's call, and that line would follow.
    """
    lines = [answer for agent in AGENTS for answer in agent.answers]
    return "".join(json.dumps(line) + "\n" for line in lines)
