"""Renders tests/data/chat/templates with Jinja2, set up as transformers sets it up.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6
    venv/bin/python tests/golden/make_chat_goldens.py

Writes tests/data/chat/expected.json: for each template and each case of cases.json the rendered
text, the message of raise_exception, or that rendering fails.
"""

import copy
import datetime
import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

DATA = pathlib.Path(__file__).parent.parent / "data" / "chat"
NOW = datetime.datetime(2024, 7, 26, 9, 5, 3)
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Raised(Exception):
    """What a template raises on purpose."""


class Generation(jinja2.ext.Extension):
    """The block that marks what the assistant says, without the marking."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_text")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    raise Raised(message)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def normalised(message):
    """A message as servers hand it to a text model's template."""
    message = copy.deepcopy(message)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    ordered = {"role": message.pop("role"), "content": content}
    message.pop("content", None)
    for key in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = message.pop(key, None)
        if value is not None and value != []:
            ordered[key] = value
    for call in ordered.get("tool_calls", []):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            call["function"]["arguments"] = json.loads(arguments)
    return ordered | message


def render(template, case):
    variables = {
        "messages": [normalised(message) for message in case["messages"]],
        "tools": case.get("tools"),
        "documents": case.get("documents"),
        "add_generation_prompt": case.get("add_generation_prompt", True),
    }
    try:
        text = template.render(**variables, **SPECIAL_TOKENS, **case.get("template_kwargs", {}))
    except Raised as raised:
        return {"raised": str(raised)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text}


def main():
    cases = json.loads((DATA / "cases.json").read_text())
    env = environment()
    expected = {}
    for path in sorted((DATA / "templates").glob("*.jinja")):
        template = env.from_string(path.read_text())
        only = [case for case in cases if case.get("template", path.stem) == path.stem]
        expected[path.stem] = {case["name"]: render(template, case) for case in only}
    text = json.dumps(expected, ensure_ascii=False, indent=1, sort_keys=True)
    (DATA / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
