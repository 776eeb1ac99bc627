"""Serve a bundle on a free port, ask one question through the OpenAI client, print the stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from openai import OpenAI


def main() -> int:
    """Run `ask.py BUNDLE QUESTION`; the exit status says whether an answer came."""
    bundle, question = sys.argv[1], sys.argv[2]
    command = [Path(sys.executable).parent / "blink-runtime", "run", bundle, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            return 0 if ask(base_url(server), question) else 1
        finally:
            server.terminate()


def base_url(server: subprocess.Popen[str]) -> str:
    """Wait for the server's ready line and return the address in it."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if "http://" in line:
            return "http://" + line.split("http://")[1].split()[0].rstrip("/") + "/v1"
    raise SystemExit("the server ended before it was ready")


def ask(url: str, question: str) -> str:
    """Stream the answer to one question to standard output and return it."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    print(f"\n> {question}\n", flush=True)
    answer = ""
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            answer += chunk.choices[0].delta.content
            print(chunk.choices[0].delta.content, end="", flush=True)
    print("\n")
    return answer


if __name__ == "__main__":
    raise SystemExit(main())
