"""A model whose output follows a script: the next token depends on the last one alone.

The chat template ends each prompt with the start token of the script that a message names as
`SCRIPT-name`; from there on, each token of the script follows the one before it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from coordinator.text.byte_alphabet import CHAR_TO_BYTE

END_TOKEN = "<|end|>"
_HIDDEN_SIZE = 512  # at least the size of the vocabulary
_MIN_PIECE_CHARACTERS = 4
_TEMPLATE_HEAD = (
    "{% set ns = namespace(text='') %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call>{% endfor %}"
    "{% for message in messages %}{% set ns.text = ns.text + message.content %}"
    "{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
)


def build_scripted_model(folder: Path, scripts: Mapping[str, str]) -> None:
    """Write a model, its tokenizer and its template. `scripts` are texts by name."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, pieces = build_tokenizer(folder, scripts)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    end = ids[END_TOKEN]
    following = torch.full((len(ids),), end)
    for name, script in pieces.items():
        chain = [ids[_start_token(name)], *(ids[piece] for piece in script), end]
        following[chain[:-1]] = torch.tensor(chain[1:])
    _write_weights(folder, following, end)


def build_tokenizer(
    folder: Path, scripts: Mapping[str, str]
) -> tuple[Tokenizer, dict[str, list[str]]]:
    """Write the tokenizer and the template; return the pieces of each script too.

    The first 256 tokens are the bytes.
    """
    used = set(CHAR_TO_BYTE)
    pieces = {name: list(_cut_script(text, used)) for name, text in scripts.items()}
    vocabulary = {character: number for number, character in enumerate(CHAR_TO_BYTE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Added tokens, so that the tokenizer itself writes these pieces: where a grammar leaves one
    # text only, it allows no other tokens for it.
    tokenizer.add_tokens(
        [AddedToken(piece, normalized=False) for script in pieces.values() for piece in script]
    )
    tokenizer.add_special_tokens(
        [AddedToken(content, special=True) for content in (END_TOKEN, *map(_start_token, scripts))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TOKEN}))
    ends = "".join(
        f"{{% if 'SCRIPT-{name}' in ns.text %}}{_start_token(name)}{{% endif %}}"
        for name in scripts
    )
    (folder / "chat_template.jinja").write_text(_TEMPLATE_HEAD + ends)
    return tokenizer, pieces


def _start_token(name: str) -> str:
    return f"<|{name}|>"


def _cut_script(text: str, used: set[str]) -> Iterator[str]:
    """Cut a text into pieces that no script has yet, and add them to `used`."""
    begin = 0
    while begin < len(text):
        end = begin + _MIN_PIECE_CHARACTERS
        while text[begin:end] in used or end < len(text) < end + _MIN_PIECE_CHARACTERS:
            end += 1
            assert end <= len(text), "the end of this script is a piece of another one"
        used.add(text[begin:end])
        yield text[begin:end]
        begin = end


def _write_weights(folder: Path, following: torch.Tensor, end: int) -> None:
    """Attention and MLP add nothing; each embedding is a unit vector, read by the last layer."""
    vocab_size = len(following)
    assert vocab_size <= _HIDDEN_SIZE, f"{vocab_size} tokens: cut the scripts into longer pieces"
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=_HIDDEN_SIZE,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=4096,
            bos_token_id=None,
            pad_token_id=None,
            eos_token_id=end,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(vocab_size, _HIDDEN_SIZE))
        head = torch.zeros(vocab_size, _HIDDEN_SIZE)
        head[following, torch.arange(vocab_size)] = 1.0
        model.get_output_embeddings().weight.copy_(head)
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
