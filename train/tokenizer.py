"""Train nano's tokenizer: byte-level BPE in the manner of Qwen, small enough to ship.

    python -m ready_jax.train.tokenizer --data-dir ../shared/data --out ready_jax/assets/nano/target

82 s on two CPU cores, over all 265 MB of blend/ and blend_pretrain/ (held-out files left out).
The chat template beside it renders both thinking flags; nano itself never thinks.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel as ByteLevelOffsets

from ready_jax.train.samples import Sample, read_samples, unit_hash

# Qwen3.5's pre-tokenizer: letters with their marks, one digit at a time, spaces before a word kept with it.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PLAIN_ADDED_TOKENS = ("<think>", "</think>")  # kept by skip_special_tokens, as in Qwen

CHAT_TEMPLATE = """\
{%- set no_thinking = enable_thinking is defined and not enable_thinking %}
{%- set empty_think = '<think>\\n\\n</think>\\n\\n' %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('role ' ~ message.role ~ ' is not known: system, user or assistant is needed') }}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message must come first') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last and no_thinking %}
        {{- empty_think }}
    {%- endif %}
    {{- message.content | trim }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if no_thinking %}
        {{- empty_think }}
    {%- endif %}
{%- endif %}
"""


def texts(sample: Sample) -> Iterator[str]:
    if sample.text is not None:
        yield sample.text
    for message in sample.messages or ():
        yield message["content"].strip()


def training_texts(data_dir: Path, share: float, seed: int) -> Iterator[str]:
    """Training texts, held-out files left out: the `share` of samples that the hash of (seed, id) picks."""
    for folder in ("blend", "blend_pretrain"):
        for sample in read_samples(data_dir / folder):
            if unit_hash(seed, sample.id) < share:
                yield from texts(sample)


def train_bpe(lines: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with exactly `vocab_size` ids, added tokens last."""
    added = len(SPECIAL_TOKENS) + len(PLAIN_ADDED_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevelOffsets(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - added, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED_TOKENS])
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"training gave {found} ids, {vocab_size} are needed: too little text for more merges")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what `AutoTokenizer.from_pretrained(folder)` reads, in words that transformers 4 knows too."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "mask_token": "<|mask|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with blend/ and blend_pretrain/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--share", type=float, default=1.0, help="share of the samples to train on")
    parser.add_argument("--seed", type=int, default=0, help="picks the samples when --share is below 1")
    args = parser.parse_args()
    start = time.perf_counter()
    tokenizer = train_bpe(training_texts(args.data_dir, args.share, args.seed), args.vocab_size)
    save(tokenizer, args.out)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS + PLAIN_ADDED_TOKENS}
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "ids": ids, "seconds": seconds}))


if __name__ == "__main__":
    main()
