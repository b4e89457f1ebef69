"""What a program does with litellm, in both dialects. Reads what it needs as JSON from standard input; prints a line of
JSON for each case: {"case": NAME, "found": what the test checks} or {"case": NAME, "failed": the error}. A process of
its own: litellm takes long to load, warns at its loading, and keeps connections.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

# Whom this process talks to; filled from the beginning on, since a library may ask for something as it is loaded.
SPOKEN_TO: set[str] = set()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        SPOKEN_TO.add(str(arguments[0]))
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        SPOKEN_TO.add(str(arguments[1][0]))


sys.addaudithook(_note)

import litellm  # noqa: E402
from pydantic import BaseModel  # noqa: E402

GIVEN = json.loads(sys.stdin.read())
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界! What is new?"}]
READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "enum": list(GIVEN["files"])}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
CALL_IT = {"type": "function", "function": {"name": "read_file"}}
LONG = [{"role": "user", "content": "x" * 5000}]
BAD = {"too long": {"messages": LONG}, "temperature": {"temperature": 3}, "model": {"model": "nobody/knows"}}


class Verdict(BaseModel):
    good: bool


class Dialect:
    """litellm's provider for one dialect."""

    def __init__(self, provider: str, base: str) -> None:
        self.provider, self.base = provider, base

    def ask(self, messages: list[Any], *, model: str = GIVEN["text"], **fields: Any) -> Any:
        options = {"max_tokens": 40, "temperature": 0, "api_key": GIVEN["key"], "num_retries": 0, "timeout": 60}
        return litellm.completion(f"{self.provider}/{model}", messages, api_base=self.base, **options | fields)

    def chat(self) -> Any:
        return whole(self.ask(QUESTION))

    def stream(self) -> Any:
        chunks = list(self.ask(QUESTION, stream=True, stream_options={"include_usage": True}))
        return whole(litellm.stream_chunk_builder(chunks)) | {"pieces": len(chunks)}

    def tools(self) -> Any:
        return self._round_trip(self.ask)

    def tools_streamed(self) -> Any:
        def ask(messages: list[Any], **fields: Any) -> Any:
            chunks = self.ask(messages, stream=True, stream_options={"include_usage": True}, **fields)
            return litellm.stream_chunk_builder(list(chunks))

        return self._round_trip(ask)

    def _round_trip(self, ask: Callable[..., Any]) -> Any:
        """The model has to call the tool; the tool is run; then the model may say something."""
        messages: list[Any] = list(QUESTION)
        first = ask(messages, tools=[READ], tool_choice=CALL_IT, max_tokens=200)
        message = first.choices[0].message
        (call,) = message.tool_calls
        path = json.loads(call.function.arguments)["path"]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": GIVEN["files"][path]}]
        second = ask(messages, tools=[READ])
        return {
            "path": path,
            "reason": first.choices[0].finish_reason,
            "known": first.usage.prompt_tokens + first.usage.completion_tokens,
            "second": whole(second),
        }

    def structured(self) -> Any:
        answer = self.ask(QUESTION, response_format=Verdict, max_tokens=200)
        return Verdict.model_validate_json(answer.choices[0].message.content).model_dump()

    def images(self) -> Any:
        found = []
        for url in GIVEN["pictures"]:
            content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
            found.append(whole(self.ask([{"role": "user", "content": content}], model=GIVEN["pictures_model"])))
        return found

    def errors(self) -> Any:
        bad = BAD | {"key": {"api_key": "wrong"}}
        return {name: error_of(partial(self.ask, **{"messages": QUESTION} | fields)) for name, fields in bad.items()}

    def embeddings(self) -> Any:
        model = f"{self.provider}/{GIVEN['vectors_model']}"
        answer = litellm.embedding(model, GIVEN["inputs"], api_base=self.base, api_key=GIVEN["key"])
        return [item["embedding"] for item in answer.data]


def whole(answer: Any) -> dict[str, Any]:
    """What is compared of an answer."""
    choice, usage = answer.choices[0], answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    counts = {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "cached": cached or 0}
    return {"text": choice.message.content, "reason": choice.finish_reason} | counts


def error_of(work: Callable[[], Any]) -> Any:
    try:
        work()
    except Exception as error:
        return {"kind": type(error).__name__, "status": getattr(error, "status_code", None), "text": str(error)}
    return {"kind": "none"}


def run(name: str, work: Callable[[], Any]) -> None:
    try:
        line = {"case": name, "found": work()}
    except Exception:
        line = {"case": name, "failed": traceback.format_exc()}
    print(json.dumps(line))


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    cases = ("chat", "stream", "tools", "tools_streamed", "structured", "images", "errors")
    openai = Dialect("openai", f"{GIVEN['url']}/v1")
    for dialect in (openai, Dialect("anthropic", GIVEN["url"])):
        for case in cases:
            run(f"{dialect.provider} {case}", getattr(dialect, case))
    run("openai embeddings", openai.embeddings)
    run("spoken to", lambda: sorted(SPOKEN_TO))
