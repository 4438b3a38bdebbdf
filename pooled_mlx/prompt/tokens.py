"""The tokenizer of a model folder: loaded once, never changed, safe to use from any thread.

Two encoders share one vocabulary: one that knows the control tokens, for the text of chat templates, and one that does not,
for everything a client sent. Whatever a client writes, the second never gives the id of a control token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer

from pooled_mlx.prompt.exact_ids import Ids

MEMO_BYTES = 64 << 20

_TEXT_TOKEN = re.compile(
    r"[\s▁]+|</?(?:a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td"
    r"|tfoot|th|thead|tr|u|ul)>",
    re.IGNORECASE,
)
"""Added tokens that are ordinary text although they are added: runs of blanks and HTML elements (Gemma has both)."""

_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenizerError(Exception):
    """The tokenizer of a model folder cannot be used; the message says why and what to do."""


class Tokens:
    """Text <-> ids of one model.

    `added` maps the text of every added token to its id, `control` those of them that only a template may write.
    `bytes_of[id]` is what a token adds to a text (b"" for an id that the vocabulary leaves out), added tokens as their own
    text. `vocab_size` is the highest id + 1. `named` are the special tokens by name (`bos_token`), as templates see them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        named: Mapping[str, str] | None = None,
        memo_bytes: int = MEMO_BYTES,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._full = tokenizer
        self.named: Mapping[str, str] = dict(named or {})
        tokens = tokenizer.get_added_tokens_decoder()
        self.added: Mapping[str, int] = {token.content: index for index, token in tokens.items()}
        control = [
            (token, index) for index, token in tokens.items() if token.special or not _TEXT_TOKEN.fullmatch(token.content)
        ]
        self.control: Mapping[str, int] = {token.content: index for token, index in control}
        self.control_ids = frozenset(self.control.values())
        self.control_pattern = alternation(self.control)
        self.strips_left = frozenset(token.content for token, _ in control if token.lstrip)
        self.strips_right = frozenset(token.content for token, _ in control if token.rstrip)
        self.eos_ids = frozenset(eos_ids)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bytes_of: tuple[bytes, ...] = token_bytes(tokenizer, vocabulary, self.added, self.vocab_size)
        texts = [token for index, token in tokens.items() if index not in self.control_ids]
        self._plain = _without_control(tokenizer, texts, False)
        self._plain_inside = _without_control(tokenizer, texts, True)
        # A tokenizer numbers its added tokens itself; without the control tokens the numbers may differ.
        self._renumber = np.arange(self.vocab_size, dtype=np.uint32)
        for token in texts:
            self._renumber[self._plain.token_to_id(token.content)] = self.added[token.content]
        self._is_control = np.zeros(self.vocab_size, dtype=bool)
        self._is_control[list(self.control_ids)] = True
        self._memo = PieceMemo(memo_bytes)

    @classmethod
    def load(cls, folder: Path, *, memo_bytes: int = MEMO_BYTES) -> Tokens:
        """The tokenizer of a model folder. Raises `TokenizerError` when there is none or it is damaged."""
        path = folder / "tokenizer.json"
        config = read_json(folder / "tokenizer_config.json")
        if path.is_file():
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the binding raises plain Exception
                raise TokenizerError(f"{path} cannot be read: {error}. Fetch the model again.") from None
        else:
            tokenizer = _converted(folder)
        _add_configured(tokenizer, config, path)
        return cls(tokenizer, eos_ids=_eos_ids(folder, config, tokenizer), named=_named(folder, config), memo_bytes=memo_bytes)

    def encode_plain(self, text: str, *, inside: bool = False) -> Ids:
        """The ids of client text [tokens], read-only. `inside` says that other tokens come before it in the same prompt."""
        return self.encode_pieces([text], inside=inside)[0]

    def encode_pieces(self, texts: Sequence[str], *, inside: bool = True) -> list[Ids]:
        """`encode_plain` of several texts at once, in order."""
        results: list[Ids | None] = [self._memo.get(text, inside) for text in texts]
        missing = list(dict.fromkeys(text for text, ids in zip(texts, results, strict=True) if ids is None))
        if missing:
            fresh = dict(zip(missing, self._encode(missing, inside), strict=True))
            for text, ids in fresh.items():
                self._memo.put(text, inside, ids)
            results = [fresh[text] if ids is None else ids for text, ids in zip(texts, results, strict=True)]
        return [ids for ids in results if ids is not None]

    def encode_with_control(self, text: str) -> Ids:
        """The ids of trusted text [tokens], control tokens by their own ids. Never for text of a client."""
        return _frozen(self._full.encode(_encodable(text), add_special_tokens=False).ids)

    def bytes_for(self, ids: Iterable[int]) -> bytes:
        """What the ids say, as UTF-8 (not necessarily whole characters)."""
        return b"".join(self.bytes_of[index] for index in ids)

    def text_of(self, index: int) -> str:
        """One token as text, broken characters as U+FFFD. Raises IndexError for an id outside the vocabulary."""
        return self.bytes_of[index].decode("utf-8", "replace")

    @property
    def memo_bytes(self) -> int:
        """Bytes the memo text -> ids holds."""
        return self._memo.bytes

    def _encode(self, texts: list[str], inside: bool) -> list[Ids]:
        tokenizer = self._plain_inside if inside else self._plain
        encodings = tokenizer.encode_batch_fast([_encodable(text) for text in texts], add_special_tokens=False)
        return [self._checked(text, self._numbered(encoding)) for text, encoding in zip(texts, encodings, strict=True)]

    def _checked(self, text: str, ids: Ids) -> Ids:
        """Some vocabularies can spell a control token without its being added; such text is cut inside the token's text."""
        if not self._is_control[ids].any():
            return ids
        cuts = [match.start() + 1 for match in self.control_pattern.finditer(text)]
        if not cuts:
            cuts = list(range(1, len(text)))
        if not cuts:
            return self._checked(_REPLACEMENT, self._encode_one(_REPLACEMENT)) if text != _REPLACEMENT else ids[:0]
        parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return _frozen(np.concatenate([self._checked(part, self._encode_one(part)) for part in parts if part]))

    def _encode_one(self, text: str) -> Ids:
        return self._numbered(self._plain_inside.encode(text, add_special_tokens=False))

    def _numbered(self, encoding: Encoding) -> Ids:
        return _frozen(self._renumber[encoding.ids] if encoding.ids else [])


class PieceMemo:
    """Text -> ids, the least recently used forgotten first, bounded by bytes. Safe to use from any thread."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self._entries: OrderedDict[tuple[str, bool], Ids] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str, inside: bool) -> Ids | None:
        """The ids of a text, None when they are not held."""
        with self._lock:
            ids = self._entries.get((text, inside))
            if ids is not None:
                self._entries.move_to_end((text, inside))
            return ids

    def put(self, text: str, inside: bool, ids: Ids) -> None:
        """Hold the ids of a text; one that is larger than the whole budget is not held."""
        cost = self._cost(text, ids)
        with self._lock:
            if cost > self.budget_bytes or (text, inside) in self._entries:
                return
            self._entries[text, inside] = ids
            self.bytes += cost
            while self.bytes > self.budget_bytes:
                (old, _), dropped = self._entries.popitem(last=False)
                self.bytes -= self._cost(old, dropped)

    @staticmethod
    def _cost(text: str, ids: Ids) -> int:
        return 4 * len(text) + ids.nbytes + 300


def alternation(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`, the longest first; with no texts it finds nothing."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} where there is no file. Raises `TokenizerError` for a damaged one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}. Fetch the model again.") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}; it must be a JSON object. Fetch the model again.")
    return value


def _without_control(tokenizer: Tokenizer, text_tokens: Sequence[AddedToken], inside: bool) -> Tokenizer:
    """A second tokenizer over the same vocabulary that knows no control token (`inside`: and adds no leading blank)."""
    pre_tokenizer = _state(tokenizer.pre_tokenizer)
    if inside:
        _never_prepend(pre_tokenizer)
    plain = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": _state(tokenizer.normalizer),
                "pre_tokenizer": pre_tokenizer,
                "post_processor": None,
                "decoder": _state(tokenizer.decoder),
                "model": _NO_MODEL,
            }
        )
    )
    plain.model = tokenizer.model
    plain.add_tokens(list(text_tokens))
    return plain


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _never_prepend(pre_tokenizer: Any) -> None:
    """Metaspace with "first" adds a blank at the start of the prompt only, not at the start of each piece."""
    if isinstance(pre_tokenizer, dict):
        if pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
            pre_tokenizer["prepend_scheme"] = "never"
        for part in pre_tokenizer.get("pretokenizers") or ():
            _never_prepend(part)


def _converted(folder: Path) -> Tokenizer:
    """The tokenizer of a folder without tokenizer.json, as transformers converts it (no code of the folder is run)."""
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False).backend_tokenizer
        return Tokenizer.from_str(backend.to_str())
    except Exception as error:  # transformers raises whatever the format's reader raises
        raise TokenizerError(
            f"{folder} has no tokenizer.json and its tokenizer cannot be converted ({error}). Use a model that has one."
        ) from None


def _add_configured(tokenizer: Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Added tokens that stand in tokenizer_config.json only."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    for index, entry in sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else ():
        content = str(entry["content"])
        if content in known:
            continue
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer.add_tokens([AddedToken(content, **flags)])
        if tokenizer.token_to_id(content) != int(index):
            raise TokenizerError(
                f"{path.parent}: tokenizer_config.json gives {content!r} the id {index}, tokenizer.json leads to "
                f"{tokenizer.token_to_id(content)}. The two files do not belong together; fetch the model again."
            )


def _named(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for source in (read_json(folder / "special_tokens_map.json"), config):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                named[name] = text
    return named


def _eos_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """End tokens: generation_config.json, else config.json, and always the tokenizer's own."""
    ids: set[int] = set()
    model = read_json(folder / "config.json")
    nested = model.get("text_config")
    sources = (read_json(folder / "generation_config.json"), model, nested if isinstance(nested, dict) else {})
    for source in sources:
        value = source.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        ids.update(index for index in found if isinstance(index, int) and not isinstance(index, bool))
        if ids:
            break
    own = config.get("eos_token")
    text = own.get("content") if isinstance(own, dict) else own
    index = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if index is not None:
        ids.add(index)
    return frozenset(ids)


def _encodable(text: str) -> str:
    """Text as the tokenizer takes it: half a surrogate pair becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _frozen(ids: Sequence[int] | Ids) -> Ids:
    array = np.asarray(ids, dtype=np.uint32)
    array.flags.writeable = False
    return array


# --- the bytes of each token

_BLANK = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """The characters that byte-level vocabularies write for the 256 bytes: code point -> the byte as a Latin-1 character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {256 + place: chr(byte) for place, byte in enumerate(others)}


def token_bytes(tokenizer: Tokenizer, vocabulary: Mapping[str, int], added: Mapping[str, int], size: int) -> tuple[bytes, ...]:
    """The bytes of the ids 0..size-1; b"" for ids that nothing has. Added tokens are their own text."""
    kinds = _decoder_kinds(tokenizer)
    table = [b""] * size
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        for text, index in vocabulary.items():
            try:
                table[index] = text.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:
                table[index] = text.encode()
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        for text, index in vocabulary.items():
            byte = _BYTE.fullmatch(text) if len(text) == 6 else None
            table[index] = bytes([int(byte[1], 16)]) if byte else text.replace(_BLANK, " ").encode()
    else:
        for index in vocabulary.values():
            table[index] = tokenizer.decode([index], skip_special_tokens=False).encode()
    for text, index in added.items():
        table[index] = text.replace(_BLANK, " ").encode() if not text.strip(_BLANK) else text.encode()
    return tuple(table)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder: Any = tokenizer.decoder
    waiting = [json.loads(decoder.__getstate__())] if decoder is not None else []
    kinds: set[str] = set()
    while waiting:
        part = waiting.pop()
        kinds.add(part["type"])
        waiting.extend(part.get("decoders") or ())
    return kinds
