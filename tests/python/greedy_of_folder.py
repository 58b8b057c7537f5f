"""Prints, as JSON, the greedy completion of each prompt by the model in a folder.

usage: python greedy_of_folder.py PROMPTS_AS_JSON MODEL [ADAPTER]

The prompts are user messages behind the system message of configs/rlvr_math_qwen2.5_0.5b_cuda.yaml.
"""

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

SYSTEM = r"Reason step by step, and put the final answer within \boxed{}."
prompts, folder, *adapter = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
if adapter:
    model = PeftModel.from_pretrained(model, adapter[0])
tokenizer = AutoTokenizer.from_pretrained(folder)
greedy = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
found = []
for prompt in json.loads(prompts):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    # Told, since transformers 5 returns a dictionary otherwise.
    how = dict(add_generation_prompt=True, return_tensors="pt", return_dict=False)
    inputs = tokenizer.apply_chat_template(messages, **how)
    tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=greedy)
    found.append(tokenizer.decode(tokens[0, inputs.shape[1] :], skip_special_tokens=True))
print(json.dumps(found))
