"""The wire formats, sans I/O: pydantic in, plain dicts and text frames out."""
