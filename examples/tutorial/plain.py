"""Step 1 of the tutorial: a model and a loop, without sharding: python examples/tutorial/plain.py"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH, STEPS = 12, 64, 60

torch.manual_seed(0)
text = torch.tensor([*Path(torch.serialization.__file__).read_bytes()])  # some Python, as bytes
config = LlamaConfig(vocab_size=320, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(1, STEPS + 1):
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
    tokens = torch.stack([text[start : start + LENGTH] for start in starts])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
