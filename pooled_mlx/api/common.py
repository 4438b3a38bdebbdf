"""What the three wire formats share: reading fields with exact complaints, limits, tools, sampling, error shapes."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from pooled_mlx.api.body import clean
from pooled_mlx.api.frames import data_frame
from pooled_mlx.core.errors import ApiError, bad_request
from pooled_mlx.core.limits import EFFORTS, MAX_TOP_K, NO_EFFORT
from pooled_mlx.core.request import Effort, Sampling, Tool, ToolChoice, Turn

MAX_OUTPUT_TOKENS = 65_536
MAX_TEXT_CHARACTERS = 4_000_000
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_024
MAX_SCHEMA_CHARACTERS = 32_000
MAX_FORMAT_CHARACTERS = 128_000
MAX_STOPS = 4
"""On the OpenAI APIs; Anthropic's allows more."""
MAX_STOP_CHARACTERS = 64

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3
_ID_PREFIX = re.compile(r"^(chatcmpl-|resp_|msg_|req_)")


def omitted(kind: str) -> str:
    """The note that stands where an image, document or file was sent."""
    return f"[{kind} omitted: this model reads text only]"


def show(value: Any) -> str:
    """A short form of a value for an error message."""
    text = clean(_SHORT.repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def is_unset(value: Any) -> bool:
    """True for the values that never ask for anything: null, false, 0, [] and {}."""
    return value is None or value is False or value == 0 or value == [] or value == {}


def id_suffix(request_id: str) -> str:
    """The unique part of a request id: item and response ids are built from it."""
    return re.sub(r"[^A-Za-z0-9]", "", _ID_PREFIX.sub("", request_id))


def compact_json(value: Any) -> str:
    """The one text form of call arguments that arrive as JSON values, the form agents' own serialisers write."""
    return clean(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


class Fields:
    """A JSON object together with its place in the body, so that every complaint names the field.

    Readers return None for absent and null, and raise `ApiError` 400 for a wrong type or range.
    """

    __slots__ = ("path", "values")

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, Mapping):
            where = path or "The body"
            raise bad_request(f"{where} must be a JSON object, not {show(values)}.", path or None)
        self.values: Mapping[str, Any] = values
        self.path = path

    def param(self, name: str) -> str:
        """The full name of a field of this object."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """The raw value, None when absent."""
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        """A string field, cleaned."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise bad_request(f"{self.param(name)} must be a string, not {show(value)}.", self.param(name))
        return clean(value)

    def required_text(self, name: str) -> str:
        """A string field that must be there and not empty."""
        value = self.text(name)
        if not value:
            raise bad_request(f"{self.param(name)} is missing: a non-empty string is required.", self.param(name))
        return value

    def flag(self, name: str) -> bool | None:
        """A boolean field."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise bad_request(f"{self.param(name)} must be true or false, not {show(value)}.", self.param(name))
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number between `low` and `high`, both included."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise bad_request(
                f"{self.param(name)} must be a number from {low:g} to {high:g}, not {show(value)}.", self.param(name)
            )
        return float(value)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """A whole number of at least `low` and at most `high`."""
        value = self.values.get(name)
        if value is None:
            return None
        whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value == int(value)
        if not whole or value < low or (high is not None and value > high):
            span = f"of {low} or more" if high is None else f"from {low} to {high}"
            raise bad_request(f"{self.param(name)} must be a whole number {span}, not {show(value)}.", self.param(name))
        return int(value)

    def list(self, name: str) -> Sequence[Any] | None:
        """An array field."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise bad_request(f"{self.param(name)} must be an array, not {show(value)}.", self.param(name))
        return value

    def object(self, name: str) -> Fields | None:
        """An object field with its own readers."""
        value = self.values.get(name)
        return None if value is None else Fields(value, self.param(name))

    def objects(self, name: str) -> list[Fields]:
        """An array of objects; absent and null are empty."""
        return [Fields(item, f"{self.param(name)}[{index}]") for index, item in enumerate(self.list(name) or ())]

    def refuse(self, names: Mapping[str, str]) -> None:
        """Refuse every field of `names` that asks for something; the value says what to do instead."""
        for name, advice in names.items():
            if not is_unset(self.values.get(name)):
                self.refuse_field(name, advice)

    def refuse_field(self, name: str, advice: str) -> NoReturn:
        """Refuse one field."""
        raise bad_request(f"{self.param(name)} is not supported. {advice}", self.param(name), "unsupported_parameter")


def read_sampling(body: Fields, highest_temperature: float) -> Sampling:
    """Temperature and top_k by the rules of every API: either one alone brings the other's companion value."""
    temperature = body.number("temperature", 0, highest_temperature)
    top_k = body.integer("top_k", 1)
    if top_k is not None:
        top_k = min(top_k, MAX_TOP_K)
    elif temperature is not None:
        top_k = 40
    if temperature is None and top_k is not None:
        temperature = 0.8
    return Sampling(temperature, top_k)


def read_output_limit(body: Fields, name: str) -> int | None:
    """An output limit in tokens: at least 1, capped (not refused) at 65536, None when absent."""
    value = body.integer(name, 1)
    return None if value is None else min(value, MAX_OUTPUT_TOKENS)


def read_stops(body: Fields, name: str, most: int = MAX_STOPS) -> tuple[str, ...]:
    """Stop strings: one string or an array of at `most` as many, 1 to 64 characters each."""
    value = body.get(name)
    stops = [value] if isinstance(value, str) else body.list(name) or []
    if len(stops) > most:
        raise bad_request(f"{body.param(name)} has {len(stops)} strings; at most {most} are allowed.", body.param(name))
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise bad_request(
                f"{body.param(name)} takes strings of 1 to {MAX_STOP_CHARACTERS} characters, not {show(stop)}.",
                body.param(name),
            )
    return tuple(clean(stop) for stop in stops)


def skipped_tool(kind: Any) -> str:
    """The warning for a tool that this server cannot offer: it runs elsewhere, or nobody knows it here."""
    return f"tools of type {show(kind)} are skipped: they do not run on this server"


def check_hosted_alone(body: Fields, tools: Sequence[Tool]) -> None:
    """Refuse a request all of whose tools were skipped: the model would answer from memory in the place of a search.

    Raises `ApiError` 400, unless no tool may be called anyway.
    """
    kinds = [entry.get("type") for entry in body.objects("tools")]
    choice = body.get("tool_choice")
    none = choice == "none" or (isinstance(choice, Mapping) and choice.get("type") == "none")
    if kinds and not tools and not none:
        raise bad_request(
            f"tools has nothing but {show(kinds[0])}, which does not run on this server. Leave it out, or turn it off in your "
            "client (its permissions or its web search setting).",
            "tools[0].type",
            "unsupported_value",
        )


def found_later_last(tools: Sequence[Tool], later: Sequence[str]) -> list[Tool]:
    """The tools in the order sent, but those of `later` (names in the order they were found) behind all others.

    A client that finds tools on the way puts them into the middle of its list; the prompt, which begins with the tools, would
    be another one from there on.
    """
    place = {name: number for number, name in enumerate(dict.fromkeys(later), 1)}
    return sorted(tools, key=lambda tool: place.get(tool.name, 0))


def read_effort(word: str | None, field: str) -> tuple[Effort | None, str | None]:
    """The effort level that `word` names, and a warning where it names none: then the model's own level holds."""
    if word is None or word in NO_EFFORT:
        return None, None
    for effort in EFFORTS:
        if word == effort:
            return effort, None
    return None, f"{field}: unknown effort {show(word)}; the model's default level is used (known: {', '.join(EFFORTS)})"


def read_schema(owner: Fields, name: str, limit: int = MAX_SCHEMA_CHARACTERS) -> Mapping[str, Any] | bool | None:
    """A JSON schema (object or boolean) of at most `limit` characters; None when absent."""
    value = owner.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping | bool):
        raise bad_request(f"{owner.param(name)} must be a JSON schema object, not {show(value)}.", owner.param(name))
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise bad_request(f"{owner.param(name)} is nested too deeply.", owner.param(name)) from None
    if len(text) > limit:
        message = f"{owner.param(name)} has {len(text)} characters; a schema may have {limit} here. Send a smaller one."
        raise bad_request(message, owner.param(name))
    return value if clean(text) is text else json.loads(clean(text))


def read_tool_name(tool: Fields) -> str:
    """The name of a tool: 1 to 128 characters of `[A-Za-z0-9_.:-]`."""
    name = tool.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise bad_request(
            f"{tool.param('name')} must be 1 to 128 characters of A-Z a-z 0-9 _ . : -, not {show(name)}.", tool.param("name")
        )
    return name


def read_function_tool(tool: Fields, schema_field: str = "parameters", namespace: str | None = None) -> Tool:
    """A function tool whose schema stands in `schema_field`."""
    return Tool(
        name=read_tool_name(tool),
        description=tool.text("description") or "",
        parameters=read_schema(tool, schema_field),
        strict=tool.flag("strict"),
        namespace=namespace,
    )


def check_tools(tools: Sequence[Tool]) -> None:
    """Refuse more than 1024 tools and names that stand twice."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed.", "tools")
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise bad_request(f"tools declares {show(tool.name)} twice; names must be unique.", "tools")
        seen.add(tool.name)


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Refuse a choice that no declared tool can satisfy."""
    names = {tool.name for tool in tools}
    wanted = [choice.name] if choice.name is not None else list(choice.allowed or ())
    for name in wanted:
        if name not in names:
            known = ", ".join(sorted(names)[:10]) or "none"
            raise bad_request(f"tool_choice names {show(name)}, which is not in tools (declared: {known}).", "tool_choice")
    if choice.mode == "required" and not tools:
        raise bad_request("tool_choice asks for a call, but the request declares no tool this server can offer.", "tool_choice")


def check_turns(turns: Sequence[Turn], tools: Iterable[Tool], param: str) -> None:
    """Refuse what no engine could answer: nothing to answer, an assistant turn last, too many or too long messages."""
    if not any(turn.role != "system" for turn in turns):
        raise bad_request(f"{param} needs at least one message that is not a system message.", param)
    if turns[-1].role == "assistant":
        raise bad_request(
            f"The last message of {param} is from the assistant: prefilling an answer is not supported. "
            "Send a user message or a tool result last.",
            param,
        )
    if len(turns) > MAX_MESSAGES:
        raise bad_request(f"{param} has {len(turns)} messages; at most {MAX_MESSAGES} are allowed.", param)
    characters = sum(len(turn.text) + len(turn.reasoning or "") for turn in turns)
    characters += sum(len(call.arguments) for turn in turns for call in turn.tool_calls)
    characters += sum(len(tool.description) for tool in tools)
    if characters > MAX_TEXT_CHARACTERS:
        raise bad_request(
            f"prompt is too long: it has {characters} characters of text; at most {MAX_TEXT_CHARACTERS} are allowed.",
            param,
            "context_length_exceeded",
        )


_OPENAI_TYPES = {429: "rate_limit_exceeded", 500: "server_error", 503: "server_error", 504: "server_error"}
_OPENAI_CODES = {401: "invalid_api_key", 500: "server_error", 503: "server_error", 504: "server_error"}


def openai_error(error: ApiError) -> dict[str, Any]:
    """The body of an error in OpenAI's shape."""
    status = error.kind.status
    kind = _OPENAI_TYPES.get(status, "invalid_request_error")
    code = error.code or _OPENAI_CODES.get(status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def error_headers(error: ApiError) -> dict[str, str]:
    """The headers that tell a client whether and when to try again, and `Allow` for a wrong method."""
    headers: dict[str, str] = {}
    if error.kind.permanent:
        headers["x-should-retry"] = "false"
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    if error.allow:
        headers["Allow"] = ", ".join(error.allow)
    return headers


def sse(data: Mapping[str, Any], event: str | None = None) -> str:
    """One server-sent event frame; `event` adds the event line that the Messages and Responses clients read."""
    return f"event: {event}\n{data_frame(data)}" if event else data_frame(data)


def name_tool_results(turns: Iterable[Turn]) -> list[Turn]:
    """The turns with each tool result carrying the name of the call it answers, where an earlier turn has that call."""
    names: dict[str, str] = {}
    named: list[Turn] = []
    for turn in turns:
        names.update((call.id, call.name) for call in turn.tool_calls)
        if turn.role == "tool" and turn.name is None and turn.tool_call_id in names:
            turn = replace(turn, name=names[turn.tool_call_id])
        named.append(turn)
    return named
