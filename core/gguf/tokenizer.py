"""Builds `tokenizer.json` and `tokenizer_config.json` from the metadata of a GGUF file.

GGUF keeps a vocabulary, merges or scores, token types and the *name* of the rule that splits text before merging; the
rules themselves are those of the models' published tokenizers. Names: llama.cpp, `llama-vocab`.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penjing.core.errors import InputError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_NAMES = ("gpt-2", "gpt2", "phi-2", "olmo", "exaone4")
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "codeshell", "exaone", "command-r")  # each digit alone, then as GPT-2
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")  # a known word is taken unmerged
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "command-r")  # letters and their accents become one character, where they do
_SPLITS = {
    **dict.fromkeys((*_WHOLE_WORDS, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "seed-coder": _SEED,
}
RULES = (
    "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "dbrx", "stablelm2", "gpt-4o", "seed-coder", "command-r"
)  # fmt: skip
"""One name of each rule that splits text."""
SUPPORTED_PRE_TOKENIZERS = (*_GPT2_NAMES, *_DIGIT_NAMES, *_SPLITS)


def tokenizer_from_gguf(fields: dict[str, Any], source: str) -> dict[str, str]:
    """File name → text of the tokenizer files.

    Args:
        fields: metadata of the file, keys such as `tokenizer.ggml.tokens`.
        source: the file's name, for errors.

    Raises:
        InputError: no tokenizer in the file, an unsupported kind (named), or inconsistent lists.
    """
    model = fields.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(model, str) or model not in builders:
        raise InputError(f"{source}: the tokenizer model {model!r} is not supported; supported: {', '.join(builders)}")
    tokens = _tokens(fields, source)
    try:
        tokenizer = builders[model](fields, tokens, source)
        _add_special_tokens(tokenizer, fields, tokens, source)
    except InputError:
        raise
    except Exception as error:  # the tokenizers library reports everything as a bare Exception
        raise InputError(f"{source}: its tokenizer is damaged ({error}); get the file again") from error
    if tokenizer.get_vocab_size() != len(tokens):
        raise InputError(f"{source}: its tokenizer is damaged: special tokens are missing from the token list")
    special = {
        f"{name}_token": _token(fields, f"{key}_token_id", tokens, source)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    _add_template(tokenizer, fields, special, source)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.get(f"{fields.get('general.architecture')}.context_length"),
        **special,
    }
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    config = {key: value for key, value in config.items() if value is not None}
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def _byte_level(fields: dict[str, Any], tokens: list[str], source: str) -> Tokenizer:
    name = fields.get("tokenizer.ggml.pre")
    if name not in SUPPORTED_PRE_TOKENIZERS:
        known = ", ".join(SUPPORTED_PRE_TOKENIZERS)
        raise InputError(f"{source}: the pre-tokenizer {name!r} is not supported; supported: {known}")
    written = _merges(fields, tokens, source)
    if wrong := [merge for merge in written if merge.count(" ") != 1]:
        raise InputError(f"{source}: tokenizer.ggml.merges holds {wrong[0]!r}, not a pair; get the file again")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in written)]
    vocab = {token: index for index, token in enumerate(tokens)}
    # as in the published tokenizers of these families: a whole word of the vocabulary is taken without merging
    whole_words = name in (*_WHOLE_WORDS, "tekken")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    tokenizer.decoder = decoders.ByteLevel()
    if name in _GPT2_NAMES:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name in _DIGIT_NAMES:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _merges(fields: dict[str, Any], tokens: list[str], source: str) -> list[str]:
    """The merges; none where all tokens are bytes, since GGUF writers leave out an empty list."""
    types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    learned = any(kind == _NORMAL and len(token) > 1 for token, kind in zip(tokens, types, strict=False))
    if not fields.get("tokenizer.ggml.merges") and not learned:
        return []
    return _list(fields, "tokenizer.ggml.merges", str, source)


def _sentencepiece(fields: dict[str, Any], tokens: list[str], source: str) -> Tokenizer:
    """SentencePiece BPE: merges follow from the scores, and what no piece covers is spelled in byte tokens."""
    scores = _list(fields, "tokenizer.ggml.scores", float, source)
    if len(scores) != len(tokens):
        raise InputError(f"{source}: {len(scores)} scores for {len(tokens)} tokens; get the file again")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = _token(fields, "unknown_token_id", tokens, source)
    merges = merges_from_scores(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    # llama.cpp puts the space before every text between control tokens, also before one that begins with a space
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer


def merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece BPE: every split of a piece into two pieces, best score of the whole first."""
    merges = []
    for piece, index in vocab.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[index], left, right) for left, right in known]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, fields: dict[str, Any], tokens: list[str], source: str) -> None:
    types = _list(fields, "tokenizer.ggml.token_type", int, source) if "tokenizer.ggml.token_type" in fields else []
    if types and len(types) != len(tokens):
        raise InputError(f"{source}: {len(types)} token types for {len(tokens)} tokens; get the file again")
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    user_defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


def _add_template(tokenizer: Tokenizer, fields: dict[str, Any], special: dict[str, str | None], source: str) -> None:
    """Put begin- and end-of-text around a prompt where the file, or else the family, says so."""
    begins = fields["tokenizer.ggml.model"] == "llama" or fields.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    bos = special["bos_token"] if fields.get("tokenizer.ggml.add_bos_token", begins) else None
    eos = special["eos_token"] if fields.get("tokenizer.ggml.add_eos_token", False) else None
    used = [token for token in (bos, eos) if token is not None]
    if not used:
        return
    if any(":" in token or " " in token for token in used):
        raise InputError(f"{source}: begin- or end-of-text token {used} with a space or colon is not supported")
    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    pair = " ".join(part for part in (bos, "$A", "$B:1", eos) if part is not None)
    ids = [(token, tokenizer.token_to_id(token)) for token in used]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _tokens(fields: dict[str, Any], source: str) -> list[str]:
    tokens = _list(fields, "tokenizer.ggml.tokens", str, source)
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        repeated = next(token for token in tokens if token in seen or seen.add(token))
        raise InputError(f"{source}: the token {repeated!r} occurs twice in its vocabulary, which is not supported")
    return tokens


def _list(fields: dict[str, Any], key: str, kind: type, source: str) -> list[Any]:
    values = fields.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
        raise InputError(f"{source}: {key} is missing or not a list of {kind.__name__}; get a complete file")
    return values


def _token(fields: dict[str, Any], key: str, tokens: list[str], source: str) -> str | None:
    index = fields.get(f"tokenizer.ggml.{key}")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise InputError(f"{source}: tokenizer.ggml.{key} is {index!r}, the vocabulary has {len(tokens)} tokens")
    return tokens[index]
