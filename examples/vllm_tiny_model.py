"""Make a tiny Llama with random weights and a tokenizer of 1,000 words: something for vLLM to serve without a network.

    python examples/vllm_tiny_model.py DIRECTORY

What it answers means nothing. Its KV cache is as real as any: 64 KiB for a block of 32 tokens.
"""

import sys

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

WORDS = 1_000


def save_tiny_model(directory: str) -> None:
    """Save the model and its tokenizer, whose words are `w0` to `w999`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=512,
        vocab_size=1_024,
        max_position_embeddings=4_096,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    vocabulary = {f"w{number}": number for number in range(WORDS)} | {"<unknown>": WORDS}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))  # noqa: S106  # A word, not a secret.
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>").save_pretrained(directory)  # noqa: S106


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    save_tiny_model(sys.argv[1])
