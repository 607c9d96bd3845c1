"""Step 7 of the tutorial: an exported model answers: python examples/tutorial/answer.py DIRECTORY QUESTION"""

import sys

import numpy as np
import onnxruntime
from transformers import AutoTokenizer

directory, question = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(directory)
session = onnxruntime.InferenceSession(f"{directory}/model.onnx")
kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
messages = [{"role": "user", "content": question}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
while len(ids) < len(prompt) + 12:
    given = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "position_ids": [[*range(len(ids))]]}
    for wanted in session.get_inputs():  # an empty past: all tokens are computed again, which is the shortest program
        shape = [1 if i == 0 else size if isinstance(size, int) else 0 for i, size in enumerate(wanted.shape)]
        given[wanted.name] = np.array(given.get(wanted.name, np.zeros(shape)), dtype=kinds[wanted.type])
    (logits,) = session.run(["logits"], given)
    token = int(logits[0, -1].argmax())
    if token == tokenizer.eos_token_id:
        break
    ids = [*ids, token]
print(tokenizer.decode(ids[len(prompt) :]))
