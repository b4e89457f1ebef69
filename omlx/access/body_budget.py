"""What clients send is bounded, all bodies together."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx.api.holding import ByteBudget, Held, current

MAX_HELD_BYTES = 1 << 30


class BodyBudget:
    """Counts the bodies of requests until they are answered; beyond the limit reading one raises Overloaded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._budget = ByteBudget(MAX_HELD_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = Held(self._budget)

        async def counted() -> Message:
            message = await receive()
            held.add(len(message.get("body", b"")))
            return message

        token = current.set(held)
        try:
            await self._app(scope, counted, send)
        finally:
            current.reset(token)
            held.release()
