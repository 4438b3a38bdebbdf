"""What a grammar makes of a value, and what JSON schema says about it.

As a script it judges every case of the official suite and writes the table into docs/structured-output.md:
`python -m tests.unit.grammar_judge [--write]`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pooled_mlx.grammar.lark import LarkBuilder, SchemaError
from pooled_mlx.grammar.match import GrammarTokenizer, build
from tests.shared_data import shared_path

TOKENIZER = GrammarTokenizer.of_bytes()
PAGE = Path(__file__).resolve().parents[2] / "docs" / "structured-output.md"
BEGIN, END = "<!-- suite: begin -->", "<!-- suite: end -->"


class Judge:
    """The grammar of one schema. Raises `SchemaError` for a schema that it refuses."""

    def __init__(self, schema: Any, *, strict: bool = True) -> None:
        lark = LarkBuilder({}, strict=strict)
        self.grammar = build(TOKENIZER, lark.build(lark.json(schema, "")))
        self.unenforced = lark.unenforced

    def accepts_text(self, text: str) -> bool:
        """Whether the grammar takes this text, to its end."""
        held = self.grammar.matcher()
        for byte in text.encode("utf-8", "surrogatepass"):
            if not held.allows(byte):
                return False
            held.consume(byte)
        return held.may_end()

    def accepts(self, value: Any) -> bool:
        """Whether it takes the value as Python and models write it."""
        return self.accepts_text(json.dumps(value, ensure_ascii=False))

    def accepts_somehow(self, value: Any) -> bool:
        """Whether it takes the value with its keys in some order and whole numbers without a point."""
        return any(self.accepts(other) for other in itertools.islice(spellings(value), 400))


def spellings(value: Any) -> Iterator[Any]:
    """The value with its keys in every order and whole floats as integers."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for items in itertools.product(*[list(itertools.islice(spellings(value[key]), 8)) for key in keys]):
                yield dict(zip(keys, items, strict=True))
    elif isinstance(value, list):
        for items in itertools.product(*[list(itertools.islice(spellings(item), 8)) for item in value]):
            yield list(items)
    elif isinstance(value, float) and value == value // 1:
        yield int(value)
    else:
        yield value


Verdict = Literal["right", "not enforced", "key order", "spelling", "format", "FALSE ACCEPT", "FALSE REFUSAL"]
COLUMNS: tuple[Verdict, ...] = ("right", "not enforced", "key order", "spelling", "format", "FALSE ACCEPT", "FALSE REFUSAL")


@dataclass(slots=True)
class Report:
    """Verdicts by file of the suite, and the keywords that were named as not enforced."""

    verdicts: dict[str, Counter[Verdict]] = field(default_factory=dict[str, "Counter[Verdict]"])
    named: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    @property
    def total(self) -> Counter[Verdict]:
        """All verdicts together."""
        return sum(self.verdicts.values(), Counter())


def judge_suite(folder: str = "draft2020-12") -> Report:
    """Judge every case of the suite's files in `folder` under strict."""
    report = Report()
    for path in sorted(shared_path(f"json-schema-test-suite/tests/{folder}").glob("*.json")):
        counts = report.verdicts.setdefault(path.stem, Counter())
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema, judge, named = group["schema"], None, None
            if folder.startswith("draft7") and isinstance(schema, dict):
                schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
            try:
                judge = Judge(schema)
            except SchemaError as error:
                # a schema that no value meets refuses every value, and that is what the suite asks for
                named = None if "no finite value" in error.message else error.keyword or "(schema)"
            for test in group["tests"]:
                verdict = _verdict(judge, named, path.stem, test["data"], test["valid"])
                counts[verdict] += 1
                if named is not None:
                    report.named[named] += 1
                if verdict.isupper():
                    report.wrong.append(f"{verdict}: {path.name}: {group['description']}: {test['description']}")
    return report


def _verdict(judge: Judge | None, named: str | None, file: str, value: Any, valid: bool) -> Verdict:
    if named is not None:
        return "not enforced"
    accepted = judge is not None and judge.accepts(value)
    if accepted == valid:
        return "right"
    if accepted:
        return "FALSE ACCEPT"
    if file == "format":
        return "format"
    if judge is not None and judge.accepts_somehow(value):
        whole = any(isinstance(part, float) for part in _leaves(value))
        return "spelling" if whole else "key order"
    return "FALSE REFUSAL"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def table(report: Report) -> str:
    """The report as Markdown."""
    lines = ["| file | cases | " + " | ".join(name.lower() for name in COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) + 1)]
    for name, counts in [*report.verdicts.items(), ("**all**", report.total)]:
        cells = [str(counts[column]) if counts[column] else "" for column in COLUMNS]
        lines.append(f"| {name} | {sum(counts.values())} | {' | '.join(cells)} |")
    named = ", ".join(f"`{keyword}` {count}" for keyword, count in report.named.most_common())
    return "\n".join([*lines, "", f"Named as not enforced, cases by keyword: {named}."])


def page_with(text: str, page: str) -> str:
    """`page` with `text` between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    suite = table(judge_suite())
    print(suite)
    if "--write" in sys.argv:
        PAGE.write_text(page_with(suite, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
