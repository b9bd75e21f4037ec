"""An agent that knows only the OpenAI API. The gateway records its tokens for training.

rollway up -f stack.yaml && rollway gateway   # prints URL, which this script is called with
"""

import json
import sys
import urllib.request

from openai import OpenAI

import rollway

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NUMBERS}}]


def run_agent(url: str, session: str, question: str) -> str:
    agent = OpenAI(base_url=url, api_key=session)  # the key names the session
    options = {"model": agent.models.list().data[0].id, "tools": TOOLS, "max_tokens": 100}
    messages = [{"role": "user", "content": question}]
    while len(messages) < 10:
        message = agent.chat.completions.create(messages=messages, **options).choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            arguments = json.loads(call.function.arguments).values()
            total = str(sum(value for value in arguments if isinstance(value, int)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
        if not message.tool_calls:
            break
    return message.content or ""


def read_sequences(url: str, session: str) -> list[rollway.TokenSequence]:
    with urllib.request.urlopen(f"{url}/rollway/trajectories/{session}") as answer:
        return [rollway.TokenSequence.from_json(e) for e in json.load(answer)["trajectories"]]


if __name__ == "__main__":
    print(run_agent(sys.argv[1], "episode-1", "add 2 3"), read_sequences(sys.argv[1], "episode-1"))
