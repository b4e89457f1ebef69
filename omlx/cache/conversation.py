"""Deleting one conversation: the blocks of its prompt and of what follows it, as far as no other shares them."""

from collections.abc import Callable
from typing import NamedTuple

from omlx.cache.block import TOKEN_BYTES, common_tokens
from omlx.cache.companions import companions_of
from omlx.cache.interface import BlockMeta, CacheManager


class Forgotten(NamedTuple):
    """What went and what stayed: `kept_tokens` leading tokens of the prompt are still stored.

    `bytes` are those of the blocks' files. `kept_because` is None if nothing of the prompt is stored any more.
    """

    blocks: int
    bytes: int
    prompt_tokens: int
    kept_tokens: int
    kept_because: str | None


class _Block(NamedTuple):
    """A block of the conversation; it ends behind `end` tokens from the chain's beginning."""

    meta: BlockMeta
    end: int


class Conversation:
    """The stored blocks whose tokens are those of a prompt as far as both go: its own, and what continues it.

    `found` has each behind its parent. `branches` are blocks on which something else builds too, `beside` the
    companions of blocks. Made by any thread; reads heads of files.
    """

    def __init__(self, store: CacheManager, root: bytes, prompt: bytes) -> None:
        self.found: dict[bytes, _Block] = {}
        self.branches: set[bytes] = set()
        self.beside: dict[bytes, list[BlockMeta]] = {}
        self.root = root
        self.tokens = len(prompt) // TOKEN_BYTES
        self._prompt = prompt
        ahead = [(root, 0)]
        while ahead:
            parent, start = ahead.pop()
            for child in store.all_children(parent):
                if not self._continues(child.tokens or b"", start):
                    self.branches.add(parent)
                elif child.block_hash not in self.found:
                    self.found[child.block_hash] = _Block(child, start + child.token_count)
                    self.beside[child.block_hash] = store.all_children(companions_of(child.block_hash))
                    ahead.append((child.block_hash, start + child.token_count))

    def _continues(self, tokens: bytes, start: int) -> bool:
        wanted = self._prompt[start * TOKEN_BYTES : start * TOKEN_BYTES + len(tokens)]
        return common_tokens(tokens, wanted) == len(wanted) // TOKEN_BYTES


def forget(store: CacheManager, conversation: Conversation, held: Callable[[bytes], bool]) -> Forgotten:
    """Deletes a conversation from every tier, from its end back to the last block that something else builds on.

    What continues its prompt (its answers, later turns) goes with it. Blocks that a running request has `held` stay,
    and those before them. To be called where nobody matches or stores meanwhile. Touches no file.
    """
    stay, in_use, blocks, nbytes = set(conversation.branches), False, 0, 0
    kept: list[_Block] = []
    for name, block in reversed(conversation.found.items()):  # children before their parents
        is_held = held(name)
        if name in stay or is_held:
            stay.add(block.meta.parent)
            in_use |= is_held
            kept.append(block)
        else:
            blocks += store.delete_block(name)
            nbytes += block.meta.file_size
            for companion in conversation.beside.get(name, ()):
                store.delete_block(companion.block_hash)
                nbytes += companion.file_size
    upto = max((min(block.end, conversation.tokens) for block in kept), default=0)
    return Forgotten(blocks, nbytes, conversation.tokens, upto, _reason(in_use) if upto else None)


def _reason(in_use: bool) -> str:
    return "in use by a running request" if in_use else "shared with other conversations"
