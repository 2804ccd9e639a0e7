"""Records what transformers makes of text: chat prompts, ids and greedy continuations.

Everything here is made from nothing by transformers, tokenizers and sentencepiece: small tokenizers
of eight families, with templates that have the constructs of the published ones, and three tiny
models. Run in an environment with transformers, torch, sentencepiece and protobuf:

    python tests/recorded_text/record.py

The versions that wrote the files are in them.
"""

import io
import json
import random
import shutil
import tempfile
from datetime import datetime
from pathlib import Path

import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
VERSIONS = {m.__name__: m.__version__ for m in (transformers, tokenizers, sentencepiece, torch)}
NOW = datetime(2026, 3, 4, 5, 6, 7)

TEXTS = [
    "",
    "hello",
    " hello  world ",
    "  two\n\nlines\t and 12345 67, I'LL say (don't): x**2\r\n",
    "naïve café e\u0301, 日本語, 👩\u200d👩\u200d👧, \U0010ffff",
    "<s>[INST] hi [/INST]</s> <|im_start|>user\n<|im_end|>",
    "▁ already ▁▁",
    "\x00\x7f \u00a0\u3000\ufffd",
    "The quick brown fox jumps over the lazy dog. The end.",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " Why  is the café 12345 €? "},
    ],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Hello, who are you?"},
        {"role": "assistant", "content": '<think>\nhm\n</think>\n\nA pirate, <b>"arr"</b>! '},
        {"role": "user", "content": "Say </s> and <|im_end|> & 日本"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "count", "name": None},
        {"role": "user", "content": "three"},
    ],
    [{"role": "user", "content": "one"}, {"role": "user", "content": "again"}],
]
CORPUS = "".join(file.read_text() for file in sorted((HERE / "templates").iterdir())) + " ".join(
    f"the quick brown fox number {i} says hello to the lazy dog, a pirate user" for i in range(200)
)


def sentencepiece_model():
    """Trains a BPE with byte fallback, as Llama-2's and Mistral's is."""
    model = io.BytesIO()
    lines = [line for line in CORPUS.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=370,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def pieces_of(model):
    """Lists (text, score, GGUF token type)."""
    kinds = {"unknown": 2, "control": 3, "byte": 6, "unused": 5}
    rows = []
    for i in range(model.get_piece_size()):
        kind = next((k for n, k in kinds.items() if getattr(model, f"is_{n}")(i)), 1)
        text = model.id_to_piece(i)
        rows.append((text, model.get_score(i), 4 if text == "<tool>" else kind))
    return rows


def sentencepiece_tokenizer(rows, specials, *, scheme):
    """Builds the `tokenizers` form: `legacy` as Llama-2's file, `first` as Mistral's, or none."""
    vocab = {text: i for i, (text, _, _) in enumerate(rows)}
    scores = {text: score for text, score, kind in rows if kind == 1}
    own = {text: vocab[text] for text in scores}
    merges = generate_merges(own, scores)
    bpe = tokenizers.models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = tokenizers.Tokenizer(bpe)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    elif scheme == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
    if scheme != "none":
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(t, normalized=False) for t in ["<unk>", *specials]])
    return made


def byte_level_tokenizer(pattern, specials, *, digits=False, nfc=False, vocab_size=286):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = normalizers.NFC() if nfc else None
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS.splitlines(), trainer)
    return made


def starting_with(made, bos):
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made


def split(digits):
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def families(rows):
    """Yields (name, tokenizer, special tokens): each as its family's files are."""
    s, e = "<s>", "</s>"
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    yield (
        "chatml",
        byte_level_tokenizer(None, chatml, digits=True),
        {"bos_token": chatml[1], "eos_token": chatml[2], "pad_token": chatml[2]},
    )
    made = sentencepiece_tokenizer(rows, [s, e], scheme="legacy")
    special = {"bos_token": s, "eos_token": e, "unk_token": "<unk>"}
    yield "llama2", starting_with(made, s), special
    own = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]
    own += ["<|start_header_id|>", "<|end_header_id|>"]
    made = byte_level_tokenizer(split(r"\p{N}{1,3}"), own)
    yield "llama31", starting_with(made, own[0]), {"bos_token": own[0], "eos_token": own[2]}
    made = sentencepiece_tokenizer(rows, [s, e, "[INST]", "[/INST]"], scheme="first")
    yield "mistral", starting_with(made, s), special
    made = sentencepiece_tokenizer(rows, [s, e], scheme="legacy")
    yield "zephyr", starting_with(made, s), special | {"pad_token": e}
    own = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    made = sentencepiece_tokenizer(rows, own, scheme="none")
    yield "gemma", starting_with(made, "<bos>"), {"bos_token": "<bos>", "eos_token": "<eos>"}
    own = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    made = byte_level_tokenizer(split(r"\p{N}{1,3}"), own)
    yield "deepseek", made, {"bos_token": own[0], "eos_token": own[1], "pad_token": own[1]}
    own = [*chatml, "<think>", "</think>"]
    made = byte_level_tokenizer(split(r"\p{N}"), own[:3], nfc=True)
    made.add_tokens(own[3:])
    yield "qwen3", made, {"eos_token": own[2], "pad_token": own[0]}
    made = byte_level_tokenizer(None, chatml)
    yield "constructs", made, {"eos_token": chatml[2], "pad_token": chatml[0]}


def write_folder(folder, name, made, special):
    """Saves a tokenizer; where its template and its special tokens stand differs by family."""
    template = (HERE / "templates" / f"{name}.jinja").read_text()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.dumps(json.loads(file.read_text()), ensure_ascii=False, separators=(",", ":"))
    file.write_text(content)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if name in ("zephyr", "constructs"):
        (folder / "chat_template.jinja").write_text(template)
        settings["chat_template"] = "not this one"
    elif name == "qwen3":
        (folder / "chat_template.jinja").write_text(template)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].role }}")
    elif name == "mistral":
        named = {"default": template, "tool_use": "{{ tools | length }}"}
        settings["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    else:
        settings["chat_template"] = template
    if name == "llama2":  # as files of older versions: with options, and in two files
        kind = {"__type": "AddedToken", "lstrip": False, "normalized": False}
        kind |= {"rstrip": False, "single_word": False}
        settings |= {key: kind | {"content": text} for key, text in special.items()}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    if name == "deepseek":
        settings["add_bos_token"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))


def files_of(folder):
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix != ".safetensors"
    }


def chat(tokenizer, messages):
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        return {"messages": messages, "error": str(error)}
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return {"messages": messages, "text": text, "ids": ids}


def record_families(rows):
    found = {"versions": VERSIONS, "now": NOW.isoformat(), "families": {}}
    for name, made, special in families(rows):
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home)
            write_folder(folder, name, made, special)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            texts = [
                {
                    "text": text,
                    "ids": tokenizer.encode(text),
                    "without": tokenizer.encode(text, add_special_tokens=False),
                    "decoded": tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True),
                }
                for text in TEXTS
            ]
            found["families"][name] = {
                "files": files_of(folder),
                "texts": texts,
                "chats": [chat(tokenizer, messages) for messages in CONVERSATIONS],
            }
    return found


def record_sentencepiece(model, rows):
    rng = random.Random(0)
    alphabet = [*"aehlotx  .,'", "the", " quick", "日", "é", "▁", "👧", "<tool>", "\n", "12", "aaa"]
    texts = [t for t in TEXTS if "<s>" not in t]
    texts += ["".join(rng.choices(alphabet, k=rng.randint(1, 30))) for _ in range(60)]
    return {
        "versions": VERSIONS,
        "pieces": rows,
        "texts": [{"text": text, "ids": model.encode(text)} for text in texts],
    }


SHAPE = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SHAPE |= {"max_position_embeddings": 256, "initializer_range": 0.6, "rms_norm_eps": 1e-6}


def record_generation(name, made, special, home):
    """Saves a tiny model with end tokens that some of its continuations reach."""
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, "deepseek" if name == "llama" else "chatml", made, special)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tied = name != "llama"
    config = transformers.AutoConfig.for_model(
        name, **SHAPE, vocab_size=len(tokenizer), tie_word_embeddings=tied, use_cache=True
    )
    prompts = [{"prompt": text} for text in TEXTS[1:6] if "INST" not in text]
    prompts += [{"messages": messages} for messages in CONVERSATIONS[:3]]
    for prompt in prompts:
        if "prompt" in prompt:
            prompt["ids"] = tokenizer.encode(prompt["prompt"])
        else:
            prompt["ids"] = chat(tokenizer, prompt["messages"])["ids"]

    def continue_all(model, **options):
        for prompt in prompts:
            ids = torch.tensor([prompt["ids"]])
            mask = torch.ones_like(ids)
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=24, do_sample=False, **options
            )
            prompt["tokens"] = out[0, ids.shape[1] :].tolist()

    # A seed with two tokens that come late in some texts, and with texts that have none of them.
    for seed in range(100):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        continue_all(model, pad_token_id=0, eos_token_id=None)
        texts = [prompt["tokens"] for prompt in prompts]
        late = [t for text in texts for i, t in enumerate(text) if i > 6 and t not in text[:i]]
        ends = list(dict.fromkeys(late))[-2:]
        if len(ends) == 2 and any(not set(ends) & set(text) for text in texts):
            break
    other = next(t for t in texts[0][2:] if t not in ends)  # it would end others if it counted
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = 0
    model.config.eos_token_id = other
    model.save_pretrained(folder)
    config_file = folder / "config.json"
    config_file.write_text(
        json.dumps(json.loads(config_file.read_text()) | {"eos_token_id": other}, indent=1)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.generation_config.eos_token_id == ends, model.generation_config
    continue_all(model)
    for prompt in prompts:
        prompt["text"] = tokenizer.decode(prompt["tokens"], skip_special_tokens=True)
    assert {prompt["tokens"][-1] in ends for prompt in prompts} == {True, False}
    return {"stop_ids": sorted(set(ends)), "prompts": prompts}


def write_json(name, content):
    (HERE / name).write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


def main():
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    chat_template_utils.datetime = Clock
    model = sentencepiece_model()
    rows = pieces_of(model)
    write_json("sentencepiece.json", record_sentencepiece(model, rows))
    write_json("families.json", record_families(rows))
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    llama = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    llama += ["<|start_header_id|>", "<|end_header_id|>"]
    made = byte_level_tokenizer(split(r"\p{N}{1,3}"), llama, vocab_size=272)
    special = {"bos_token": llama[0], "eos_token": llama[2]}
    found = {"llama": record_generation("llama", starting_with(made, llama[0]), special, HERE)}
    for name in ("qwen2", "qwen3"):
        made = byte_level_tokenizer(split(r"\p{N}"), chatml, nfc=True, vocab_size=272)
        special = {"eos_token": chatml[2], "pad_token": chatml[0]}
        found[name] = record_generation(name, made, special, HERE)
    write_json("generation.json", {"versions": VERSIONS, "models": found})


if __name__ == "__main__":
    main()
