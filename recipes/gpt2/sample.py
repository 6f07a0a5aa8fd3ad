"""Continues a text with a trained GPT-2 through ONNX Runtime: `python sample.py MODEL TOKENIZER --prompt "def"`.

The tokenizer is the `tokenizer.json` that `onward pack` wrote next to the shards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def draw(logits: np.ndarray, temperature: float, top_k: int, generator: np.random.Generator) -> int:
    """One token from logits [vocabulary]: of the `top_k` likeliest (0: of all); temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits < np.partition(logits, -top_k)[-top_k], -np.inf, logits)
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    return int(generator.choice(len(weights), p=weights / weights.sum()))


def continue_text(
    session: onnxruntime.InferenceSession,
    tokens: list[int],
    count: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Draws up to `count` tokens one after the other, each from the model's logits for the text before it."""
    generator = np.random.default_rng(seed)
    longest = int(session.get_modelmeta().custom_metadata_map["context_length"])
    text = list(tokens)
    for _ in range(count):
        (logits,) = session.run(["logits"], {"input_ids": np.array([text[-longest:]], dtype=np.int64)})
        text.append(draw(logits[0, -1], temperature, top_k, generator))
        yield text[-1]


def main() -> None:
    """Reads the command line and prints the prompt and what follows it."""
    parser = argparse.ArgumentParser(description="Continue a text with a trained GPT-2 through ONNX Runtime.")
    parser.add_argument("model", type=Path, help="the ONNX file that onward exported")
    parser.add_argument("tokenizer", type=Path, help="the tokenizer.json that onward pack wrote")
    parser.add_argument("--prompt", default="def", help="the text to continue (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to draw at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=40, help="draw from so many; 0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    options = parser.parse_args()
    if options.temperature < 0 or options.top_k < 0 or options.tokens < 1:
        parser.error("--temperature and --top-k must be at least 0, --tokens at least 1")
    for path in (options.model, options.tokenizer):
        if not path.is_file():
            parser.error(f"{str(path)!r} does not exist; train and export first, as README.md says")
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    end = tokenizer.token_to_id(END_OF_TEXT)
    # An empty prompt starts a new document.
    tokens = tokenizer.encode(options.prompt).ids or [end]
    session = onnxruntime.InferenceSession(options.model)
    drawn: list[int] = []
    for token in continue_text(session, tokens, options.tokens, options.temperature, options.top_k, options.seed):
        if token == end:
            break
        drawn.append(token)
    sys.stdout.write(options.prompt + tokenizer.decode(drawn) + "\n")


if __name__ == "__main__":
    main()
