"""A tokenizer for models that have none: every byte of UTF-8 is a token, so there is nothing to learn or to lose."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END, PAD, TURN = "<|end|>", "<|pad|>", "<|turn|>"
"""Tokens that end a document or a turn, fill up a batch, and begin a turn."""

# What an assistant says is between the generation marks, its end included: the loss can be on that alone.
_CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|turn|>tools\\n' + tools | tojson + '<|end|>' }}{% endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|turn|>' + message.role + '\\n' -}}"
    "{%- set said = (message.content or '') + (message.tool_calls | tojson if message.tool_calls else '') -%}"
    "{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ said + '<|end|>' }}{% endgeneration %}"
    "{%- else -%}"
    "{{ said + '<|end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif -%}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Make a byte tokenizer: ids 0 to 255 are the bytes, then come the end, padding and turn tokens."""
    symbols = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={symbols[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END, PAD, TURN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN],
        chat_template=_CHAT_TEMPLATE,
    )
