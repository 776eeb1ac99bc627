"""What a client sees of the text: stop strings, split code points, ends, and what usage counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .fake_server import ByteCodec, Server


def stream_events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end with [DONE]."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def text_of(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def complete_both_ways(server: Server, prompt: str, **fields: Any) -> tuple[str, str, int]:
    """Return (text, finish_reason, output tokens), which must be the same streamed and not."""
    whole = server.complete(prompt, **fields)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    body = {
        "prompt": prompt,
        "max_tokens": 100,
        **fields,
        "stream_options": {"include_usage": True},
    }
    events = stream_events(server, "/v1/completions", body)
    text = "".join(map(text_of, events))
    reasons = [c["finish_reason"] for event in events for c in event["choices"]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert text == answer["choices"][0]["text"]
    assert reasons[-1] == answer["choices"][0]["finish_reason"]
    return text, reasons[-1], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("says", "stop", "shown", "num_tokens"),
    [
        # A stop string across tokens: nothing of it is shown, nothing before it is lost.
        ("The quick brown fox jumps", ["own fox"], "The quick br", 19),
        ("Hello\nUser: hi", ["\nUser:"], "Hello", 11),
        # Begins like a stop string and is none: shown in full.
        ("abcabcabx", ["abcabd"], "abcabcabx", None),
        ("own fo", ["own fox"], "own fo", None),
        # Overlaps itself; the earliest completion counts.
        ("aaaaab", ["aab"], "aaa", 6),
        # Several: the one complete first; of two complete at one byte the longer.
        ("one two three", ["three", "two"], "one ", 7),
        ("xabc", ["bc", "abc"], "x", 4),
        # Part of a code point never matches half.
        ("café crème", ["è"], "café cr", 10),
        ("stop", ["stop"], "", 4),
    ],
)
def test_stop_strings(
    server: Server, says: str, stop: list[str], shown: str, num_tokens: int | None
) -> None:
    text, reason, counted = complete_both_ways(server, says, stop=stop)
    assert text == shown
    assert reason == "stop"
    # Without a match the model ends by itself, with one more token.
    assert counted == (num_tokens if num_tokens is not None else len(says.encode()) + 1)
    server.wait_until_empty()


@pytest.mark.parametrize(
    ("says", "stop", "shown"),
    [("The quick brown fox", "own fox", "The quick br"), ("Hi\nUser: x", ["\nUser:"], "Hi")],
)
def test_stop_strings_of_chats(server: Server, says: str, stop: Any, shown: str) -> None:
    body = {"messages": [{"role": "user", "content": says}], "stop": stop}
    whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (shown, "stop")
    events = stream_events(server, "/v1/chat/completions", body)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == shown
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    # Nothing waits that cannot begin the stop string: a token with text, an event.
    assert [c["delta"]["content"] for c in choices[:-1]] == list(shown)
    server.wait_until_empty()


def test_stop_string_alone_instead_of_list(server: Server) -> None:
    assert complete_both_ways(server, "a b c", stop="b")[0] == "a "


def test_held_back_text_is_shown_at_the_length_limit(server: Server) -> None:
    # The bug: text that could begin a stop string is lost when the answer ends first.
    text, reason, counted = complete_both_ways(server, "abcdef", stop=["defg"], max_tokens=5)
    assert (text, reason, counted) == ("abcde", "length", 5)


def test_code_points_over_several_tokens_come_whole(server: Server) -> None:
    says = "é ✓ 😀 👩‍👩‍👧 日本"
    events = stream_events(server, "/v1/completions", {"prompt": says, "max_tokens": 100})
    texts = [text_of(event) for event in events]
    assert "".join(texts) == says
    assert not any("\ufffd" in text for text in texts)


def test_truncated_code_point_is_flushed_at_the_end(server: Server) -> None:
    text, reason, _ = complete_both_ways(server, "ok 😀", max_tokens=5)
    assert (text, reason) == ("ok \ufffd", "length")


def test_one_event_per_token_with_text(server: Server) -> None:
    events = stream_events(server, "/v1/completions", {"prompt": "hello", "max_tokens": 100})
    assert [text_of(event) for event in events] == [*"hello", ""]


def test_text_of_stop_token_is_not_shown(server: Server) -> None:
    text, reason, counted = complete_both_ways(server, "abcd", stop_token_ids=[ord("c")])
    assert (text, reason, counted) == ("ab", "stop", 3)


def test_ignore_eos_runs_to_the_limit(server: Server) -> None:
    text, reason, counted = complete_both_ways(server, "ab", ignore_eos=True, max_tokens=7)
    assert (text, reason, counted) == ("abababa", "length", 7)


def test_json_escapes(server: Server) -> None:
    says = 'quote " back \\ tab \t newline \n nul \x00 bell \x07 del \x7f end'
    says += " \x85 \u2028 \u2029 \u2027 ÂÃ ā é€"  # some readers take the first three for line ends
    assert complete_both_ways(server, says)[0] == says


def test_prompt_as_ids_and_as_list(server: Server) -> None:
    ids = list(b"hello")
    for prompt in (ids, [ids], ["hello"], "hello"):
        answer = server.complete(prompt).json()
        assert answer["choices"][0]["text"] == "hello"
        assert answer["usage"]["prompt_tokens"] == 5


def test_completions_default_to_sixteen_tokens(server: Server) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "x" * 40})
    assert response.json()["usage"]["completion_tokens"] == 16


def test_chat_runs_to_the_end_by_default(server: Server) -> None:
    messages = [{"role": "user", "content": "y" * 200}]
    answer = server.http.post("/v1/chat/completions", json={"messages": messages}).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": "y" * 200, "refusal": None
    }  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 200, "completion_tokens": 201, "total_tokens": 401
    }  # fmt: skip


def test_chat_role_comes_with_the_first_token(server: Server) -> None:
    messages = [{"role": "user", "content": "hey"}]
    events = stream_events(server, "/v1/chat/completions", {"messages": messages})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "h"}
    assert deltas[1:] == [{"content": "e"}, {"content": "y"}, {}]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None, None, None, "stop"]
    assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)


def test_role_comes_even_when_the_first_token_has_no_text(server: Server) -> None:
    # The first byte of a code point has no text yet, but it is the first token.
    messages = [{"role": "user", "content": "é"}]
    events = stream_events(server, "/v1/chat/completions", {"messages": messages})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "é"}, {}]


def test_empty_answer(server: Server) -> None:
    text, reason, counted = complete_both_ways(server, "abc", stop_token_ids=[ord("a")])
    assert (text, reason, counted) == ("", "stop", 1)


def test_text_parts_and_template_kwargs(server: Server) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "chat_template_kwargs": {"suffix": "!"},
    }
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "one two!"


def test_template_error_is_the_clients(server: Server) -> None:
    body = {"messages": [{"role": "bad", "content": "x"}]}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "no such role" in response.json()["error"]["message"]


def test_model_without_template_refuses_chats(make_server: Callable[..., Server]) -> None:
    server = make_server(chat_template=None)
    body = {"messages": [{"role": "user", "content": "x"}]}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]
    assert server.complete("still there").status_code == 200


class BosCodec(ByteCodec):
    """As Llama 3's tokenizer: a BOS of its own, and one that text may spell."""

    BOS = 299

    def encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        ids = [self.BOS] * adds_special_tokens
        for i, part in enumerate(text.split("<bos>")):
            ids += [self.BOS] * (i > 0) + super().encode(part, adds_special_tokens)
        return ids


def test_a_prompt_has_one_bos(make_server: Callable[..., Server]) -> None:
    # The bug: the template spells one, the tokenizer puts another in front.
    template = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}"
    server = make_server(codec=BosCodec(), chat_template=template)
    body = {"messages": [{"role": "user", "content": "hello"}]}
    whole = server.http.post("/v1/chat/completions", json=body).json()
    assert whole["usage"]["prompt_tokens"] == len([BosCodec.BOS, *b"hello"])
    assert whole["choices"][0]["message"]["content"] == "hello"
    options = {"stream_options": {"include_usage": True}}
    events = stream_events(server, "/v1/chat/completions", {**body, **options})
    assert events[-1]["usage"] == whole["usage"]
    assert server.complete("hello").json()["usage"]["prompt_tokens"] == 6
    bare = server.complete("<bos>hello", add_special_tokens=False)
    assert bare.json()["usage"]["prompt_tokens"] == 6


def test_tokens_in_bursts(make_server: Callable[..., Server]) -> None:
    # More tokens per status update than fit one event or one read.
    server = make_server(owner={"burst": 100})
    says = "".join(chr(97 + i % 26) for i in range(500))
    text, reason, counted = complete_both_ways(server, says, max_tokens=600)
    assert (text, reason, counted) == (says, "stop", 501)
    assert complete_both_ways(server, says, max_tokens=600, stop=["z"])[0] == says[:25]


def test_an_answer_of_65536_tokens(make_server: Callable[..., Server]) -> None:
    sizes = {"max_output_tokens": 65536, "max_seqlen": 66000, "num_kv_pages": 8192, "num_slots": 2}
    server = make_server(sizes=sizes, owner={"burst": 64}, max_buffered_bytes=1 << 26)
    says = "".join(chr(97 + i * i % 26) for i in range(256))
    body = {"max_tokens": 65536, "ignore_eos": True, "stop": ["never said"]}
    text, reason, counted = complete_both_ways(server, says, **body)
    assert (reason, counted) == ("length", 65536)
    assert text == says * 256
    server.wait_until_empty()
