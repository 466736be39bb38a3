"""What the scripted model answers to the calls of the clients."""

PERSON = '{"name": "Ann", "age": 31}'
SCRIPTS = {
    "text": "Hello, I am Ann.",
    "json": PERSON,
    "markdown": f"Here it is:\n```json\n{PERSON}\n```",
    "call": f'<tool_call>\n{{"name": "Person", "arguments": {PERSON}}}\n</tool_call>',
    "calls": (
        f'<tool_call>\n{{"name": "Person", "arguments": {PERSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "Person", "arguments": {"name": "Bob", "age": 7}}\n</tool_call>'
    ),
    "required": f'[{{"name": "Person", "parameters": {PERSON}}}]',
}
