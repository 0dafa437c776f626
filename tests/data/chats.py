"""Chats, chat templates, and a tokenizer beside which a template lies."""

import json

import pytest

from swift.data.tokenizer import TokenizerFile

tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
OLMOE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + "
    "message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n'  + message['content'] "
    "+ eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}"
    "{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4 \u00e9\u20ac", "tool_calls": None},
    {"role": "user", "content": "sure?\n"},
    {"role": "assistant", "content": " yes"},
]


def write_tokenizer(directory, template, **config) -> TokenizerFile:
    """A tokenizer of bytes with special tokens, with a template beside it."""
    alphabet = {letter: n for n, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TokenizerFile(str(directory / "tokenizer.json"), end_of_document="<|end|>")
