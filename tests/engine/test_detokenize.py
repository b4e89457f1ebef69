"""Text out of tokens, on real tokenizers of the two common kinds."""

import asyncio
import random

import pytest

from omlx.engine.detokenize import REPLACEMENT, TextDelta, TextStream, continued_text, stream_text
from omlx.errors import EngineError, Overloaded
from omlx.request import Request, SamplingParams, TokenOutput
from tests.small_tokenizers import SmallTokenizer, byte_level, sentence_piece

SAMPLE = "Grüße, 世界! 👩‍👩‍👧 naïve — €5  two  spaces\n\tend 😀😀 العربية"


def spm_ids(tokenizer: SmallTokenizer, *pieces: str) -> list[int]:
    """Ids of pieces; a piece that is none is spelled in bytes."""
    vocab = tokenizer.get_vocab()
    return [
        index
        for piece in pieces
        for index in ([vocab[piece]] if piece in vocab else [vocab[f"<0x{byte:02X}>"] for byte in piece.encode()])
    ]


def pushed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [stream.push(token) for token in tokens]


@pytest.fixture(scope="module")
def gpt() -> SmallTokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def llama() -> SmallTokenizer:
    return sentence_piece()


def test_pieces_join_to_the_text_and_no_piece_holds_half_a_character(gpt):
    pieces = pushed(TextStream(gpt), gpt.encode(SAMPLE))
    assert "".join(pieces) == SAMPLE
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_byte_tokens_of_a_sentence_piece_model_join_to_characters(llama):
    tokens = spm_ids(llama, "▁Hello", "▁", "世", "界", "😀", "▁", "▁world", "👩‍👩‍👧", "!")
    pieces = pushed(TextStream(llama), tokens)
    assert "".join(pieces) == "Hello 世界😀  world👩‍👩‍👧!"
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_text_that_is_sent_never_changes_for_any_tokens(gpt, llama):
    """Random bytes: the pieces are what decoding everything at once gives, but for the very end."""
    rng = random.Random(1)
    for _ in range(50):
        tokens = [rng.randrange(len(gpt) - 1) for _ in range(40)]
        joined = "".join(pushed(TextStream(gpt), tokens))
        assert joined == gpt.decode(tokens)[: len(joined)]
        assert len(gpt.decode(tokens)) - len(joined) <= 8
    assert pushed(TextStream(llama), [rng.randrange(len(llama)) for _ in range(200)])


def test_a_text_and_what_goes_on_with_it_join_wherever_it_was_cut(gpt):
    tokens = gpt.encode(SAMPLE)
    for cut in range(len(tokens)):
        text, stream = continued_text(gpt, tokens[:cut]), TextStream(gpt, context=tokens[:cut])
        assert REPLACEMENT not in text
        assert text + "".join(pushed(stream, tokens[cut:])) == SAMPLE


def test_the_first_space_of_a_completion_is_kept(gpt, llama):
    assert pushed(TextStream(gpt), gpt.encode(" the"))[0] == " t"
    hello, world = spm_ids(llama, "▁Hello", "▁world")
    assert pushed(TextStream(llama, context=[hello]), [world]) == [" world"]
    assert pushed(TextStream(llama), [world]) == ["world"]


def test_spaces_stay_when_a_token_has_no_text(llama):
    unknown_id = len(llama) + 100
    tokens = [*spm_ids(llama, "▁Hello"), unknown_id, *spm_ids(llama, "▁world")]
    assert "".join(pushed(TextStream(llama), tokens)) == "Hello world"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_answer_may_begin_inside_a_character_of_its_prompt(gpt, llama, cut):
    text = "abc世界😀"
    for tokenizer, tokens in ((gpt, gpt.encode(text)), (llama, spm_ids(llama, "e", "n", "世界", "😀"))):
        pieces = pushed(TextStream(tokenizer, context=tokens[:-cut]), tokens[-cut:])
        assert "".join(pieces) == "😀"


def test_context_that_begins_inside_a_character_adds_nothing(llama):
    tokens = spm_ids(llama, "世界" * 5 + "é", "!")
    for start in range(len(tokens) - 1):
        assert "".join(pushed(TextStream(llama, context=tokens[start:]), spm_ids(llama, "e", "ü", "n"))) == "eün"


def test_half_a_character_at_the_end_is_dropped(gpt):
    tokens = gpt.encode("ok €")
    assert "".join(pushed(TextStream(gpt), tokens[:-1])) == "ok "


def test_what_can_never_become_a_character_is_not_held_for_ever(gpt):
    byte_ff = gpt.get_vocab()["ÿ"]
    stream = TextStream(gpt)
    pieces = [stream.push(byte_ff) for _ in range(30)]
    assert REPLACEMENT in "".join(pieces)
    assert "".join(pushed(stream, gpt.encode("fine"))).endswith("fine")


def test_end_of_text_has_no_text_wherever_it_comes(gpt):
    tokens = [*gpt.encode("a€"), gpt.eos_token_id, *gpt.encode("b")]
    assert "".join(pushed(TextStream(gpt), tokens)) == "a€b"


class Script:
    """An engine that plays tokens back."""

    def __init__(self, tokenizer: SmallTokenizer, outputs: list[TokenOutput]) -> None:
        self.tokenizer = tokenizer
        self.outputs = outputs
        self.closed_after: int | None = None

    async def generate(self, request: Request):
        count = 0
        try:
            for output in self.outputs:
                count += 1
                yield output
                await asyncio.sleep(0)
        finally:
            self.closed_after = count


def script(tokenizer: SmallTokenizer, tokens: list[int], reason: str | None = "length") -> Script:
    outputs = [TokenOutput("r", token, logprob=-0.5) for token in tokens[:-1]]
    return Script(tokenizer, [*outputs, TokenOutput("r", tokens[-1], finish_reason=reason, logprob=-0.5)])


def deltas(engine: Script) -> list[TextDelta]:
    async def collect() -> list[TextDelta]:
        request = Request("r", [1], SamplingParams(max_tokens=100))
        return [delta async for delta in stream_text(engine, request)]

    return asyncio.run(collect())


def test_deltas_carry_each_token_once_with_its_place(gpt):
    parts = deltas(script(gpt, gpt.encode("a€ the")))
    assert "".join(part.text for part in parts) == "a€ the"
    tokens = [output.token for part in parts for output in part.outputs]
    assert tokens == gpt.encode("a€ the")
    assert [offset for part in parts for offset in part.offsets] == [0, 1, 1, 1, 2, 4, 5]
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert parts[-1].generated_tokens == len(tokens)


def test_the_end_of_text_token_counts_but_is_not_shown(gpt):
    parts = deltas(script(gpt, [*gpt.encode("hi"), gpt.eos_token_id], "stop"))
    assert [output.token for part in parts for output in part.outputs] == gpt.encode("hi")
    assert (parts[-1].finish_reason, parts[-1].generated_tokens) == ("stop", 3)


def test_an_engine_that_stops_is_an_error_of_the_server(gpt):
    with pytest.raises(Overloaded, match="shutting down"):
        deltas(Script(gpt, [TokenOutput("r", 1), TokenOutput("r", None, finish_reason="abort")]))
    with pytest.raises(EngineError):
        deltas(Script(gpt, [TokenOutput("r", 1)]))
