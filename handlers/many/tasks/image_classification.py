"""Image classification: images to labels with scores."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handlers.chat.images.loader import ImageLoader
from handlers.errors import InvalidRequest
from handlers.many.compute import TaskRow
from handlers.many.request import ParameterTypes, TaskRequest, as_list
from handlers.many.tasks.task import Input, TaskWork
from handlers.many.tasks.text_classification import choose_function, label_scores
from handlers.models.processor import scaled_side
from handlers.requests.reply import PendingReply
from handlers.settings.tasks import TaskSettings

PARAMETERS: ParameterTypes = {"top_k": int, "function_to_apply": str}
DEFAULT_TOP_K = 5
PIXELS_PER_TOKEN = 256  # a patch of 16 by 16 counts as one token of a batch


class ImageClassification:
    """The body itself, or {"inputs": base64, a data URL, an address, or a list of those}.

    Answers the best labels, [{"label", "score"}, ...], of each image.
    """

    name = "image-classification"

    def __init__(self, model: Any, processor: Any, settings: TaskSettings, intake: ImageLoader) -> None:
        self.model = model
        self._processor = processor
        self._side = scaled_side(processor)
        self._settings = settings
        self.intake = intake

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        inputs: list[Input] = []
        num_bytes = held_bytes = 0  # of the pixels so far, and of the request's shares of the budget
        references = as_list(request.inputs, self._settings.max_inputs)
        for reference in references:
            if not isinstance(reference, bytes | str):
                raise InvalidRequest("'inputs' must be an image: base64, a data URL or an address", param="inputs")
            reply.raise_if_cancelled()
            data = self.intake.read(reference, reply, held_bytes)
            with self.intake.decoded(data, reply.raise_if_cancelled, self._side, held_bytes) as image:
                pixels: Tensor = self._processor(images=image, return_tensors="pt")["pixel_values"][0]
            self._check_size(pixels, len(references))
            if not inputs and len(references) > 1:  # without the last one's, beside which nothing is decoded
                held_bytes = (len(references) - 1) * pixels.nbytes
                self._hold(held_bytes, reply, is_held=True)
            num_bytes += pixels.nbytes
            if num_bytes > held_bytes:
                self._hold(num_bytes - held_bytes, reply, is_next=held_bytes > 0)
                held_bytes = num_bytes
            inputs.append(
                Input(pixels, pixels.shape[-1] * pixels.shape[-2] // PIXELS_PER_TOKEN + 1, tuple(pixels.shape))
            )
        function = choose_function(request, self.model.config)
        top_k = request.positive("top_k", DEFAULT_TOP_K)

        def finish(outputs: Sequence[Tensor]) -> Any:
            found = [label_scores(logits, self.model.config, function)[:top_k] for logits in outputs]
            return found if isinstance(request.inputs, list) else found[0]

        return TaskWork(inputs, finish)

    def _check_size(self, pixels: Tensor, number: int) -> None:
        """Raise InvalidRequest if the pixels of a request with this number of images cannot fit together."""
        num_bytes, max_bytes = number * pixels.nbytes, self.intake.decoding.max_bytes
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"the pixels of {number} images take {num_bytes} bytes, more than {max_bytes} "
                "(handler.intake.decoding_bytes): send fewer at once",
                param="inputs",
            )

    def _hold(self, num_bytes: int, reply: PendingReply, *, is_next: bool = False, is_held: bool = False) -> None:
        """Count pixels, as they are scaled for the model, until the answer's end. Raises OutOfMemory."""
        budget = self.intake.decoding
        budget.take(num_bytes, reply.raise_if_cancelled, is_next=is_next, is_held=is_held)
        reply.on_end(partial(budget.release, num_bytes, is_held=is_held))

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Tensor]:
        """Return float32 logits."""
        pixels = torch.stack([row.inputs for row in rows]).to(self.model.device, self.model.dtype)
        return list(self.model(pixel_values=pixels).logits.float().cpu())
