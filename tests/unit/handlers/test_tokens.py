"""Tokens of prompts, and texts of tokens, as vLLM shows them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.errors import InvalidRequest
from handlers.models.loader import load_model
from handlers.models.tokenizer import check_known
from tests.unit.handlers.conftest import ServiceFactory
from tests.unit.handlers.test_chat_completion import QUESTION, chat, raw, user

RESOURCE = "x-torchmoor-resource"


def tokenize(client: Any, **body: Any) -> Any:
    return client.call(body, {RESOURCE: "POST tokenize"})


def detokenize(client: Any, tokens: Any, **more: Any) -> Any:
    return client.call({"tokens": tokens, **more}, {RESOURCE: "POST detokenize"})


def test_tokens_are_those_that_an_answer_is_made_from(client: Any, red: Any) -> None:
    """Tokens equal those of an answer: messages are rendered, a raw prompt is not, and positions of images count."""
    context = "x-torchmoor-context-tokens"
    for shown, asked in (
        (tokenize(client, messages=[user(QUESTION)]), chat(user(QUESTION))),
        (tokenize(client, messages=[user(QUESTION, red)]), chat(user(QUESTION, red))),
        (tokenize(client, prompt="a red circle"), raw("a red circle")),
    ):
        assert shown.status == 200, shown.body
        assert shown.json["count"] == len(shown.json["tokens"]) == int(client.call(asked).headers[context])
        assert shown.json["max_model_len"] >= shown.json["count"]
        assert shown.json["token_strs"] is None


def test_tokens_become_their_text_again(client: Any) -> None:
    shown = tokenize(client, prompt="a red circle", return_token_strs=True).json

    assert len(shown["token_strs"]) == shown["count"]
    assert detokenize(client, shown["tokens"], model="llava").json == {"prompt": "a red circle"}
    assert detokenize(client, []).json == {"prompt": ""}


@pytest.mark.parametrize("tokens", [None, "1", [1.5], [-1], [True], [10**9], [[1]]])
def test_wrong_tokens_are_refused_by_name(client: Any, tokens: Any) -> None:
    answer = detokenize(client, tokens)
    assert (answer.status, answer.json["error"]["param"]) == (400, "tokens")


def test_other_fields_are_refused_by_name(client: Any) -> None:
    for answer in (detokenize(client, [1], color="red"), tokenize(client, prompt="a", color="red")):
        assert (answer.status, answer.json["error"]["param"]) == (400, "color")


def test_a_token_that_the_model_does_not_know_is_refused(
    client: Any, tiny_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token without an embedding is refused; on a GPU it would end the process. Some checkpoints have such tokens."""
    last = max(tokenize(client, prompt="a red circle").json["tokens"])
    monkeypatch.setattr(tiny_llava, "vocabulary", last)

    answer = client.call(raw("a red circle"))

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert "which the model does not know: leave it out" in answer.json["error"]["message"]


def test_the_token_of_images_hides_no_other(tiny_llava: Any) -> None:
    """The image token may lie outside the embeddings, since features replace it.

    Unknown tokens around it are still refused.
    """
    check_known([1, 12], 8, tiny_llava.tokenizer, 12)
    for ids in ([1, 9, 12], [1, 12, 13]):
        with pytest.raises(InvalidRequest, match="which the model does not know"):
            check_known(ids, 8, tiny_llava.tokenizer, 12)


def test_the_token_of_images_is_unknown_without_an_image(
    client: Any, tiny_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that writes the image token of a message without an image is refused if that has no embedding."""
    monkeypatch.setattr(tiny_llava.template, "render", lambda *asked: "<image>")
    monkeypatch.setattr(tiny_llava, "vocabulary", tiny_llava.image_token_id)

    answer = client.call(chat(user(QUESTION)))

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert "a token '<image>', which the model does not know" in answer.json["error"]["message"]


def test_an_end_token_without_a_logit_is_ignored(
    checkpoint: Path, tmp_path: Path, make_client: ServiceFactory, one_thread: None
) -> None:
    """A checkpoint may name an end token beyond its logits. It has none to exclude before min_tokens are written."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 100_000]}))
    model = load_model(folder, torch.device("cpu"), "float32")
    client = make_client(model)

    answer = client.call(raw("a red circle", 3, parameters={"min_new_tokens": 3}))

    assert 100_000 not in model.eos_token_ids
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("text", ["Hello", "<image> <image>"])
def test_a_template_must_give_each_image_one_place(
    text: str, client: Any, red: Any, tiny_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template must give each image one place; some leave out images of earlier messages, which is refused."""
    monkeypatch.setattr(tiny_llava.template, "render", lambda *asked: text)

    answer = client.call(chat(user(QUESTION, red)))

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert f"has {text.count('<image>')} places for 1 images" in answer.json["error"]["message"]
