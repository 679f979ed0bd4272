"""Tiny models of the families in examples and docs: a config of the family's own class, random weights, and a tokenizer
of the family's real kind, trained on the product reviews and saved in the files that the family ships.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

REVIEWS = Path(__file__).parents[2] / "manifests" / "examples" / "data" / "product-reviews"
VOCABULARY = 700
"""Number of tokens, of which 256 are bytes if a tokenizer has these."""
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One family of models."""

    task: str
    """Task in its example or page of docs."""
    head: str
    """Class of transformers of the checkpoint on the Hub."""
    config: Mapping[str, Any]
    tokenizer: Callable[[Path], Mapping[str, int | None]]
    """Writes the tokenizer's files into a folder; returns the config's fields about its tokens."""
    ships: frozenset[str]
    """All files of the tokenizer."""
    halves: bool = False
    """True for fp16 weights in a file of pickled tensors, as in some older checkpoints."""


def reviews(split: str, most: int | None = None) -> list[dict[str, str]]:
    """Return the first rows of a split: `text` and `label`."""
    with (REVIEWS / f"{split}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file][:most]


@cache
def _texts() -> tuple[str, ...]:
    return tuple(row["text"] for row in reviews("train"))


def _write_json(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def write_family(folder: Path, name: str, **changes: Any) -> Path:
    """Write the tiny model of a family in the form of its checkpoint on the Hub; return the folder. `changes`: further
    fields of its config.
    """
    import torch
    import transformers

    family = FAMILIES[name]
    folder.mkdir(parents=True)
    tokens = family.tokenizer(folder)
    assert {path.name for path in folder.iterdir()} == family.ships
    config = transformers.AutoConfig.for_model(**{**family.config, **tokens, **changes})
    torch.manual_seed(5)
    model = getattr(transformers, family.head)._from_config(config)
    if family.halves:
        torch.save({key: value.half() for key, value in model.state_dict().items()}, folder / "pytorch_model.bin")
        values = config.to_diff_dict()
        _write_json(folder, "config.json", {**values, "model_type": config.model_type, "dtype": None})
    else:
        model.save_pretrained(folder)
    return folder


# -------------------------------------------------------------------------------------------------- sentencepiece


def _learn_pieces(file: Path, kind: str, size: int = VOCABULARY, **options: Any) -> None:
    """Write a sentencepiece model trained on the reviews; `kind`: unigram or bpe."""
    import sentencepiece

    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_texts()),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    file.write_bytes(model.getvalue())


def _deberta_v3(folder: Path) -> Mapping[str, int | None]:
    """Write `spm.model` alone; the mask token follows its pieces, as in `added_tokens.json`."""
    _learn_pieces(
        folder / "spm.model",
        "unigram",
        **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
        **{"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    )
    _write_json(folder, "tokenizer_config.json", {"do_lower_case": False, "vocab_type": "spm"})
    return {"vocab_size": VOCABULARY + 100, "pad_token_id": 0}


def _t5(folder: Path) -> Mapping[str, int | None]:
    _learn_pieces(folder / "spiece.model", "unigram", **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1})
    extra = [f"<extra_id_{number}>" for number in range(100)]
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "additional_special_tokens": extra}
    _write_json(folder, "special_tokens_map.json", special)
    more = {"extra_ids": 100, "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
    _write_json(folder, "tokenizer_config.json", {**special, **more})
    return {"vocab_size": VOCABULARY + 128, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def _mt5(folder: Path) -> Mapping[str, int | None]:
    _learn_pieces(folder / "spiece.model", "unigram", **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1})
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    _write_json(folder, "special_tokens_map.json", special)
    more = {"extra_ids": 0, "additional_special_tokens": None, "tokenizer_class": "T5Tokenizer"}
    _write_json(folder, "tokenizer_config.json", {**special, **more})
    return {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def _mistral(folder: Path) -> Mapping[str, int | None]:
    """Write `tokenizer.model` alone: pairs of pieces, byte fallback, no padding token."""
    _learn_pieces(folder / "tokenizer.model", "bpe", byte_fallback=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(folder, "special_tokens_map.json", special)
    more = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "tokenizer_class": "LlamaTokenizer"}
    _write_json(folder, "tokenizer_config.json", {**special, **more, "pad_token": None})
    return {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}


def _gemma(folder: Path) -> Mapping[str, int | None]:
    """Write `tokenizer.model`, and the `tokenizer.json` derived from it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from tokenizers import decoders as back
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    _learn_pieces(
        folder / "tokenizer.model",
        "bpe",
        **{"byte_fallback": True, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>", "add_dummy_prefix": False},
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<mask>", "<start_of_turn>", "<end_of_turn>"],
    )
    found = SentencePieceExtractor(str(folder / "tokenizer.model")).extract(models.BPE)
    whole = Tokenizer(models.BPE(found["vocab"], found["merges"], fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    whole.normalizer = normalizers.Replace(" ", "▁")
    whole.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    whole.decoder = back.Sequence([back.Replace("▁", " "), back.ByteFallback(), back.Fuse()])
    whole.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    whole.add_special_tokens(named)
    whole.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    _write_json(folder, "special_tokens_map.json", special)
    more = {"add_bos_token": True, "add_eos_token": False, "tokenizer_class": "GemmaTokenizer"}
    _write_json(folder, "tokenizer_config.json", {**special, **more})
    return {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


# ------------------------------------------------------------------------------------------------------ pairs of bytes


def _byte_pairs(special: Sequence[str] = (), split: str | None = None) -> Any:
    """Return a tokenizer of pairs of bytes; `special` have the first numbers, `split` is an expression for words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        cut = pre_tokenizers.Split(Regex(split), "isolated")
        whole.pre_tokenizer = pre_tokenizers.Sequence([cut, whole.pre_tokenizer])
    whole.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    whole.train_from_iterator(_texts(), trainer)
    return whole


def _vocabulary_and_merges(folder: Path, special: Sequence[str], split: str | None = None) -> Any:
    """Write `vocab.json` and `merges.txt`; return the tokenizer."""
    whole = _byte_pairs(special, split)
    whole.model.save(str(folder))
    return whole


def _roberta(folder: Path) -> Mapping[str, int | None]:
    _vocabulary_and_merges(folder, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    return {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def _gpt2(folder: Path) -> Mapping[str, int | None]:
    whole = _vocabulary_and_merges(folder, ["<|endoftext|>"])
    _write_json(folder, "tokenizer_config.json", {"model_max_length": 1024})
    end: int = whole.token_to_id("<|endoftext|>")
    return {"vocab_size": VOCABULARY, "bos_token_id": end, "eos_token_id": end}


def _phi(folder: Path) -> Mapping[str, int | None]:
    """Write a tokenizer as of GPT-2, with CodeGen's tokens for runs of spaces."""
    whole = _vocabulary_and_merges(folder, ["<|endoftext|>"])
    spaces = {" " * width: VOCABULARY + number for number, width in enumerate(range(31, 1, -1))}
    _write_json(folder, "added_tokens.json", spaces)
    end = "<|endoftext|>"
    special = {"bos_token": end, "eos_token": end, "unk_token": end}
    _write_json(folder, "special_tokens_map.json", special)
    config = {**special, "add_prefix_space": False, "tokenizer_class": "CodeGenTokenizer", "model_max_length": 2048}
    _write_json(folder, "tokenizer_config.json", config)
    number: int = whole.token_to_id(end)
    return {"vocab_size": VOCABULARY + 64, "bos_token_id": number, "eos_token_id": number}


def _qwen(folder: Path) -> Mapping[str, int | None]:
    """Write vocabulary, merges and `tokenizer.json`; the end of a turn and padding are different tokens."""
    from tokenizers import normalizers

    split = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
    whole = _vocabulary_and_merges(folder, [], split)
    whole.normalizer = normalizers.NFC()
    named = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    whole.add_special_tokens(named)
    whole.save(str(folder / "tokenizer.json"))
    start = whole.token_to_id(named[0])
    added = {
        str(start + at): {"content": token, "special": True, "normalized": False} for at, token in enumerate(named)
    }
    config = {"bos_token": None, "eos_token": named[2], "pad_token": named[0], "unk_token": None}
    more = {"added_tokens_decoder": added, "tokenizer_class": "Qwen2Tokenizer", "chat_template": CHAT}
    _write_json(folder, "tokenizer_config.json", {**config, **more, "model_max_length": 131072})
    return {"vocab_size": VOCABULARY + 64, "bos_token_id": start, "eos_token_id": start + 2}


def _llama3(folder: Path) -> Mapping[str, int | None]:
    """Write `tokenizer.json`, converted from a tiktoken list: bytes of a token, and its rank."""
    from tokenizers import processors
    from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    learnt = sorted(_byte_pairs(split=LLAMA3_SPLIT).get_vocab().items(), key=lambda each: each[1])
    ranks = folder.parent / f"{folder.name}.tiktoken"
    with ranks.open("w", encoding="ascii") as file:
        for token, rank in learnt:
            file.write(f"{b64encode(bytes(letters[letter] for letter in token)).decode()} {rank}\n")
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    whole = TikTokenConverter(str(ranks), LLAMA3_SPLIT, extra_special_tokens=special).converted()
    begin = whole.token_to_id(special[0])
    template = processors.TemplateProcessing(
        single=f"{special[0]} $A", pair=f"{special[0]} $A {special[0]}:1 $B:1", special_tokens=[(special[0], begin)]
    )
    whole.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    whole.save(str(folder / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1]}
    _write_json(folder, "special_tokens_map.json", names)
    _write_json(
        folder,
        "tokenizer_config.json",
        {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072},
    )
    return {"vocab_size": VOCABULARY + 64, "bos_token_id": begin, "eos_token_id": begin + 1}


def _modernbert(folder: Path) -> Mapping[str, int | None]:
    from tokenizers import processors

    named = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    whole = _byte_pairs(named)
    around = [(token, whole.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    whole.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=around
    )
    whole.save(str(folder / "tokenizer.json"))
    special = {f"{token[1:-1].lower()}_token": token for token in named}
    _write_json(folder, "special_tokens_map.json", special)
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    _write_json(folder, "tokenizer_config.json", {**special, **more, "model_max_length": 8192})
    ids = {"pad": 3, "bos": 1, "eos": 2, "cls": 1, "sep": 2}
    return {"vocab_size": VOCABULARY, **{f"{name}_token_id": number for name, number in ids.items()}}


# ------------------------------------------------------------------------------------------------------------ WordPiece


def _bert(folder: Path) -> Mapping[str, int | None]:
    from tokenizers import BertWordPieceTokenizer

    whole = BertWordPieceTokenizer(lowercase=True)
    whole.train_from_iterator(list(_texts()), vocab_size=VOCABULARY, show_progress=False)
    whole.save_model(str(folder))
    whole = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True)
    whole.save(str(folder / "tokenizer.json"))
    _write_json(folder, "tokenizer_config.json", {"do_lower_case": True, "model_max_length": 512})
    return {"vocab_size": VOCABULARY, "pad_token_id": 0}


# ------------------------------------------------------------------------------------------------------- the families


def _encoder(family: str, **more: Any) -> dict[str, Any]:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {"model_type": family, "max_position_embeddings": 66, **size, **none, **more}


def _decoder(family: str, **more: Any) -> dict[str, Any]:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return {"model_type": family, "max_position_embeddings": 128, "num_key_value_heads": 2, **size, **more}


def _both(family: str, **more: Any) -> dict[str, Any]:
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return {"model_type": family, **size, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", **more}


def _files(*names: str) -> frozenset[str]:
    return frozenset(names)


_CLASSES, _TOKENS, _TEXT, _SHORTER = "text-classification", "token-classification", "text-generation", "summarization"
_MERGED = ("vocab.json", "merges.txt")
_NAMED = ("special_tokens_map.json", "tokenizer_config.json")

FAMILIES: Mapping[str, Family] = {
    "deberta-v3": Family(
        _CLASSES,
        "DebertaV2ForMaskedLM",
        _encoder(
            "deberta-v2",
            relative_attention=True,
            position_buckets=16,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type="p2c|c2p",
            position_biased_input=False,
            max_relative_positions=-1,
            type_vocab_size=0,
        ),
        _deberta_v3,
        _files("spm.model", "tokenizer_config.json"),
        halves=True,
    ),
    "bert": Family(
        _CLASSES, "BertForMaskedLM", _encoder("bert"), _bert, _files("vocab.txt", "tokenizer.json", _NAMED[1])
    ),
    "roberta": Family(_CLASSES, "RobertaForMaskedLM", _encoder("roberta"), _roberta, _files(*_MERGED)),
    "modernbert": Family(
        _CLASSES,
        "ModernBertForMaskedLM",
        {
            **{"model_type": "modernbert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
            **{"num_attention_heads": 2, "max_position_embeddings": 128, "local_attention": 16},
        },
        _modernbert,
        _files("tokenizer.json", *_NAMED),
    ),
    "longformer": Family(
        _TOKENS,
        "LongformerForMaskedLM",
        _encoder("longformer", attention_window=[16, 16], max_position_embeddings=130),
        _roberta,
        _files(*_MERGED),
    ),
    "t5": Family(
        _SHORTER,
        "T5ForConditionalGeneration",
        _both("t5"),
        _t5,
        _files("spiece.model", *_NAMED),
    ),
    "mt5": Family(
        _SHORTER,
        "MT5ForConditionalGeneration",
        _both("mt5", tie_word_embeddings=False),
        _mt5,
        _files("spiece.model", *_NAMED),
    ),
    "llama3": Family(_TEXT, "LlamaForCausalLM", _decoder("llama"), _llama3, _files("tokenizer.json", *_NAMED)),
    "qwen3": Family(
        _TEXT,
        "Qwen3ForCausalLM",
        _decoder("qwen3", head_dim=8, tie_word_embeddings=True),
        _qwen,
        _files("tokenizer.json", _NAMED[1], *_MERGED),
    ),
    "qwen2.5": Family(
        _TEXT,
        "Qwen2ForCausalLM",
        _decoder("qwen2", tie_word_embeddings=True),
        _qwen,
        _files("tokenizer.json", _NAMED[1], *_MERGED),
    ),
    "gemma": Family(
        _TEXT,
        "GemmaForCausalLM",
        _decoder("gemma", head_dim=8),
        _gemma,
        _files("tokenizer.model", "tokenizer.json", *_NAMED),
    ),
    "mistral": Family(_TEXT, "MistralForCausalLM", _decoder("mistral"), _mistral, _files("tokenizer.model", *_NAMED)),
    "phi": Family(
        _TEXT,
        "PhiForCausalLM",
        _decoder("phi", partial_rotary_factor=0.5, resid_pdrop=0.0),
        _phi,
        _files("added_tokens.json", *_NAMED, *_MERGED),
    ),
    "gpt2": Family(
        _TEXT,
        "GPT2LMHeadModel",
        {
            **{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
        _gpt2,
        _files("tokenizer_config.json", *_MERGED),
    ),
}


def family_rows(task: str, split: str, most: int) -> list[dict[str, Any]]:
    """Return rows of the product reviews, in the form of a task."""
    return [_row(task, row) for row in reviews(split, most)]


def _row(task: str, row: Mapping[str, str]) -> dict[str, Any]:
    words = row["text"].split()
    match task:
        case "text-classification":
            return dict(row)
        case "token-classification":
            return {"tokens": words, "tags": ["B-LONG" if len(word) > 6 else "O" for word in words]}
        case "summarization":
            return {"source": row["text"], "target": " ".join(words[:3])}
        case "question-answering":
            answer = {"text": [words[2]], "answer_start": [len(" ".join(words[:2])) + 1]}
            return {"question": "Which is the third word?", "context": " ".join(words), "answers": answer}
        case "preference-tuning":
            prompt, chosen, rejected = (" ".join(each) for each in (words[:4], words[4:8], words[8:12] or words[:2]))
            return {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}
        case _:
            return {"text": row["text"]}


def columns_of(task: str) -> Iterable[str]:
    """Return the columns of `family_rows`."""
    return family_rows(task, "test", 1)[0].keys()
