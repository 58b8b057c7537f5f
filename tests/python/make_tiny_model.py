"""Writes tests/golden/tiny_model/*: a whole folder of a tiny random Qwen2 with a small byte-level BPE tokenizer and a
chat template, and `tokens.json`, what Python makes of texts.

    python tests/python/make_tiny_model.py

Needs torch and transformers 4.57. The pattern that cuts texts is that of Qwen2's tokenizer.
"""

import json
import pathlib

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "What is 12 + 34?",
    " It's\n\n  the   end. \t",
    "Grüße, 你好 \U0001f600 <|im_end|>",
    "",
    "<|im_start|>user\nsort 314159<|im_end|>\n",
    "we'll've DON'T x=y**2;\r\n",
]
CHATS = [
    [{"role": "user", "content": "What is 1+1?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3*3"}],
]
root = pathlib.Path(__file__).parent.parent
folder = root / "golden" / "tiny_model"
folder.mkdir(parents=True, exist_ok=True)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
tokenizer.train_from_iterator([pathlib.Path(__file__).read_text()], trainer)
tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
fast.chat_template = (root / "golden" / "chat" / "chatml.jinja").read_text()
fast.save_pretrained(folder, save_jinja_files=False)
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=328,  # as published models have it: rounded up, with ids that the tokenizer does not know
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    initializer_range=0.3,
    eos_token_id=fast.eos_token_id,
)
model = Qwen2ForCausalLM(config)
with torch.no_grad():
    model.model.embed_tokens.weight[fast.eos_token_id] *= 2.5  # some completions end soon, and others do not
model.save_pretrained(folder)
golden = {
    "eos": fast.eos_token_id,
    "texts": [
        {"text": text, "ids": fast(text).input_ids, "decoded": fast.decode(fast(text).input_ids, True, False)}
        for text in TEXTS
    ],
    "chats": [
        {"messages": chat, "ids": fast.apply_chat_template(chat, add_generation_prompt=True)} for chat in CHATS
    ],
}
(folder / "tokens.json").write_text(json.dumps(golden, indent=1) + "\n")
