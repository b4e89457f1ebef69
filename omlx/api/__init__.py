"""The dialects that clients speak: each is parse(body) -> ChatRequest and format(event) -> text.

`chat` and `events` are what they share, `sse` sends a streamed answer, `openai` is the first dialect.
"""
