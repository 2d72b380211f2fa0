"""Serves MiniLM with a handler like those that users of TorchServe write; the baseline of many_models.py uses it."""

from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer


class MiniLM:
    """One checkpoint, on one thread; the folder is `path` of the model's configuration."""

    def initialize(self, context: Any) -> None:
        torch.set_num_threads(1)
        path = context.model_yaml_config["path"]
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModel.from_pretrained(path).eval()

    @torch.inference_mode()
    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[dict[str, Any]]:
        texts = [row["body"]["inputs"] for row in rows]  # TorchServe has parsed the JSON
        read = self._tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden = self._model(**read).last_hidden_state
        mask = read["attention_mask"].unsqueeze(-1).float()
        embeddings = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return [{"embeddings": embedding} for embedding in embeddings.tolist()]
