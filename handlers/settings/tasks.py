"""Settings of the tasks of many models: `handler.tasks`."""

from pydantic import Field

from handlers.settings.group import Count, HandlerGroup


class TaskSettings(HandlerGroup, title="tasks"):
    """What the models of many.mar do with requests: classify, embed, answer, generate (docs/many-models.md)."""

    num_threads: Count = Field(1, description="Threads that compute batches, for all models together.")
    threads_per_batch: Count = Field(1, description="Threads of torch for one batch on a CPU.")
    prepare_threads: Count = Field(2, description="Threads that read and tokenize requests.")
    max_rows: Count = Field(32, description="Inputs in one batch.")
    max_tokens: Count = Field(16_384, description="Tokens in one batch, padding included.")
    max_inputs: Count = Field(256, description="Inputs in one request, unless `max_texts` applies.")
    max_texts: Count = Field(
        2048,
        description="Texts in one request for embeddings, rerank or text classification, whose results are small; "
        "2048 is OpenAI's limit.",
    )
    max_chars: Count = Field(500_000, description="Characters of one input, checked before it is tokenized.")
    max_request_chars: Count = Field(
        2_000_000,
        description="Characters of all inputs of a request, which take a second per megabyte to tokenize; a rerank's "
        "query counts once per document.",
    )
    max_json_values: Count = Field(
        4_000_000, description="JSON values in a body, such as a tensor's numbers, counted before it is parsed."
    )
    max_waiting: Count = Field(4096, description="Inputs that may wait for one model.")
    kv_tokens: Count = Field(8192, description="Positions in the KV cache of each model that generates text.")
