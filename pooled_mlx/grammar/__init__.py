"""Grammars that hold an answer while it is written: schema lowering, caps, Lark building, compiling, matching."""
