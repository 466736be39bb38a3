"""The sample of the vocabulary is drawn by its seed, from what readers of the product see."""

from tools.vocabulary_draw import (
    KINDS,
    SAMPLE_SIZE,
    collect_items,
    draw_sample,
    format_sample,
    read_context,
    read_sources,
)

SOURCE = '''"""About queues.

More about them.
"""

class Queue:
    """Requests that wait. One that is
    placed leaves. What follows is left out.
    """

    max_length: Annotated[int, "requests"]
    _secret: int

    def add_request(self, request, *, now: float = 0.0) -> None:
        """Add a request."""
        self._log.info("request queued", request_id=request, seconds=now)
        limited.log_event(log.get_logger("queue").warning, "queue full", length=1)
        self.catalog.get("no log line")

    def _private(self, hidden) -> None:
        """Not drawn."""
'''


def test_items_are_public_docstrings_names_and_log_lines() -> None:
    items = list(collect_items("core/queue.py", SOURCE))
    texts = {kind: [item.text for item in items if item.kind == kind] for kind in KINDS}
    assert texts["docstring"] == [
        "module: About queues.",
        "Queue: Requests that wait. One that is placed leaves.",
        "Queue.add_request: Add a request.",
    ]
    assert texts["name"] == [
        "class Queue",
        "field Queue.max_length: int",
        "method Queue.add_request",
        "parameter request of Queue.add_request",
        "parameter now of Queue.add_request",
    ]
    assert texts["log line"] == [
        "info: request queued (request_id, seconds)",
        "warning: queue full (length)",
    ]


def test_the_seed_alone_chooses_the_sample() -> None:
    sources = {
        path: source
        for path, source in read_sources("HEAD").items()
        if path.startswith(("coordinator/node_links", "kv_pool"))
    }
    sample = draw_sample(sources, "a")
    assert sample == draw_sample(dict(reversed(sources.items())), "a")
    assert sample != draw_sample(sources, "b")
    assert [item.kind for item in sample] == [kind for kind in KINDS for _ in range(SAMPLE_SIZE)]


def test_answers_alone_name_files() -> None:
    sample = draw_sample({"core/queue.py": SOURCE}, "a")
    questions, answers = (format_sample(sample, answers=given) for given in (False, True))
    assert "queue.py" not in questions
    assert all("core/queue.py:" in line for line in answers.splitlines() if line[:1] == " ")
    assert len(questions.splitlines()) == len(answers.splitlines())


def test_the_context_of_an_item_is_what_stands_around_it_in_its_file() -> None:
    (field,) = (item for item in collect_items("core/queue.py", SOURCE) if "field" in item.text)
    context = [line.strip() for line in read_context(SOURCE, field.line).splitlines()]
    assert context[0] == '"""About queues.'
    assert SOURCE.splitlines()[field.line - 1].strip() in context
    assert any(line.startswith("class Queue") for line in context)
