"""/openapi.json against the server: what it allows is taken, what it forbids is refused by name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from .fake_server import Server, _native
from .json_schema import Schemas
from .native_build import ROOT

DOCUMENT = json.loads((ROOT / "runtime/frontend/open_api.json").read_text(encoding="utf-8"))
SCHEMAS = Schemas(DOCUMENT)
PARAMETERS = ROOT / "runtime" / "frontend" / "PARAMETERS.md"
ENDPOINTS = {
    "/v1/completions": ("CompletionRequest", "Completion", {"prompt": "hello"}),
    "/v1/chat/completions": (
        "ChatRequest",
        "ChatCompletion",
        {"messages": [{"role": "user", "content": "hello"}]},
    ),
}
CASES = [
    (path, name)
    for path, (request, _, _) in ENDPOINTS.items()
    for name in DOCUMENT["components"]["schemas"][request]["properties"]
]
# What a parameter needs beside it, as its description says.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "min_tokens": {"max_tokens": 300},
    "top_logprobs": {"logprobs": True},
    "stop_token_ids": {"ignore_eos": True},
}
ODD_VALUES: list[Any] = [
    True, False, 0, -1, 1, 3, 9, 33, -101, 1.5, -0.5, 2.01, 10.5, "", "x", "auto", "~" * 65,
    [], [5], [-1], [1.5], ["x"], ["x", "y"], [[]], [[5]], [{}], [None], {}, {"a": 1}, {"5": 1},
    {"5": 101}, {"5": "x"}, {"include_usage": True}, {"include_usage": 1}, ["x"] * 17, [5] * 17,
    [{"role": "user"}], [{"role": "", "content": "x"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"type": "function", "function": {}}], [{"type": "other"}],
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ m.tool_calls | length if m.tool_calls }}{% endfor %}"
    "{{ tools | length if tools }}hi"
)


@pytest.fixture(scope="module")
def able(make_server: Callable[..., Server]) -> Server:
    """A server whose sampler and template can do everything."""
    features = [value for name, value in vars(_native).items() if name.startswith("SAMPLER_")]
    return make_server(
        sizes={"sampler_features": sum(features), "output_record_bytes": 64},
        chat_template=CHAT_TEMPLATE,
        tool_format="hermes",
    )


def ask(server: Server, path: str, name: str, value: Any) -> tuple[int, Any]:
    body = {**ENDPOINTS[path][2], "max_tokens": 8, **BESIDE.get(name, {}), name: value}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    if name == "best_of":
        body["n"] = value
    if name == "messages" and isinstance(value, list):
        body["messages"] = [*ENDPOINTS[path][2]["messages"], *value] if value else []
    response = server.http.post(path, content=json.dumps(body))
    if response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, None
    return response.status_code, response.json()


def test_document_is_what_the_server_gives(server: Server) -> None:
    assert server.http.get("/openapi.json").json() == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1.")


def test_paths_and_methods(server: Server) -> None:
    for path, operations in DOCUMENT["paths"].items():
        real = path.replace("{model}", "fake")
        for method in ("get", "post", "put", "delete"):
            status = server.http.request(method, real, content=b"{").status_code
            expected = {"get": 200, "post": 400}[method] if method in operations else 405
            assert status == expected, (method, path)
        if "get" in operations:
            media, content = next(iter(operations["get"]["responses"]["200"]["content"].items()))
            response = server.http.get(real)
            assert response.headers["content-type"].split(";")[0] == media
            if media == "application/json":
                assert SCHEMAS.holds(content["schema"], response.json()), path


@pytest.mark.parametrize(("path", "name"), CASES)
def test_allowed_values_are_taken(able: Server, path: str, name: str) -> None:
    request, response, _ = ENDPOINTS[path]
    schema = DOCUMENT["components"]["schemas"][request]["properties"][name]
    chance = random.Random(f"{path} {name}")
    values = [SCHEMAS.make(schema, chance) for _ in range(12)]
    values += [value for value in ODD_VALUES if SCHEMAS.holds(schema, value)]
    for value in values:
        assert SCHEMAS.holds(schema, value), value
        status, body = ask(able, path, name, value)
        if name == "model":
            assert (status, body["error"]["code"]) == (404, "model_not_found")
            continue
        assert status == 200, (value, body)
        if body is not None:
            assert SCHEMAS.holds({"$ref": f"#/components/schemas/{response}"}, body), body
    able.wait_until_empty()


@pytest.mark.parametrize(("path", "name"), CASES)
def test_other_values_are_refused_by_name(able: Server, path: str, name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][ENDPOINTS[path][0]]["properties"][name]
    refused = [value for value in ODD_VALUES if not SCHEMAS.holds(schema, value)]
    assert refused
    for value in refused:
        status, body = ask(able, path, name, value)
        assert status == 400, (value, body)
        assert SCHEMAS.holds({"$ref": "#/components/schemas/Error"}, body)
        allowed = {name, "n"} if name == "best_of" else {name}
        assert body["error"]["param"].split(".")[0].split("[")[0] in allowed, (value, body)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_nothing_else_is_taken(able: Server, path: str) -> None:
    for name in ("unknown", "Temperature", "max_token", "__proto__", ""):
        status, body = ask(able, path, name, 1)
        assert (status, body["error"]["code"]) == (400, "unknown_parameter")
    request, _, base = ENDPOINTS[path]
    for name in DOCUMENT["components"]["schemas"][request]["required"]:
        body = {key: value for key, value in base.items() if key != name}
        response = able.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_parameters_in_the_text_are_described() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", PARAMETERS.read_text(encoding="utf-8"), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(told) > 25
    assert told <= {name for _, name in CASES}
