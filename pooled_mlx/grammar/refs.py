"""Local references of a JSON schema: pointers, `$id`, `$anchor`, `$dynamicAnchor`. Nothing is ever fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from pooled_mlx.grammar.errors import SchemaError

_SINGLE, _LIST, _MAP = 1, 2, 4
_FORMS = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"), _MAP),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"), _SINGLE),
    **dict.fromkeys(("contains", "propertyNames", "not", "if", "then", "else", "contentSchema"), _SINGLE),
    "items": _SINGLE | _LIST,
}
"""Keywords that hold sub-schemas, and how."""


class Target(NamedTuple):
    """A schema that a reference leads to: its own pointer from the root of the document, and the base its references use."""

    schema: Any
    pointer: str
    base: str


class Remote(LookupError):
    """A reference to a document that is not part of this one."""


def escape(name: str) -> str:
    """`name` as one step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The direct sub-schemas of `schema`, as (pointer below it, sub-schema)."""
    for key, value in schema.items():
        form = _FORMS.get(key)
        if form is None:
            continue
        if type(value) is list:
            if form & _LIST:
                for index, item in enumerate(value):
                    yield f"/{key}/{index}", item
        elif isinstance(value, bool) or form & _SINGLE:
            if form & _SINGLE:
                yield f"/{key}", value
        elif isinstance(value, Mapping):
            for name, item in value.items():
                yield f"/{key}/{escape(name)}", item


class Document:
    """One schema document and what can be referred to in it. Its parts are indexed when the first reference needs it."""

    def __init__(self, root: Any, where: str) -> None:
        self.root = root
        self.where = where
        self.lone_references = False
        self._resources: dict[str, Target] = {}
        self._anchors: dict[tuple[str, str], Target] = {}
        self._dynamic: dict[str, int] = {}
        self._indexed = False

    def base_of(self, schema: Mapping[str, Any], base: str) -> str:
        """The base for references inside `schema`, which lies in `base`."""
        identifier = None if self.lone_references and "$ref" in schema else schema.get("$id")
        return urldefrag(urljoin(base, identifier))[0] if isinstance(identifier, str) else base

    def resolve(self, reference: str, base: str, pointer: str) -> Target:
        """What `reference` means in `base`.

        Raises `SchemaError` at `pointer` for a missing target in this document, `Remote` for another document.
        """
        if not self._indexed:
            self._index()
        if reference.startswith("#"):
            uri, fragment = base, reference[1:]
        else:
            uri, fragment = urldefrag(urljoin(base, reference))
        fragment = unquote(fragment)
        resource = self._resources.get(uri)
        if resource is None:
            raise Remote(f"{reference[:100]!r} lies outside this schema, and nothing is fetched")
        if not fragment:
            return resource
        found = self._walk(resource, fragment) if fragment.startswith("/") else self._anchors.get((uri, fragment))
        if found is None:
            raise SchemaError(pointer, "$ref", f"the target {reference[:100]!r} does not exist in this schema")
        return found

    def resolve_dynamic(self, reference: str, base: str, pointer: str) -> Target:
        """Like `resolve`, for `$dynamicRef`. Raises `Remote` where the target depends on the path taken to it."""
        target = self.resolve(reference, base, pointer)
        name = reference.rpartition("#")[2]
        if isinstance(target.schema, Mapping) and target.schema.get("$dynamicAnchor") == name and self._dynamic[name] > 1:
            raise Remote(f"what {reference[:100]!r} means depends on the path to it")
        return target

    def _index(self) -> None:
        self._indexed = True
        stack: list[tuple[Any, str, str]] = [(self.root, self.where, "")]
        self._resources[""] = Target(self.root, self.where, "")
        while stack:
            schema, pointer, base = stack.pop()
            if not isinstance(schema, Mapping):
                continue
            own = self.base_of(schema, base)
            if own != base or pointer == self.where:
                self._resources.setdefault(own, Target(schema, pointer, own))
            for key in ("$anchor", "$dynamicAnchor"):
                name = schema.get(key)
                if isinstance(name, str):
                    self._anchors.setdefault((own, name), Target(schema, pointer, own))
                    if key == "$dynamicAnchor":
                        self._dynamic[name] = self._dynamic.get(name, 0) + 1
            identifier = schema.get("$id")
            if isinstance(identifier, str) and identifier.startswith("#"):  # an anchor, as drafts 6 and 7 spell it
                self._anchors.setdefault((own, identifier[1:]), Target(schema, pointer, own))
            stack.extend((child, pointer + step, own) for step, child in children(schema))

    def _walk(self, resource: Target, fragment: str) -> Target | None:
        schema, pointer, base = resource
        for raw in fragment[1:].split("/"):
            step = raw.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping) and step in schema:
                schema = schema[step]
            elif isinstance(schema, list) and step.isdecimal() and int(step) < len(schema):
                schema = schema[int(step)]
            else:
                return None
            pointer += "/" + escape(step)
            if isinstance(schema, Mapping):
                base = self.base_of(schema, base)
        return Target(schema, pointer, base)
