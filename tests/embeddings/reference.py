"""Makes reference.json: what PyTorch and transformers give for all-minilm-l6-v2, as sentence-transformers uses them.

Neither is needed by omlx or its tests. Run where both are installed:

    python tests/embeddings/reference.py ~/.omlx/models/all-minilm-l6-v2 > tests/embeddings/reference.json
"""

import json
import sys

import torch
import transformers

TEXTS = [
    "hello world",
    "What is the capital of France?",
    "Paris is the capital of France.",
    "Der Zug fährt um 7:15 Uhr ab; 東京 → 大阪, naïve café, 😀!",
    "def add(a, b):\n\treturn a + b  # tabs\tand   spaces",
    "word " * 190 + "and an end that lies behind the 128 tokens to which the tokenizer's file would cut",
]


def vector(model: torch.nn.Module, tokenizer: "transformers.PreTrainedTokenizerBase", text: str) -> list[float]:
    encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
    with torch.no_grad():
        tokens = model(**encoded)[0][0].double()
    mean = tokens.mean(0)
    return [round(value, 7) for value in (mean / mean.norm()).tolist()]


def main() -> None:
    folder = sys.argv[1]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"made_with": made_with, "texts": TEXTS, "vectors": [vector(model, tokenizer, t) for t in TEXTS]}))


if __name__ == "__main__":
    main()
