"""The chat template of a model folder, compiled once in a sandbox.

It renders what transformers renders, with limits: templates come from the internet with the model, so loops are counted, time
is bounded, and an error is a clear refusal. A template never comes from a request.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pooled_mlx.core.errors import ApiError, bad_request
from pooled_mlx.prompt.tokens import TokenizerError, read_json

STEP_LIMIT = 20_000_000
SECONDS_LIMIT = 20.0
_STEPS_BETWEEN_LOOKS = 1024
_LARGEST_PRODUCT = 10_000_000
_WIDE = re.compile(r"[0-9]{5}|%[^%a-zA-Z]*\*")
_STEP = "count_step"
_DATES = 4096


class TemplateFailed(Exception):
    """The template refused these messages or broke; the message is the template's own."""

    def refusal(self) -> ApiError:
        """The 400 that a client sees."""
        return bad_request(f"The model's chat template refuses this conversation: {self}", "messages")


class ChatTemplate:
    """One compiled template. `render` may run in several threads at once.

    `named` are the special tokens that templates may use (`bos_token` …).
    """

    def __init__(
        self,
        source: str,
        named: Mapping[str, str] | None = None,
        *,
        step_limit: int = STEP_LIMIT,
        seconds_limit: float = SECONDS_LIMIT,
    ) -> None:
        self.source = source
        self._named = dict(named or {})
        self._environment = _Environment(step_limit, seconds_limit)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"The model's chat template cannot be compiled: {error}. Fetch the model again.") from None

    @classmethod
    def load(cls, folder: Path, named: Mapping[str, str]) -> ChatTemplate:
        """The template of a model folder. Raises `TokenizerError` when it has none."""
        return cls(_source(folder), named)

    @property
    def uses_date(self) -> bool:
        """Whether the rendered text depends on the date."""
        return "strftime_now" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The conversation as text. `now` is the date that the template sees. Raises `TemplateFailed`."""
        self._environment.start(now)
        try:
            return self._template.render(
                **self._named,
                **(options or {}),
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise TemplateFailed(error.message or type(error).__name__) from error
        except RecursionError as error:
            raise TemplateFailed("its macros call each other without end, or what it renders is nested too deeply") from error
        except Exception as error:  # a template can raise whatever the operators and methods of plain values raise
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error


class Dates:
    """Which date a template sees: the one its conversation began with, so that the prefix stays the same after midnight.

    Keys are digests of what stands before and in the first user turn. A new conversation takes over the moment of another one
    with the same system prompt and tools while the calendar day is the same.
    """

    def __init__(self, clock: Callable[[], datetime] = datetime.now) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._moments: OrderedDict[bytes, datetime] = OrderedDict()

    def moment(self, prefix: bytes, conversation: bytes) -> datetime:
        """The date for a conversation whose system prompt and tools have the digest `prefix`."""
        with self._lock:
            known = self._moments.get(conversation)
            if known is None:
                known = self._clock()
                shared = self._moments.get(prefix)
                if shared is not None and shared.date() == known.date():
                    known = shared
            for key in (prefix, conversation):
                if key != prefix or key not in self._moments or self._moments[key].date() < known.date():
                    self._moments[key] = known
                self._moments.move_to_end(key)
            while len(self._moments) > _DATES:
                self._moments.popitem(last=False)
            return known


def _source(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = read_json(folder / "chat_template.json").get("chat_template") or read_json(folder / "tokenizer_config.json").get(
        "chat_template"
    )
    if isinstance(found, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        # transformers takes "tool_use" for requests with tools; that template serves those without tools as well.
        found = by_name.get("tool_use") or by_name.get("default") or next(iter(by_name.values()), None)
    if not isinstance(found, str):
        raise TokenizerError(f"{folder} has no chat template. Serve the instruction-tuned variant of this model.")
    return found


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with what transformers adds and a count of steps per rendering."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, step_limit: int, seconds_limit: float) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._step_limit = step_limit
        self._seconds_limit = seconds_limit
        self._run = threading.local()
        self.filters["tojson"] = _to_json
        self.filters[_STEP] = self._count_step
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = self._strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def start(self, now: datetime | None) -> None:
        """Begin a rendering in this thread."""
        self._run.steps = 0
        self._run.end = time.monotonic() + self._seconds_limit
        self._run.now = now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            step = nodes.Filter(nodes.Const(None), _STEP, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step).set_lineno(loop.lineno))
            step.set_lineno(loop.lineno, override=True)
        return template

    def _count_step(self, _: Any = None) -> None:
        run = self._run
        run.steps += 1
        if run.steps > self._step_limit:
            raise jinja2.TemplateError(f"it takes more than {self._step_limit} steps")
        if run.steps % _STEPS_BETWEEN_LOOKS == 0 and time.monotonic() > run.end:
            raise jinja2.TemplateError(f"it takes more than {self._seconds_limit:g} seconds")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._count_step()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _bound_product(left, right)
            _bound_product(right, left)
        elif operator == "**" and (not _small(left) or not _small(right) or abs(left) ** min(abs(right), 64) > 1 << 64):
            raise jinja2.TemplateError("a power in it is too large")
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise jinja2.TemplateError(f"the width in its format {left!r} is too large")
        return super().call_binop(context, operator, left, right)

    def _strftime_now(self, form: str) -> str:
        return (self._run.now or datetime.now()).strftime(form)


def _small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1 << 32


def _bound_product(sequence: Any, times: Any) -> None:
    if isinstance(sequence, str | list | tuple) and isinstance(times, int) and len(sequence) * times > _LARGEST_PRODUCT:
        raise jinja2.TemplateError(f"it repeats a text {times} times")


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote in training data; here its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(...)` without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A namespace that takes no private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"it stores the private name {name!r} in a namespace")


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
