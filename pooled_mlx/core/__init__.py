"""The neutral core: values that every layer shares. No I/O, no MLX, no pydantic, no web framework."""
