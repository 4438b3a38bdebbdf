"""From sampled token ids to events: bytes, UTF-8, stop strings and the fold into text, reasoning and calls."""
