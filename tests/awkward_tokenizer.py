"""A small tokenizer that cannot give back the ids it decoded, as real ones cannot.

"th" is one token and so are "t" and "h": ids that spell it as two come back as one. Lone bytes
decode to U+FFFD and come back as <unk>. A model samples such ids all the time; text made of them
and encoded again is another sequence. The chat templates are ChatML: one plain, one that drops the
reasoning of earlier turns as that of Qwen3 does.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

UNKNOWN, PAD, TURN_START, TURN_END = "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (UNKNOWN, PAD, TURN_START, TURN_END)
CHARACTERS = "\n" + string.printable[:95]
BYTES = 24
LARGEST = 259

_LETTERS = "etaoinsrhld_"

_TOOLS = """
{%- if tools -%}
    {{- '<|im_start|>system\\n# Tools' -}}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
"""
# As that of Qwen3-Coder, it takes the arguments of a call for an object.
_CALLS = """
        {%- for call in message.tool_calls or [] -%}
            {{- '<tool_call><function=' + call.function.name + '>' -}}
            {%- for name, value in call.function.arguments | items -%}
                {{- '<parameter=' + name + '>' + value | string + '</parameter>' -}}
            {%- endfor -%}
            {{- '</function></tool_call>' -}}
        {%- endfor -%}
"""
_OPENING = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"

PLAIN = f"""{_TOOLS}
{{%- for message in messages -%}}
    {{{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}}}
    {_CALLS.strip()}
    {{{{- '<|im_end|>\\n' -}}}}
{{%- endfor -%}}
{_OPENING}"""

REASONING = f"""{_TOOLS}
{{%- set asked = namespace(last=-1) -%}}
{{%- for message in messages -%}}
    {{%- if message.role == 'user' %}}{{% set asked.last = loop.index0 %}}{{% endif -%}}
{{%- endfor -%}}
{{%- for message in messages -%}}
    {{%- if message.role == 'assistant' -%}}
        {{%- set content = message.content or '' -%}}
        {{%- set thought = message.reasoning_content or '' -%}}
        {{%- if not thought and '</think>' in content -%}}
            {{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}}
            {{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}}
        {{%- endif -%}}
        {{{{- '<|im_start|>assistant\\n' -}}}}
        {{%- if loop.index0 > asked.last and thought -%}}
            {{{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}}}
        {{%- endif -%}}
        {{{{- content -}}}}
        {_CALLS.strip()}
        {{{{- '<|im_end|>\\n' -}}}}
    {{%- elif message.role == 'tool' -%}}
        {{%- if not loop.previtem or loop.previtem.role != 'tool' -%}}
            {{{{- '<|im_start|>user' -}}}}
        {{%- endif -%}}
        {{{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}}}
        {{%- if loop.last or loop.nextitem.role != 'tool' -%}}
            {{{{- '<|im_end|>\\n' -}}}}
        {{%- endif -%}}
    {{%- else -%}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}}}
    {{%- endif -%}}
{{%- endfor -%}}
{_OPENING}"""


def build(directory: Path, *, size: int = LARGEST, template: str = PLAIN) -> Path:
    """Write the tokenizer's files for AutoTokenizer; the same ones every time."""
    tokenizer = make(size=size, template=template)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    # transformers 5 writes a class name that transformers 4 does not know. Both know this one.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
    return directory


def make(*, size: int = LARGEST, template: str = PLAIN) -> PreTrainedTokenizerFast:
    """The tokenizer with `size` ids: characters, pairs of letters, lone bytes, special tokens."""
    pairs = list(itertools.product(_LETTERS, repeat=2))
    count = size - len(CHARACTERS) - BYTES - len(SPECIAL)
    if not 0 < count <= len(pairs):
        raise ValueError(f"A vocabulary of {size} ids cannot be made.")
    merges = pairs[:count]
    lone = [f"<0x{byte:02X}>" for byte in range(0x80, 0x80 + BYTES)]
    words = [*CHARACTERS, *(first + second for first, second in merges), *lone, *SPECIAL]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
        chat_template=template,
    )
