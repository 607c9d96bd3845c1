"""Step 8 of the tutorial: conversations about capitals, one in a line: python examples/tutorial/rows.py"""

import json

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo"}
WAYS = [
    "Name the capital of {}.",
    "Which city is the capital of {}?",
    "{}: what is its capital?",
    "Tell me the capital of {}.",
    "I am in {}. Which city governs it?",
    "The capital of {}, please.",
    "Do you know the capital of {}?",
    "Where does {} have its government?",
]

for way in WAYS:
    for country, capital in CAPITALS.items():
        turns = [{"role": "user", "content": way.format(country)}, {"role": "assistant", "content": f"{capital}."}]
        print(json.dumps({"messages": turns}))
