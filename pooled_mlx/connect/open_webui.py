"""Open WebUI (Chat Completions)."""

from __future__ import annotations

from urllib.parse import urlsplit

from pooled_mlx.connect.merge import shell_lines, shell_quote
from pooled_mlx.connect.target import TEMPORARY, Launch, Profile, Target


def profile(target: Target) -> Profile:
    """Environment variables, and what a container needs besides: this server admits it by name and by token only."""
    env = {
        "OPENAI_API_BASE_URL": target.openai_url,
        "OPENAI_API_KEY": target.key,
        "ENABLE_OLLAMA_API": "false",
        "AIOHTTP_CLIENT_TIMEOUT": "3600",
    }
    port = urlsplit(target.base_url).port or 80
    inside = f"host.docker.internal:{port}"
    token = "a token of your own" if target.token is None else target.token
    text = (
        f"{shell_lines(env, 'open-webui serve')}\n\n"
        "In Docker the server must listen where the container can reach it and admit its name, with a token:\n\n"
        f"POOLED_TOKEN={shell_quote(token)} pooled-mlx serve --port {port} --allow-host {inside}\n"
        f"docker run -d -p 3000:8080 --add-host host.docker.internal:host-gateway -v open-webui:/app/backend/data \\\n"
        f"  -e OPENAI_API_BASE_URL=http://{inside}/v1 -e OPENAI_API_KEY={shell_quote(token)} -e ENABLE_OLLAMA_API=false \\\n"
        "  --name open-webui ghcr.io/open-webui/open-webui:main\n\n"
        "On Linux add --host with the address of the docker bridge (often 172.17.0.1) to pooled-mlx serve.\n"
    )
    return Profile(
        name="open-webui",
        title="Open WebUI",
        text=text,
        install="pip install open-webui",
        launch=Launch(("open-webui", "serve", "--port", "3000"), {**env, "DATA_DIR": TEMPORARY}),
    )
