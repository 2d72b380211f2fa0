"""Each task on tiny random checkpoints: the answers of transformers' own pipelines, and clear errors."""

import base64
import io
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file

from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.engine.builtin import chat_engine
from handlers.engine.builtin.kv_cache import BLOCK
from handlers.engine.builtin.runner import ModelRunner
from handlers.errors import InternalError, ModelBroken, OutOfMemory
from handlers.many.compute import TaskRow
from handlers.many.loading.checkpoint_loader import CheckpointLoader
from handlers.many.loading.tensor_placement import PlacedModel
from handlers.many.model import AnsweringModel, LoadProgress
from handlers.many.request import TaskRequest
from handlers.models import memory
from handlers.models.chat_template import TemplateProcess
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.settings.handler import HandlerSettings
from handlers.settings.intake import IntakeSettings
from handlers.settings.many import ManySettings
from handlers.settings.model import ModelSettings
from handlers.settings.pump import PumpSettings
from handlers.settings.tasks import TaskSettings
from tests.servers import BUCKET, S3Server
from tests.torchserve.drawings import encoded
from tests.unit.handlers.many.replies import whole
from tests.unit.handlers.many.tiny import VOCABULARY, make_tokenizer, save_checkpoint
from tests.waiting import wait_until

TEXTS = ["the cat sat on the mat", "anna works at acme in paris.", "dog"]
JSON = {"content-type": "application/json"}
_TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
_IMAGE = {**_TEXT, "image_size": 32, "patch_size": 8}
Load = Callable[..., AnsweringModel]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Load folders; afterwards close the models and check that they leave nothing."""
    made: list[tuple[CheckpointLoader, AnsweringModel]] = []

    def make(folder: Path, **settings: Any) -> AnsweringModel:
        device, ids = torch.device("cpu"), SessionIdMinter.from_environment({})
        loader = CheckpointLoader(HandlerSettings(**settings), device, ids, {})
        try:
            made.append((loader, loader(folder, LoadProgress())))
        except BaseException:
            loader.stop()
            raise
        return made[-1][1]

    yield make
    for loader, model in made:
        model.close()
        assert (model.device_bytes, model.host_bytes, model.mapped_bytes) == (0, 0, 0)
        loader.stop()


def send(model: AnsweringModel, body: Any, headers: dict[str, str] = JSON) -> PendingReply:
    reply = PendingReply(lambda: None)
    model.start(Incoming(headers, json.dumps(body).encode() if isinstance(body, dict | list) else body), reply)
    return reply


def ask(model: AnsweringModel, inputs: Any, **parameters: Any) -> Any:
    said = whole(send(model, {"inputs": inputs, "parameters": parameters}))
    assert said.status == 200, said.body
    return json.loads(said.body)


def error(model: AnsweringModel, body: Any, headers: dict[str, str] = JSON) -> tuple[int, str]:
    said = whole(send(model, body, headers))
    return said.status, json.loads(said.body)["error"]["message"]


def assert_close(found: Any, expected: Any) -> None:
    """Compare results up to the rounding of scores."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, str) or expected is None:
        assert found == expected
    else:
        assert math.isclose(found, float(expected), rel_tol=1e-4, abs_tol=1e-5)


def pipeline_of(task: str, folder: Path) -> Any:
    return hf.pipeline(task, model=str(folder), device="cpu")


@pytest.mark.parametrize(
    "architecture",
    [
        "BertForSequenceClassification",
        "DistilBertForSequenceClassification",
        "RobertaForSequenceClassification",
        "GPT2ForSequenceClassification",
    ],
)
def test_texts_are_classified_as_the_pipeline_does(architecture: str, tmp_path: Path, load: Load) -> None:
    """A text, a list and a pair are classified, with the best or all labels."""
    model = load(save_checkpoint(tmp_path, architecture))
    pipeline = pipeline_of("text-classification", tmp_path)
    pair = {"text": TEXTS[0], "text_pair": TEXTS[1]}

    assert_close(ask(model, TEXTS[0]), pipeline(TEXTS[0]))
    assert_close(ask(model, TEXTS), pipeline(TEXTS))
    assert_close(ask(model, TEXTS, top_k=2), pipeline(TEXTS, top_k=2))
    assert_close(ask(model, TEXTS[0], top_k=None), pipeline(TEXTS[0], top_k=None))
    assert_close(ask(model, pair), [pipeline(pair)])
    assert_close(ask(model, TEXTS[0], function_to_apply="sigmoid"), pipeline(TEXTS[0], function_to_apply="sigmoid"))


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_tokens_are_classified_as_the_pipeline_does(strategy: str, tmp_path: Path, load: Load) -> None:
    """Every aggregation strategy gives the pipeline's entities."""
    model = load(save_checkpoint(tmp_path, "BertForTokenClassification"))
    pipeline = pipeline_of("token-classification", tmp_path)

    found = ask(model, TEXTS, aggregation_strategy=strategy)

    assert_close(found, [pipeline(text, aggregation_strategy=strategy) for text in TEXTS])
    assert any(found)


def test_the_ignored_labels_are_not_searched_for_each_token(tmp_path: Path, load: Load) -> None:
    """A million labels and 256 long texts would keep the thread that computes for all models for half an hour."""

    class Unsearchable(list[Any]):
        def __contains__(self, item: object) -> bool:
            raise AssertionError("searched")

    model = load(save_checkpoint(tmp_path, "BertForTokenClassification"))
    labels = Unsearchable([model.task.model.config.id2label[0], ["no label"]])

    work = model.task.read(TaskRequest(TEXTS, {"ignore_labels": labels}), PendingReply(lambda: None))
    rows = [TaskRow(own.inputs, own.size, own.kind, lambda: True, lambda outcome: None) for own in work.inputs]
    with torch.inference_mode():
        found = work.finish(model.task.run(rows))

    pipeline = pipeline_of("token-classification", tmp_path)
    assert_close(found, [pipeline(text, ignore_labels=list(labels)) for text in TEXTS])


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_gaps_are_filled_as_the_pipeline_does(architecture: str, tmp_path: Path, load: Load) -> None:
    """One mask, two, several texts, top_k and targets give the pipeline's results."""
    model = load(save_checkpoint(tmp_path, architecture))
    pipeline = pipeline_of("fill-mask", tmp_path)
    texts = ["the [MASK] sat on the mat", "anna works [MASK] acme"]
    gaps = "the [MASK] sat on [MASK]"

    assert_close(ask(model, texts[0]), pipeline(texts[0]))
    assert_close(ask(model, texts, top_k=2), pipeline(texts, top_k=2))
    assert_close(ask(model, gaps), pipeline(gaps))
    assert_close(ask(model, texts[0], targets=["cat", "dog"]), pipeline(texts[0], targets=["cat", "dog"]))
    assert error(model, {"inputs": "no gap"}) == (400, "a text has no [MASK] where a word is wanted")
    half = b'{"inputs": "[MASK]", "parameters": {"targets": ["\\ud800"]}}'
    assert error(model, half) == (400, "'targets' must be valid Unicode: it has one half of a surrogate pair")


def test_more_targets_than_the_vocabulary_has_are_refused(tmp_path: Path, load: Load) -> None:
    """A million targets would keep one of the threads that read for all models for 20 seconds."""
    model = load(save_checkpoint(tmp_path, "BertForMaskedLM"))
    number = model.task.model.config.vocab_size

    assert ask(model, "the [MASK] sat", targets=["cat"] * number)
    asked = {"inputs": "the [MASK] sat", "parameters": {"targets": ["cat"] * (number + 1)}}
    assert error(model, asked) == (400, f"'targets' has {number + 1} words, and this model's vocabulary {number}")


def test_tokens_vectors_are_the_pipelines(tmp_path: Path, load: Load) -> None:
    """A model without a head returns a vector for each token."""
    model = load(save_checkpoint(tmp_path, "BertModel"))
    pipeline = pipeline_of("feature-extraction", tmp_path)

    assert_close(ask(model, TEXTS[0]), pipeline(TEXTS[0]))
    assert_close(ask(model, TEXTS), pipeline(TEXTS))


@pytest.mark.parametrize("architecture", ["BertModel", "MPNetModel"])
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens"])
def test_embeddings_are_pooled_as_the_checkpoint_says(architecture: str, mode: str, tmp_path: Path, load: Load) -> None:
    """Embeddings equal those of sentence-transformers, computed one text at a time."""
    save_checkpoint(tmp_path, architecture)
    save_pooling(tmp_path, mode)
    model = load(tmp_path)
    reference, tokenizer = hf.AutoModel.from_pretrained(tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)

    found = ask(model, TEXTS)["embeddings"]

    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            hidden = reference(**tokenizer(text, return_tensors="pt", truncation=True, max_length=8))[0][0]
        pooled = {
            "cls_token": hidden[0],
            "mean_tokens": hidden.mean(0),
            "max_tokens": hidden.max(0).values,
            "mean_sqrt_len_tokens": hidden.sum(0) / math.sqrt(len(hidden)),
        }[mode]
        assert_close(vector, (pooled / pooled.norm()).tolist())
    assert_close(ask(model, TEXTS[0])["embeddings"], found[0])


def test_embeddings_are_shortened(tmp_path: Path, load: Load) -> None:
    """A shortened vector is normalised again if requested; more dimensions than the model has are refused at once."""
    save_checkpoint(tmp_path, "BertModel")
    (tmp_path / "torchmoor.json").write_text('{"task": "sentence-embeddings"}')
    model = load(tmp_path)
    whole_vector = ask(model, TEXTS[0])["embeddings"]
    length = math.hypot(*whole_vector[:3])

    assert_close(ask(model, TEXTS[0], dimensions=3)["embeddings"], [each / length for each in whole_vector[:3]])
    assert_close(ask(model, TEXTS[0], dimensions=3, normalize=False)["embeddings"], whole_vector[:3])
    assert_close(ask(model, TEXTS[0], dimensions=None)["embeddings"], whole_vector)
    for wrong in (0, len(whole_vector) + 1):
        body = {"inputs": TEXTS[0], "parameters": {"dimensions": wrong}}
        assert error(model, body) == (400, f"'dimensions' must be from 1 to {len(whole_vector)} for this model")


def test_embeddings_of_a_thousand_texts_are_one_request(tmp_path: Path, load: Load) -> None:
    """Embeddings accept 1000 texts, which LangChain sends by default; tasks with larger results accept fewer."""
    save_checkpoint(tmp_path / "embed", "BertModel")
    (tmp_path / "embed" / "torchmoor.json").write_text('{"task": "sentence-embeddings"}')
    model = load(tmp_path / "embed")
    texts = ["cat"] * 1000

    found = json.loads(whole(send(model, {"input": texts, "model": "m"})).body)

    assert len(found["data"]) == 1000
    assert error(model, {"input": ["cat"] * 2049})[1] == "a request may have 1 to 2048 inputs, not 2049"
    masked = load(save_checkpoint(tmp_path / "mask", "BertForMaskedLM"))
    assert error(masked, {"inputs": ["[MASK]"] * 257})[1] == "a request may have 1 to 256 inputs, not 257"


def test_vectors_that_are_too_many_for_an_answer_are_refused_before_they_are_computed(
    tmp_path: Path, load: Load
) -> None:
    """Vectors too large for an answer are refused first, with an error that OpenAI's client does not retry.

    Base64 takes a quarter of the bytes; the answer of a rerank contains no vectors.
    """
    save_checkpoint(tmp_path, "BertModel")
    (tmp_path / "torchmoor.json").write_text('{"task": "sentence-embeddings"}')
    model = load(tmp_path, pump=PumpSettings(max_response_bytes=10_000))
    texts = ["cat"] * 40

    status, message = error(model, {"input": texts})
    assert (status, "40 vectors of 32 numbers take about 25600 bytes" in message, "base64" in message) == (
        400,
        True,
        True,
    )
    status, message = error(model, {"inputs": texts})
    assert (status, message.endswith("send fewer texts at once")) == (400, True)
    assert whole(send(model, {"input": texts, "encoding_format": "base64"})).status == 200
    assert whole(send(model, {"input": texts, "dimensions": 4})).status == 200
    assert whole(send(model, {"query": "cat", "documents": texts})).status == 200


def test_advice_fits_the_form_of_the_request(tmp_path: Path, load: Load) -> None:
    """Errors suggest only what the form has: OpenAI's embeddings have no truncation, nor the model responses."""
    save_checkpoint(tmp_path, "BertModel")
    (tmp_path / "torchmoor.json").write_text('{"task": "sentence-embeddings"}')
    model = load(tmp_path)
    resource = {**JSON, "x-torchmoor-resource": "POST responses"}

    assert error(model, {"input": "a " * 100}) == (400, "a text has 102 tokens, and this model reads 64: send less")
    status, message = error(model, {"inputs": "a " * 100, "parameters": {"truncation": False}})
    assert (status, '"truncation": true' in message) == (400, True)
    status, message = error(model, {"input": "a", "model": "m"}, resource)
    assert (status, message) == (
        400,
        "this model's task is sentence-embeddings, and /v1/responses needs text-generation",
    )
    status, message = error(model, {"inputs": "a"}, {**JSON, "x-torchmoor-tgi-route": "generate"})
    assert (status, message) == (400, "this model's task is sentence-embeddings, and /generate needs text-generation")


def test_a_model_of_lower_case_refuses_what_is_no_text(tmp_path: Path, load: Load) -> None:
    """An uncased model refuses input that is not text, however deeply nested, as the client's error."""
    save_checkpoint(tmp_path, "BertModel")
    save_pooling(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    model = load(tmp_path)
    nested: Any = "text"
    for _ in range(900):
        nested = [nested]

    assert_close(ask(model, TEXTS[0].upper())["embeddings"], ask(model, TEXTS[0])["embeddings"])
    assert whole(send(model, {"inputs": nested})).status == 400


def save_pooling(folder: Path, mode: str) -> None:
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    known = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{m}": m == mode for m in known}))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')


def test_modules_that_are_not_known_are_refused(tmp_path: Path, load: Load) -> None:
    """A dense layer after the pooling is refused instead of silently ignored."""
    save_checkpoint(tmp_path, "BertModel")
    save_pooling(tmp_path, "mean_tokens")
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "3_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ModelBroken, match="modules other than"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["..", "", "a/b", "/tmp"])
def test_a_pooling_outside_the_model_is_refused(path: str, tmp_path: Path, load: Load) -> None:
    """Only a folder inside the model's own is read."""
    folder = save_checkpoint(tmp_path / "model", "BertModel")
    (tmp_path / "config.json").write_text('{"pooling_mode": "cls"}')
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ModelBroken, match="names a folder outside"):
        load(folder)


@pytest.mark.parametrize("architecture", ["BertForQuestionAnswering", "DistilBertForQuestionAnswering"])
def test_questions_are_answered_with_the_best_span(architecture: str, tmp_path: Path, load: Load) -> None:
    """The answer is the best of all spans of the text, compared by brute force."""
    model = load(save_checkpoint(tmp_path, architecture))
    question, context = "where is anna", "anna is in london. the dog is red, the cat is blue."

    found = ask(model, {"question": question, "context": context}, max_answer_len=4, align_to_words=False)

    assert_close(found, best_span(tmp_path, question, context, 4))
    assert found["answer"] == context[found["start"] : found["end"]]
    several = ask(model, [{"question": question, "context": context}] * 2, max_answer_len=4, align_to_words=False)
    assert_close(several, [found, found])
    ranked = ask(model, {"question": question, "context": context}, top_k=3, max_answer_len=1 << 70)
    assert len(ranked) == 3
    assert ranked == sorted(ranked, key=lambda answer: -answer["score"])


def best_span(folder: Path, question: str, context: str, longest: int) -> dict[str, Any]:
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        logits = hf.AutoModelForQuestionAnswering.from_pretrained(folder)(**encoded)
    inside = [i for i, part in enumerate(encoded.sequence_ids(0)) if part == 1]
    mask = torch.full_like(logits.start_logits[0], -math.inf)
    mask[[0, *inside]] = 0
    starts = (logits.start_logits[0] + mask).softmax(-1)
    ends = (logits.end_logits[0] + mask).softmax(-1)
    score, first, last = max((float(starts[i] * ends[j]), i, j) for i in inside for j in inside if i <= j < i + longest)
    start, end = offsets[first][0], offsets[last][1]
    return {"score": score, "start": start, "end": end, "answer": context[start:end]}


def test_a_long_text_is_searched_piece_by_piece(tmp_path: Path, load: Load) -> None:
    """In a text longer than the model's input, the answer's position still refers to the whole text."""
    model = load(save_checkpoint(tmp_path, "BertForQuestionAnswering"))
    context = " ".join(TEXTS * 20)

    found = ask(model, {"question": "who sat", "context": context}, top_k=20, doc_stride=16)

    assert all(answer["answer"] == context[answer["start"] : answer["end"]] for answer in found)
    assert max(answer["start"] for answer in found) > len(context) // 2


def test_pieces_are_counted_before_they_are_made(tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large stride, each token of a text begins a piece: 200 kB took gigabytes."""
    model = load(save_checkpoint(tmp_path, "BertForQuestionAnswering"))
    encode = model.task.shared.encode

    def encode_whole(*texts: str, **options: Any) -> Any:
        assert "return_overflowing_tokens" not in options
        return encode(*texts, **options)

    monkeypatch.setattr(model.task.shared, "encode", encode_whole)
    asked = {"question": "who sat", "context": "the cat " * 1000}

    status, message = error(model, {"inputs": asked, "parameters": {"doc_stride": 1 << 70}})

    assert status == 400
    assert "the texts are at least 1942 pieces, and a request may have 256: send less" in message


@pytest.mark.parametrize(
    ("architecture", "inputs", "parameters"),
    [
        ("BertModel", ["the cat sat"] * 40, {}),
        ("BertForMaskedLM", ["a [MASK] [MASK]"] * 3, {"top_k": 1 << 70}),
        ("BertForTokenClassification", ["the cat sat on the mat"] * 100, {"ignore_labels": []}),
        ("BertForSequenceClassification", ["the cat"] * 640, {"top_k": 1 << 70}),
        ("BertForQuestionAnswering", {"question": "who", "context": " ".join(TEXTS)}, {"top_k": 1 << 70}),
    ],
)
def test_answers_that_are_too_long_are_refused_before_they_are_computed(
    architecture: str, inputs: Any, parameters: dict[str, Any], tmp_path: Path, load: Load
) -> None:
    """A request for more results than an answer can hold is refused before they are computed."""
    model = load(save_checkpoint(tmp_path, architecture), pump=PumpSettings(max_response_bytes=50_000))
    computed: list[Any] = []
    model.queue.run = computed.append

    status, message = error(model, {"inputs": inputs, "parameters": parameters})

    assert status == 400
    assert "an answer may have 50000 (handler.pump.max_response_bytes): send fewer" in message
    assert not computed


def picture(seed: int) -> bytes:
    torch.manual_seed(seed)
    pixels = torch.randint(0, 255, (20, 30, 3), dtype=torch.uint8).numpy()
    return encoded(Image.fromarray(pixels))


@pytest.mark.parametrize("architecture", ["ViTForImageClassification", "SwinForImageClassification"])
def test_images_are_classified_as_the_pipeline_does(architecture: str, tmp_path: Path, load: Load) -> None:
    """An image may be the body, base64 or a data URL, and several may come at once."""
    model = load(save_checkpoint(tmp_path, architecture))
    pipeline = pipeline_of("image-classification", tmp_path)
    encoded = base64.b64encode(picture(1)).decode()
    expected = pipeline(Image.open(io.BytesIO(picture(1))))

    assert_close(json.loads(whole(send(model, picture(1), {"content-type": "image/png"})).body), expected)
    assert_close(ask(model, encoded), expected)
    others = [f"data:image/png;base64,{encoded}", base64.b64encode(picture(2)).decode()]
    assert_close(ask(model, others, top_k=1), pipeline([Image.open(io.BytesIO(picture(i))) for i in (1, 2)], top_k=1))


def test_images_go_through_the_checks_of_chat(tmp_path: Path, load: Load) -> None:
    """Bytes, pixels, addresses and data that is not an image are checked as for chat."""
    model = load(
        save_checkpoint(tmp_path, "ViTForImageClassification"), intake=IntakeSettings(max_bytes=5000, max_pixels=500)
    )

    assert error(model, b"x" * 6000, {"content-type": "image/png"})[0] == 413
    assert error(model, picture(1), {"content-type": "image/png"})[0] == 413
    assert error(model, b"no picture", {"content-type": "image/png"})[0] == 415
    assert error(model, {"inputs": "http://127.0.0.1:1/x.png"})[0] == 403
    assert error(model, {"inputs": {"a": 1}})[0] == 400


def test_pixels_count_until_their_image_is_classified(tmp_path: Path, load: Load) -> None:
    """A small image has as many pixels for the model as a large one, and they wait for it in the worker's memory."""
    pixel_bytes = 3 * 32 * 32 * 4
    model = load(
        save_checkpoint(tmp_path, "ViTForImageClassification"), intake=IntakeSettings(decoding_bytes=3 * pixel_bytes)
    )
    budget, run, may_run = model.task.intake.decoding, model.queue.run, threading.Event()

    def wait_and_run(rows: Any) -> Any:
        assert may_run.wait(60)
        return run(rows)

    model.queue.run = wait_and_run
    encoded = base64.b64encode(picture(1)).decode()

    answered, cancelled = send(model, {"inputs": [encoded] * 2}), send(model, {"inputs": encoded})
    wait_until(lambda: budget.used_bytes == 3 * pixel_bytes, "the pixels of all three count")
    cancelled.cancel()
    wait_until(lambda: budget.used_bytes == 2 * pixel_bytes, "those of the cancelled request do not")
    may_run.set()

    assert whole(answered).status == 200
    wait_until(lambda: budget.used_bytes == 0, "those of the answered request do not either")
    status, message = error(model, {"inputs": [encoded] * 4})
    assert (status, budget.used_bytes) == (400, 0)
    assert "the pixels of 4 images take 49152 bytes, more than 36864 (handler.intake.decoding_bytes)" in message


@pytest.mark.parametrize(
    "failure", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr
)
def test_no_memory_for_an_images_pixels(
    failure: Exception, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for an image's pixels the status is 507 instead of 500, because a retry may succeed."""
    model = load(save_checkpoint(tmp_path, "ViTForImageClassification"))

    def preprocess(*args: Any, **options: Any) -> Any:
        raise failure

    monkeypatch.setattr("transformers.image_processing_utils.BaseImageProcessor.__call__", preprocess)

    assert error(model, {"inputs": base64.b64encode(picture(1)).decode()})[0] == 507


def test_an_image_that_cannot_be_decoded_beside_the_pixels_before_it(tmp_path: Path, load: Load) -> None:
    """It would wait for memory that its own request holds, and keep others from decoding meanwhile."""
    model = load(
        save_checkpoint(tmp_path, "ViTForImageClassification"),
        intake=IntakeSettings(decoding_bytes=2 * 3 * 32 * 32 * 4),
    )
    files = picture(1), encoded(Image.new("RGB", (32, 32)))
    small, large = (base64.b64encode(each).decode() for each in files)

    assert ask(model, [large, small])
    status, message = error(model, {"inputs": [small, large]})

    assert status == 413
    assert "send a smaller one, or fewer at once" in message


def test_requests_of_several_pictures_do_not_wait_for_the_pixels_of_each_other(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests that begin together are both answered, although the memory has no room for the pixels of both."""
    model = load(
        save_checkpoint(tmp_path, "ViTForImageClassification"),
        intake=IntakeSettings(decoding_bytes=3 * 3 * 32 * 32 * 4, decoding_timeout_s=60),
    )
    budget, read = model.task.intake.decoding, model.task.intake.read
    reads: Counter[PendingReply] = Counter()

    def both_hold_or_one_waits() -> bool:
        return sum(number > 1 for number in reads.values()) == 2 or "1 waiting" in repr(budget)

    def wait_and_read(reference: Any, reply: PendingReply, *args: Any) -> bytes:
        reads[reply] += 1
        if reads[reply] > 1:
            wait_until(both_hold_or_one_waits, "both hold pixels, or one waits for the other's")
        return read(reference, reply, *args)

    monkeypatch.setattr(model.task.intake, "read", wait_and_read)
    encoded = base64.b64encode(picture(1)).decode()

    replies = [send(model, {"inputs": [encoded] * 3}) for _ in range(2)]

    assert [whole(reply).status for reply in replies] == [200, 200]


@pytest.mark.s3
def test_a_large_image_from_s3_does_not_wait_for_the_pixels_of_its_own_request(
    tmp_path: Path, load: Load, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is scaled down before a larger image that waits for the memory which its request holds."""
    s3_server.use_in(monkeypatch)
    with closing(s3_server.client()) as client:
        large = encoded(Image.new("RGB", (400, 200)), "TIFF")
        client.put_object(Bucket=BUCKET, Key="tasks/large.tif", Body=large)
    model = load(
        save_checkpoint(tmp_path, "ViTForImageClassification"),
        intake=IntakeSettings(
            allowed_buckets=(BUCKET,),
            max_bytes=100_000,
            scaled_pixels=10_000,
            decoding_bytes=1_000_000,
            decoding_timeout_s=60,
        ),
    )
    budget, read = model.task.intake.decoding, model.task.intake.read

    def use_all() -> None:
        with budget.lease(1_000_000, lambda: None):
            pass

    waiting = threading.Thread(target=use_all)

    def read_beside_another(reference: Any, reply: PendingReply, *args: Any) -> bytes:
        if budget.used_bytes:
            waiting.start()
            wait_until(lambda: "1 waiting" in repr(budget), "another image waits for the whole budget")
        return read(reference, reply, *args)

    monkeypatch.setattr(model.task.intake, "read", read_beside_another)

    answer = ask(model, [base64.b64encode(picture(1)).decode(), f"s3://{BUCKET}/tasks/large.tif"])

    waiting.join(60)
    assert len(answer) == 2
    assert budget.used_bytes == 0


@pytest.mark.parametrize(
    ("body", "headers", "part"),
    [
        (None, JSON, "no body"),
        (b"{", JSON, "not valid JSON"),
        ([1], JSON, "must be a JSON object"),
        ({}, JSON, "no 'inputs'"),
        ({"inputs": 1}, JSON, "must be a text"),
        ({"inputs": []}, JSON, "1 to 4 inputs"),
        ({"inputs": ["a"] * 5}, JSON, "1 to 4 inputs"),
        ({"inputs": "x" * 501}, JSON, "may have 500 characters"),
        ({"inputs": ["x" * 300] * 3}, JSON, "800 characters in all inputs, not 900"),
        ({"inputs": [{"text": "x" * 300, "text_pair": "y" * 200}] * 2}, JSON, "800 characters in all inputs, not 1000"),
        ({"query": "x" * 500, "documents": ["y"] * 2, "model": "m"}, JSON, "800 characters in all inputs, not 1002"),
        (b'{"inputs": [' + b"[]," * 40 + b"[]]}", JSON, "83 JSON values; the limit is 60"),
        ({"inputs": "a " * 100}, JSON, '"truncation": true'),
        (b'{"inputs": ["a", "\\ud800"]}', JSON, "valid Unicode"),
        ({"inputs": "a", "parameters": []}, JSON, "'parameters' must be"),
        ({"inputs": "a", "parameters": {"nonsense": 1}}, JSON, "there is no parameter 'nonsense'"),
        ({"inputs": "a", "parameters": {"top_k": "2"}}, JSON, "wrong type"),
        ({"inputs": "a", "parameters": {"top_k": True}}, JSON, "wrong type"),
        ({"inputs": "a", "parameters": {"top_k": 0}}, JSON, "at least 1"),
        ({"inputs": "a", "parameters": {"function_to_apply": "x"}}, JSON, "one of sigmoid"),
        ({"inputs": {"text": "a", "b": "c"}}, JSON, "'text' and perhaps 'text_pair'"),
        (b"a", {"content-type": "text/csv"}, "send application/json"),
        (b"\xff", {"content-type": "text/plain"}, "not UTF-8"),
        (b"\x89PNG", {"content-type": "image/png"}, "must be a text"),
    ],
)
def test_a_request_that_cannot_be_understood_is_told_why(
    body: Any, headers: dict[str, str], part: str, tmp_path: Path, load: Load
) -> None:
    """The error has status 400 and says what to send instead."""
    folder = save_checkpoint(tmp_path, "BertForSequenceClassification")
    model = load(folder, tasks=TaskSettings(max_texts=4, max_chars=500, max_request_chars=800, max_json_values=60))

    status, message = error(model, body, headers)

    assert status == 400
    assert part in message


def test_plain_text_is_an_input(tmp_path: Path, load: Load) -> None:
    """The service accepts curl --data-binary with Content-Type: text/plain."""
    model = load(save_checkpoint(tmp_path, "BertForSequenceClassification"))

    said = whole(send(model, TEXTS[0].encode(), {"content-type": "text/plain; charset=utf-8"}))

    assert_close(json.loads(said.body), ask(model, TEXTS[0]))


def test_answers_do_not_depend_on_what_else_is_asked(tmp_path: Path, load: Load) -> None:
    """Fifty concurrent requests of all lengths each get the answer that they get alone."""
    model = load(save_checkpoint(tmp_path, "BertForSequenceClassification"))
    texts = [" ".join(["the cat sat on a red mat"] * (i % 8 + 1))[: 5 + 3 * i] for i in range(50)]
    alone = [ask(model, text, top_k=None) for text in texts]

    replies = [send(model, {"inputs": text, "parameters": {"top_k": None}}) for text in texts]

    for reply, expected in zip(replies, alone, strict=True):
        assert_close(json.loads(whole(reply).body), expected)


def test_the_task_is_the_one_that_the_folder_names(tmp_path: Path, load: Load) -> None:
    """torchmoor.json overrides the architecture; unknown tasks and architectures are refused."""
    save_checkpoint(tmp_path, "BertForMaskedLM")
    (tmp_path / "torchmoor.json").write_text('{"task": "feature-extraction"}')
    assert len(ask(load(tmp_path), "cat")[0][0]) == 32

    (tmp_path / "torchmoor.json").write_text('{"task": "juggling"}')
    with pytest.raises(ModelBroken, match="there is no task 'juggling'"):
        load(tmp_path)
    (tmp_path / "torchmoor.json").write_text('{"tasks": "fill-mask", "task": "fill-mask", "\\u0007": 1}')
    with pytest.raises(ModelBroken, match=r"torchmoor\.json has no '\\x07', 'tasks'; it may have task$"):
        load(tmp_path)
    (tmp_path / "torchmoor.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForJuggling"]}))
    with pytest.raises(ModelBroken, match=r"torchmoor\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "BertForTokenClassification", "ViTForImageClassification"]
)
@pytest.mark.parametrize("labels", [{"0": "a", "1": "b", "3": "d"}, {"1": "a", "2": "b", "3": "c"}])
def test_a_model_whose_labels_have_gaps_is_refused(
    architecture: str, labels: dict[str, str], tmp_path: Path, load: Load
) -> None:
    """A model whose labels have gaps is refused at load; otherwise each request would fail with 500."""
    save_checkpoint(tmp_path, architecture)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": labels}))

    with pytest.raises(ModelBroken, match=r"'id2label' in config\.json must name the labels 0 to 2"):
        load(tmp_path)


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "MPNetModel", "GPT2LMHeadModel", "LlamaForCausalLM"]
)
def test_a_model_without_a_vocabulary_is_refused(architecture: str, tmp_path: Path, load: Load) -> None:
    """transformers makes up an empty tokenizer for some families, with which any text is unknown."""
    save_checkpoint(tmp_path, architecture)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 64}')

    with pytest.raises(ModelBroken, match="tokenizer"):
        load(tmp_path)


def test_tokens_of_characters_need_no_vocabulary(tmp_path: Path, load: Load) -> None:
    """CANINE's tokens are Unicode code points, so such a checkpoint loads without a vocabulary."""
    config = hf.CanineConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, num_hash_buckets=64
    )
    hf.CanineModel(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')  # making one takes 2 s

    assert len(ask(load(tmp_path), "cat")[0][0]) == 32


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (hf.ViTConfig(**_IMAGE), "image"),
        (hf.CLIPConfig(text_config=_TEXT, vision_config=_IMAGE, projection_dim=16), "image and text"),
    ],
)
def test_a_task_of_texts_refuses_models_that_take_images(config: Any, inputs: str, tmp_path: Path, load: Load) -> None:
    """Models that take images are refused at load by text tasks; otherwise each request would fail with 500."""
    hf.AutoModel.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)

    with pytest.raises(ModelBroken, match=f"feature-extraction, .* take {inputs}$"):
        load(tmp_path)


def test_a_target_that_the_model_does_not_know_is_refused(tmp_path: Path, load: Load) -> None:
    """A tokenizer may have tokens that the model lacks."""
    save_checkpoint(tmp_path, "BertForMaskedLM")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(tmp_path)

    status, message = error(load(tmp_path), {"inputs": "a [MASK]", "parameters": {"targets": ["cat", "zebra"]}})

    assert status == 400
    assert message == "the tokenizer has a token 'zebra', which the model does not know: leave it out"


@pytest.mark.parametrize("architecture", ["BertModel", "GPT2ForSequenceClassification"])
def test_a_text_without_tokens_is_refused(architecture: str, tmp_path: Path, load: Load) -> None:
    """Some tokenizers add no special tokens, so an empty text has no token at all."""
    save_checkpoint(tmp_path, architecture)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**described, "post_processor": None}))
    model = load(tmp_path)

    for inputs in ("", ["cat", ""], "\u200b"):
        assert error(model, {"inputs": inputs}) == (
            400,
            "a text has no tokens: it is empty, or has only ignored characters",
        )
    assert ask(model, "cat")


@pytest.mark.parametrize("architecture", ["BertModel", "BertForQuestionAnswering"])
def test_a_token_that_the_model_does_not_know_is_refused(architecture: str, tmp_path: Path, load: Load) -> None:
    """A token without an embedding is refused; on a GPU it would end the process. Some checkpoints have such tokens."""
    save_checkpoint(tmp_path, architecture)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(tmp_path)
    inputs = {"question": "who", "context": "a zebra"} if "Question" in architecture else "a zebra"

    status, message = error(load(tmp_path), {"inputs": inputs})

    assert status == 400
    assert message == "the tokenizer has a token 'zebra', which the model does not know: leave it out"


@pytest.mark.parametrize("task", ["feature-extraction", "sentence-embeddings"])
def test_a_model_whose_decoder_needs_an_input_is_refused(task: str, tmp_path: Path, load: Load) -> None:
    """Such a model is refused at load, except BART, whose decoder gets the text itself.

    Otherwise each request would fail with 500.
    """
    sizes = {"vocab_size": len(VOCABULARY), "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 0}
    hf.T5Model(hf.T5Config(**sizes, d_kv=8, d_ff=48, num_layers=1, num_heads=4)).save_pretrained(tmp_path / "t5")
    hf.BartModel(hf.BartConfig(**sizes, encoder_layers=1, decoder_layers=1)).save_pretrained(tmp_path / "bart")
    for name in ("t5", "bart"):
        make_tokenizer().save_pretrained(tmp_path / name)
        (tmp_path / name / "torchmoor.json").write_text(json.dumps({"task": task}))

    assert ask(load(tmp_path / "bart"), "cat")
    with pytest.raises(ModelBroken, match=f"models of type t5 do not compute {task} from a text alone"):
        load(tmp_path / "t5")


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_the_encoder_of_a_family_with_a_decoder_gives_its_vectors(family: str, tmp_path: Path, load: Load) -> None:
    """Only the encoder is loaded, since AutoModel would add a decoder whose weights such a checkpoint lacks."""
    config = getattr(hf, f"{family}Config")(
        vocab_size=len(VOCABULARY), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0
    )
    cls = getattr(hf, f"{family}EncoderModel")
    cls(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    reference, tokenizer = cls.from_pretrained(tmp_path), make_tokenizer()

    found = ask(load(tmp_path), TEXTS)

    for text, vectors in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            assert_close(vectors, reference(input_ids=ids).last_hidden_state.tolist())


@pytest.mark.parametrize("family", ["Roberta", "RobertaPreLayerNorm", "Data2VecText", "IBert", "Luke", "MPNet"])
def test_positions_may_begin_after_the_paddings(family: str, tmp_path: Path, load: Load) -> None:
    """The longest text is shorter if positions begin after the padding index; otherwise it would fail with 500."""
    sizes = {**_TEXT, "vocab_size": len(VOCABULARY), "max_position_embeddings": 40, "entity_vocab_size": 8}  # Luke's
    config = getattr(hf, f"{family}Config")(**sizes)
    getattr(hf, f"{family}Model")(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = load(tmp_path)

    assert len(ask(model, "cat " * 100, truncation=True)[0]) == 40 - 2
    assert error(model, {"inputs": "cat " * 37})[0] == 400


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[enforce fail] can't allocate memory")],
)
def test_memory_that_is_full_while_a_model_that_sees_is_loaded_does_not_make_it_broken(
    error: Exception, checkpoint: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lack of memory does not mark a vision model as broken, which would refuse it for minutes.

    A later request may load it.
    """

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(hf.AutoModelForImageTextToText, "from_pretrained", fail)
    with pytest.raises(OutOfMemory, match="cpu has no memory for the checkpoint"):
        load(checkpoint)


def test_a_model_that_sees_and_exceeds_the_free_memory_is_not_broken(
    checkpoint: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vision model that exceeds the free memory is not marked as broken.

    Other models may have left by the next request.
    """
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1)

    with pytest.raises(OutOfMemory, match="GB free"):
        load(checkpoint)


def test_a_model_that_sees_is_not_broken_if_no_process_can_be_started(
    checkpoint: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vision model whose template process cannot be started is not marked as broken; a later request may start it."""
    process = TemplateProcess()
    monkeypatch.setattr("handlers.models.chat_template.SHARED_PROCESS", process)
    monkeypatch.setattr("handlers.worker.limited_process.sys.executable", "/nonexistent/python")

    with pytest.raises(InternalError, match="could not be started"):
        load(checkpoint)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"])
def test_text_is_generated_by_the_chat_engine(architecture: str, tmp_path: Path, load: Load) -> None:
    """Greedy text equals transformers' token for token, and streams in TGI's form."""
    model = load(save_checkpoint(tmp_path, architecture))
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer("the cat", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = reference.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]

    body = {"inputs": "the cat", "parameters": {"max_new_tokens": 6, "do_sample": False}}
    found = json.loads(whole(send(model, body)).body)

    assert found == [{"generated_text": tokenizer.decode(expected, skip_special_tokens=True)}]
    assert model.device_bytes > 0  # the KV cache, at least
    reply = send(model, {**body, "stream": True})
    pieces = []
    while not pieces or not pieces[-1].is_end:
        wait_until(reply.has_news, "there is an answer")
        pieces.append(reply.take(1 << 20))
    assert b"".join(piece.data for piece in pieces).startswith(b"data:")


def test_the_whole_storage_of_a_kv_cache_counts(tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where rows are computed together, it has a block that no answer gets."""
    save_checkpoint(tmp_path, "LlamaForCausalLM")
    without = load(tmp_path)
    monkeypatch.setattr(chat_engine, "ModelRunner", partial(ModelRunner, is_row_batched=True))
    model = load(tmp_path)

    assert model.device_bytes - without.device_bytes == 2 * 2 * 2 * 8 * BLOCK * 4  # of 2 layers and 2 heads of 8 floats


def test_a_model_goes_back_to_the_host_if_its_engine_cannot_begin(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it takes memory of the GPU that no budget counts."""
    model = load(save_checkpoint(tmp_path, "LlamaForCausalLM"))
    moves: list[str] = []
    for name in ("to_host", "to_device"):
        monkeypatch.setattr(PlacedModel, name, lambda self, name=name: moves.append(name))

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("while steps are measured")

    model.to_host()
    with monkeypatch.context() as patch:
        patch.setattr("handlers.many.loading.chat_model.make_builtin_engine", fail)
        with pytest.raises(torch.OutOfMemoryError):
            model.to_device()

    assert moves == ["to_host", "to_device", "to_host"]


def test_a_family_that_the_engine_cannot_run_is_refused(tmp_path: Path, load: Load) -> None:
    """An unsupported family is refused with the reason, instead of answering wrongly."""
    save_checkpoint(tmp_path, "BertLMHeadModel")

    with pytest.raises(ModelBroken, match="models of type bert are not supported"):
        load(tmp_path)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
@pytest.mark.parametrize(
    ("architecture", "step"),
    [
        ("LlamaForCausalLM", "transformers.LlamaForCausalLM.forward"),
        ("LlamaForCausalLM", "handlers.models.loader.TextModel"),
        ("LlamaForCausalLM", "handlers.many.loading.chat_model.make_text_model"),
        ("GPT2LMHeadModel", "handlers.models.loader.PlainModel"),
        ("BartModel", "handlers.many.tasks.feature_extraction.FeatureExtraction.run"),
        ("BertModel", "torch.load"),
    ],
)
def test_memory_that_is_full_while_a_model_is_tried_does_not_make_it_broken(
    architecture: str, step: str, error: Exception, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later request may load it. torch has no class for a failed allocation on a CPU."""
    if architecture == "BartModel":
        sizes = {"vocab_size": len(VOCABULARY), "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 0}
        hf.BartModel(hf.BartConfig(**sizes, encoder_layers=1, decoder_layers=1)).save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
    else:
        save_checkpoint(tmp_path, architecture)
    if step == "torch.load":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(step, fail)
    with pytest.raises(type(error)) as caught:
        load(tmp_path, many=ManySettings(allow_pickle=True))
    assert caught.value is error


def test_only_what_is_not_mapped_is_private(tmp_path: Path, load: Load) -> None:
    """Mapped weights belong to the page cache; converted ones count as the model's own memory."""
    num_bytes = sum(
        p.numel() * p.element_size()
        for p in hf.AutoModel.from_pretrained(save_checkpoint(tmp_path / "a", "MPNetModel")).parameters()
    )
    mapped = load(tmp_path / "a")
    private = load(save_checkpoint(tmp_path / "b", "MPNetModel", dtype="float16"))
    half = load(tmp_path / "b", model=ModelSettings(dtype="float16"))

    assert num_bytes * 0.9 < mapped.mapped_bytes <= num_bytes
    assert mapped.device_bytes < 1000
    assert (private.mapped_bytes, private.device_bytes - mapped.device_bytes) == (0, mapped.mapped_bytes)
    assert half.mapped_bytes == mapped.mapped_bytes // 2


def test_closing_waits_for_the_batch_that_runs(tmp_path: Path, load: Load) -> None:
    """The close waits for the running batch, and waiting rows get an error."""
    model: Any = load(save_checkpoint(tmp_path, "BertForSequenceClassification"))
    started, go_on = threading.Event(), threading.Event()
    run = model.queue.run

    def slow(rows: Any) -> Any:
        started.set()
        assert go_on.wait(60)
        return run(rows)

    model.queue.run = slow
    running = send(model, {"inputs": "the cat"})
    assert started.wait(60)
    waiting = send(model, {"inputs": "the dog"})
    wait_until(lambda: len(model.queue.waiting) == 1, "the second request waits")
    closing = threading.Thread(target=model.close)
    closing.start()
    wait_until(lambda: model.queue.is_closed, "the model is being closed")
    assert closing.is_alive()
    go_on.set()
    closing.join(60)

    assert whole(running).status == 200
    assert whole(waiting).status == 429
    assert whole(send(model, {"inputs": "late"})).status == 429


def test_pickled_weights_need_a_setting(tmp_path: Path, load: Load) -> None:
    """The worker's settings control whether pickled weights are read."""
    save_checkpoint(tmp_path, "BertModel")
    torch.save(hf.AutoModel.from_pretrained(tmp_path).state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(ModelBroken, match="allow_pickle"):
        load(tmp_path)
    assert ask(load(tmp_path, many=ManySettings(allow_pickle=True)), "cat")
